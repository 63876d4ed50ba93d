"""Attention over paged keys and values: ``plan`` does the index arithmetic, ``paged`` the attention (torch)."""
