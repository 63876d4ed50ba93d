"""The disk's copies: one file with a slot for each page, each with a header that proves what is in it.

::

    slot    magic "HPG1" | group u16 | bytes u32 | name u64 | xxh3-128 of all that and the contents | contents

A slot that is short, changed, or holds something else than its name says is a miss. The file has no name: it belongs to
one process and goes with it, however that ends, so nothing of another model or another run is ever read.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import xxhash

_HEADER = struct.Struct("<4sHIQ")
_DIGEST_BYTES = 16
_MAGIC = b"HPG1"


class DiskPool:
    """Slots in a file. ``page_bytes[g]`` is the size of a page of group g, ``pages[g]`` how many slots it has.

    Raises ``OSError`` where the file cannot be made. ``folder`` is made if need be. Only one thread at a time calls it.
    """

    def __init__(self, folder: Path, *, page_bytes: Sequence[int], pages: Sequence[int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._slot_bytes = [_HEADER.size + _DIGEST_BYTES + size for size in page_bytes]
        ends = accumulate(size * count for size, count in zip(self._slot_bytes, pages, strict=True))
        self._starts = [0, *ends][:-1]
        self._handle = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by ``close``
        self._file = self._handle.fileno()

    def store(self, group: int, slot: int, name: int, contents: bytes) -> None:
        """Write a page. Raises ``OSError``, for one where the disk is full."""
        header = _HEADER.pack(_MAGIC, group, len(contents), name)
        data = b"".join((header, xxhash.xxh3_128_digest(header + contents), contents))
        written = os.pwrite(self._file, data, self._offset(group, slot))
        if written != len(data):
            raise OSError(f"{written} of {len(data)} bytes were written")

    def load(self, group: int, slot: int, name: int) -> bytes | None:
        """Read a page; None if it is not there, whole and the right one."""
        try:
            data = os.pread(self._file, self._slot_bytes[group], self._offset(group, slot))
        except OSError:
            return None
        header, contents = data[: _HEADER.size], data[_HEADER.size + _DIGEST_BYTES :]
        if header != _HEADER.pack(_MAGIC, group, self._slot_bytes[group] - _HEADER.size - _DIGEST_BYTES, name):
            return None
        digest = data[_HEADER.size : _HEADER.size + _DIGEST_BYTES]
        return contents if digest == xxhash.xxh3_128_digest(header + contents) else None

    def close(self) -> None:
        """Give the file up."""
        self._handle.close()

    def _offset(self, group: int, slot: int) -> int:
        return self._starts[group] + slot * self._slot_bytes[group]
