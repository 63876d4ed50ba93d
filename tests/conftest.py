"""What must stand before anything is imported."""

from __future__ import annotations

import os

# Triton decides at import whether its kernels run in the interpreter, and transformers imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")
