"""A deadline that moves with every request and fires almost never."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

#: A loop that did not run looks at its timers before its sockets, where what was waited for may lie. It has a moment to
#: be read, and a longer one after a delay that shows: that a machine stood still is no reason to give all up whose time
#: was over then.
READING_SECONDS: Final = 0.02
_LATE_SECONDS: Final = 0.05
LONG_READING_SECONDS: Final = 0.25


class Watchdog:
    """Calls ``expired`` once the time set has passed, and all that has come by then could be read. Moving the deadline
    later costs an assignment, not a timer.
    """

    __slots__ = ("_armed_for", "_deadline", "_expired", "_extended", "_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._deadline = inf
        self._armed_for = inf
        #: The last deadline by which what had come before another one should be read.
        self._extended = inf
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float, *, by: float = inf) -> float:
        """Expire ``seconds`` from now, whatever was set before, at the latest when the loop's clock shows ``by``.

        Returns what it shows now.
        """
        now = self._loop.time()
        deadline = now + seconds
        if by < deadline:
            deadline = by
        self._deadline = deadline
        if deadline < self._armed_for:
            self._arm()
        return now

    def clear(self) -> None:
        """Expire never, until set again."""
        self._deadline = inf

    def stop(self) -> None:
        """Leave no timer behind. The watchdog's owner is gone."""
        self._deadline = inf
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._armed_for = self._deadline
        self._handle = self._loop.call_at(self._deadline, self._fire)

    def _fire(self) -> None:
        self._handle = None
        self._armed_for = inf
        now = self._loop.time()
        if self._deadline <= now:
            if self._deadline == self._extended:
                self._deadline = inf
                self._expired()
                return
            is_late = self._deadline + _LATE_SECONDS < now
            self._deadline = self._extended = now + (LONG_READING_SECONDS if is_late else READING_SECONDS)
        if self._deadline < inf:
            self._arm()
