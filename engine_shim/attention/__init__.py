"""Layers over cached state: ``plan`` does the index arithmetic, ``paged`` attention, ``recurrent`` delta nets."""
