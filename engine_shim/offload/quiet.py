"""What fails over and over is told once a minute: a full or a broken disk fails at every piece."""

from __future__ import annotations

import time
from collections.abc import Callable

#: After one failure has been told, those that follow are counted for so long before the next one is.
QUIET_SECONDS = 60.0


class Quiet:
    """Whether the next failure of one kind is told. Not thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._untold = 0
        self._quiet_until = float("-inf")

    def failed(self) -> int:
        """One more failure; how many there were since the last that was told, or 0 if this one is not to be told."""
        self._untold += 1
        now = self._clock()
        if now < self._quiet_until:
            return 0
        told, self._untold, self._quiet_until = self._untold, 0, now + QUIET_SECONDS
        return told
