"""How long one who joins a queue will wait, as far as those let go before tell."""

from __future__ import annotations

import math
from typing import Final

#: The share of the newest interval in the mean.
_WEIGHT: Final = 0.2
#: Nobody is told to come back later than this: by then all may have changed.
_MOST_SECONDS: Final = 600


class Turnover:
    """Told when somebody begins to wait where nobody did, and whenever one is let go; ``now`` from one clock."""

    def __init__(self) -> None:
        self._mean_seconds = 0.0
        #: Since when nobody has been let go; None while nobody has waited yet, which says nothing.
        self._since: float | None = None

    def begin(self, *, now: float) -> None:
        """Somebody waits, the only one."""
        self._since = now

    def passed(self, *, now: float) -> None:
        """One was let go."""
        seconds = self._still_seconds(now)
        self._since = now
        self._mean_seconds += (_WEIGHT if self._mean_seconds else 1.0) * (seconds - self._mean_seconds)

    def wait_seconds(self, ahead: int, *, now: float) -> int:
        """Whole seconds until so many have been let go, 1 at least; a queue that stands still takes ever longer."""
        each_seconds = max(self._mean_seconds, self._still_seconds(now))
        return max(1, min(_MOST_SECONDS, math.ceil(each_seconds * ahead)))

    def _still_seconds(self, now: float) -> float:
        return now - self._since if self._since is not None else 0.0
