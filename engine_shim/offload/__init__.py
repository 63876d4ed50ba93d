"""Copies of the cache below the device: their bytes, in host memory and on disk, and the threads that move them."""
