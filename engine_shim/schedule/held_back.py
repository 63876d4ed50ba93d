"""Pages given up while steps are launched: none is free before the last of these steps has been committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from engine_shim.cache.pool import PagePool


class HeldBack:
    """What was given up since each launched step, oldest first.

    A launched step reads and writes by the tables it was given. What is given up after that may still be in them, so it
    waits until that step, and any launched before it, has been committed. With nothing launched pages are free at once.
    """

    def __init__(self, pools: Sequence[PagePool]) -> None:
        self._pools = pools
        self._steps: deque[list[tuple[int, tuple[int, ...]]]] = deque()

    def launched(self) -> None:
        """One more step is launched."""
        self._steps.append([])

    def committed(self) -> None:
        """The oldest step is over: what was given up while it was the newest is free."""
        for group, pages in self._steps.popleft():
            self._pools[group].free(pages)

    def give_up(self, group: int, pages: Iterable[int]) -> None:
        """Pages that have no owner from here on."""
        if self._steps:
            self._steps[-1].append((group, tuple(pages)))
        else:
            self._pools[group].free(pages)

    def pages(self) -> list[list[int]]:
        """What is held back of each group."""
        held: list[list[int]] = [[] for _ in self._pools]
        for step in self._steps:
            for group, pages in step:
                held[group] += pages
        return held
