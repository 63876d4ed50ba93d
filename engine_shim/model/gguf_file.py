"""The GGUF container: metadata and where each tensor lies. No torch, and no numpy.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The ``gguf`` package
reads the same, but a vocabulary of 50,000 tokens takes it seconds; it is used for what is hard, the quantised blocks.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_shim.model.config import UnsupportedModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor. ``shape`` is outermost first, ``kind`` GGML's number of its type, ``offset`` in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What stands before the tensor data."""

    metadata: Mapping[str, object]
    tensors: tuple[TensorPlace, ...]


def read_gguf_file(path: Path) -> GgufFile:
    """Read the head of a GGUF file; raises ``UnsupportedModelError`` if it is none, or is cut short."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data).file()
        except struct.error as error:
            raise UnsupportedModelError(f"{path} ends in the middle of its GGUF metadata") from error


class _Reader:
    """A cursor over the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def file(self) -> GgufFile:
        magic, version, tensor_count, field_count = self._unpack("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise UnsupportedModelError(f"not a GGUF file of version 2 or 3: it begins with {magic!r}, {version}")
        metadata = {self._string(): self._value(self._number("I")) for _ in range(field_count)}
        places = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        assert isinstance(alignment, int)
        start = -(-self._at // alignment) * alignment
        tensors = tuple(TensorPlace(name, shape, kind, start + offset) for name, shape, kind, offset in places)
        return GgufFile(metadata=metadata, tensors=tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        innermost_first = self._unpack(f"{self._number('I')}Q")
        kind, offset = self._unpack("IQ")
        return name, tuple(reversed(innermost_first)), kind, offset

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._unpack("IQ")
            if element in _SCALARS:
                return list(self._unpack(f"{count}{_SCALARS[element]}"))
            return [self._value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise UnsupportedModelError(f"GGUF metadata of unknown type {kind}")
        return self._unpack(_SCALARS[kind])[0]

    def _string(self) -> str:
        text: bytes = self._unpack(f"{self._number('Q')}s")[0]
        return text.decode()

    def _number(self, code: str) -> int:
        number: int = self._unpack(code)[0]
        return number

    def _unpack(self, codes: str) -> tuple[Any, ...]:
        layout = f"<{codes}"
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values
