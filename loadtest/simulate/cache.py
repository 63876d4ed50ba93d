"""One rank's cache: least recently used first out, from the tail of what is oldest, never what is in use.

All counts are blocks. A run holds blocks from its start; if a run holds any, the runs before it on its path are whole.
The order of ``_idle`` keeps that true: a path is given back leaf first, so that a run always goes before its parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from loadtest.simulate.runs import Path, Run

#: Called with a run and the blocks of it that remain.
Evicted = Callable[[Run, int], None]


class RunCache:
    """``capacity`` blocks shared by resident runs and by ``extra`` blocks, which belong to replies in progress."""

    def __init__(self, capacity: int, evicted: Evicted) -> None:
        self.capacity = capacity
        self.used = 0
        self.pinned = 0
        self.resident: dict[Run, int] = {}
        self._pins: dict[Run, int] = {}
        self._idle: OrderedDict[Run, None] = OrderedDict()
        self._evicted = evicted

    def match(self, path: Path) -> int:
        """Blocks of the prompt that are here."""
        found = 0
        for run, blocks in path:
            held = self.resident.get(run, 0)
            if held < blocks:
                return found + held
            found += blocks
        return found

    def take(self, path: Path, extra: int) -> bool:
        """Pin the whole path and reserve ``extra`` blocks, evicting what it must. False: no room beside the pinned."""
        total = sum(blocks for _, blocks in path)
        need = total - self.match(path) + extra
        newly_pinned = sum(self.resident.get(run, 0) for run, _ in path if run not in self._pins)
        if self.pinned + newly_pinned + need > self.capacity:
            return False
        for run, _ in path:
            self._pins[run] = self._pins.get(run, 0) + 1
            self._idle.pop(run, None)
        self.pinned += newly_pinned
        self._make_room(need)
        for run, blocks in path:
            held = self.resident.get(run, 0)
            if blocks > held:
                self.resident[run] = blocks
        self.used += need
        self.pinned += need
        return True

    def give_back(self, path: Path, extra: int) -> None:
        """Unpin the path and free the extra blocks."""
        self.used -= extra
        self.pinned -= extra
        for run, _ in reversed(path):
            pins = self._pins[run] - 1
            if pins:
                self._pins[run] = pins
            else:
                del self._pins[run]
                self.pinned -= self.resident[run]
                self._idle[run] = None

    def _make_room(self, need: int) -> None:
        missing = self.used + need - self.capacity
        while missing > 0:
            run = next(iter(self._idle))
            held = self.resident[run]
            freed = min(held, missing)
            self.used -= freed
            missing -= freed
            if freed == held:
                del self._idle[run]
                del self.resident[run]
            else:
                self.resident[run] = held - freed
            self._evicted(run, held - freed)

    def check(self) -> None:
        """Raises ``AssertionError`` unless the books agree. For tests: it looks at everything."""
        held = sum(self.resident.values())
        pinned = sum(self.resident[run] for run in self._pins)
        extra = self.used - held
        assert extra >= 0, "resident runs are more than what is used"
        assert self.pinned == pinned + extra, "pins do not add up"
        assert self.used <= self.capacity, "over capacity"
        assert self.resident.keys() == self._pins.keys() | self._idle.keys(), "a run is neither in use nor idle"
        assert not self._pins.keys() & self._idle.keys(), "a run is in use and idle"
