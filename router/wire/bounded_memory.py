"""What is worth keeping of what clients send again, in so many bytes, whatever they send."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedMemory(Generic[Value]):
    """Values by their keys, each with the bytes it is charged with; the longest unused is forgotten first. Any thread
    may use it. Its length is in bytes.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._bytes

    def find(self, keys: Sequence[Hashable]) -> tuple[int, Value] | None:
        """The last of these keys that is known, by its place, and its value."""
        with self._lock:
            for place in range(len(keys) - 1, -1, -1):
                kept = self._kept.get(keys[place])
                if kept is not None:
                    self._kept.move_to_end(keys[place])
                    return place, kept[0]
        return None

    def keep(self, key: Hashable, value: Value, *, size_bytes: int, instead_of: Hashable = None) -> None:
        """Know a value, in the place of another key's if one is given."""
        with self._lock:
            for old in {key, instead_of}:
                self._bytes -= self._kept.pop(old, (None, 0))[1]
            self._kept[key] = value, size_bytes
            self._bytes += size_bytes
            while self._bytes > self.max_bytes:
                self._bytes -= self._kept.popitem(last=False)[1][1]
