"""Ranks that keep failing are left alone for a while, but never more than a share of the fleet.

What happens to one rank:

| state | event | next |
|---|---|---|
| closed | the n-th failure in a row | open, unless as many others are open as may be: then it stays closed |
| closed | a success | closed, failures forgotten |
| open | its time is over, and a request goes there | trial |
| trial | a success | closed |
| trial | a failure | open, for twice as long (to a limit) |
| trial | neither (a 4xx, the client left, the rank was full) | open with its time over: the next request tries again |

A failure is the rank's own: no connection, a reset, silence, nonsense, a 5xx. A 429 or 503 is a full rank, another 4xx
the client's fault, which a rank that fails at all it accepts still finds; and a client that leaves says nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What an attempt's end says of its rank."""

    GOOD = "good"
    BAD = "bad"
    NEITHER = "neither"


class BreakerState(StrEnum):
    """As shown to operators."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


@dataclass(frozen=True, slots=True)
class BreakerParameters:
    """``failures`` in a row open a breaker (0: never), for ``open_seconds`` at first."""

    failures: int = 5
    open_seconds: float = 5.0
    longest_open_seconds: float = 60.0
    max_open_ratio: float = 0.5


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    opened: int = 0  # times in a row without a success between
    open_until: float = -math.inf
    is_open: bool = False
    is_tried: bool = False


class Breakers:
    """One breaker a slot. ``now`` from one monotonic clock; ``ranks`` is how many the fleet has."""

    def __init__(self, parameters: BreakerParameters) -> None:
        self._parameters = parameters
        self._breakers: dict[int, _Breaker] = {}
        self._open = 0

    def closed_to(self, *, now: float) -> frozenset[int]:
        """Slots that should be given nothing now. Empty almost always, and then it costs nothing."""
        if not self._open:
            return frozenset()
        return frozenset(
            slot
            for slot, breaker in self._breakers.items()
            if breaker.is_open and (breaker.is_tried or now < breaker.open_until)
        )

    def sent(self, slot: int, *, now: float) -> None:
        """A request goes to ``slot``. If its breaker's time is over, this is the trial."""
        if self._open:
            breaker = self._breakers.get(slot)
            if breaker is not None and breaker.is_open and now >= breaker.open_until:
                breaker.is_tried = True

    def ended(self, slot: int, verdict: Verdict, *, ranks: int, now: float) -> None:
        """An attempt on ``slot`` is over."""
        breaker = self._breakers.get(slot)
        if verdict is Verdict.NEITHER:
            if breaker is not None:
                breaker.is_tried = False
        elif verdict is Verdict.GOOD:
            if breaker is not None:
                self.forget(slot)
        else:
            self._failed(self._breakers.setdefault(slot, _Breaker()), ranks=ranks, now=now)

    def _failed(self, breaker: _Breaker, *, ranks: int, now: float) -> None:
        parameters = self._parameters
        breaker.failures += 1
        if breaker.is_open:
            if not breaker.is_tried:
                return  # sent before it opened, or when nothing else was left
            breaker.is_tried = False
        elif self._may_open(breaker, ranks=ranks):
            breaker.is_open = True
            self._open += 1
        else:
            return
        seconds = parameters.open_seconds * 2.0 ** min(breaker.opened, 30)
        breaker.open_until = now + min(seconds, parameters.longest_open_seconds)
        breaker.opened += 1

    def _may_open(self, breaker: _Breaker, *, ranks: int) -> bool:
        enough = self._parameters.failures
        return 0 < enough <= breaker.failures and self._open + 1 <= self._parameters.max_open_ratio * ranks

    def forget(self, slot: int) -> None:
        """The rank has answered well, or is gone."""
        breaker = self._breakers.pop(slot, None)
        if breaker is not None and breaker.is_open:
            self._open -= 1

    def state(self, slot: int, *, now: float) -> BreakerState:
        """For operators; an open breaker whose time is over is on trial."""
        breaker = self._breakers.get(slot)
        if breaker is None or not breaker.is_open:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < breaker.open_until and not breaker.is_tried else BreakerState.TRIAL
