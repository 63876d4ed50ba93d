"""Prompts computed by one shim and answered by another: what goes from cache to cache, and how."""
