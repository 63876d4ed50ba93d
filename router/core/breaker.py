"""Ranks that keep failing, or take nothing, are left alone for a while, but never more than a share of the fleet.

What happens to one rank:

| state | event | next |
|---|---|---|
| closed | the n-th failure in a row | open, unless as many others are open as may be: then it stays closed |
| closed | a success | closed, failures forgotten |
| closed | the n-th refusal in a row, the first one seconds ago | open, as above: a rank that is only full takes some |
| open | its time is over, and a request goes there | trial |
| trial | an answer begins | trial, while the next request may go, too: it may be long until that answer ends |
| trial | a success | closed |
| trial | a failure | open, for twice as long (to a limit) |
| trial | a refusal in such a row | open, for as long as at first |
| trial | neither (a 4xx, the client left, the rank was full) | open with its time over: the next request tries again |

A failure is the rank's own: no connection, a reset, silence, nonsense, a 5xx. A 429 or 503 is the refusal of a full
rank, another 4xx the client's fault, which a rank that fails at all it accepts still finds; and a client that leaves
says nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What an attempt's end says of its rank."""

    GOOD = "good"
    BAD = "bad"
    FULL = "full"
    NEITHER = "neither"


#: A rank that has refused everything for so long is not just full.
REFUSING_SECONDS = 5.0


class BreakerState(StrEnum):
    """As shown to operators."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


@dataclass(frozen=True, slots=True)
class BreakerParameters:
    """``failures`` in a row, or refusals, open a breaker (0: never), for ``open_seconds`` at first."""

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
    has_begun: bool = False  # to answer the one that tries it
    refusals: int = 0  # in a row, without an answer between
    refusing_since: float = 0.0


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
            if breaker.is_open and (now < breaker.open_until or (breaker.is_tried and not breaker.has_begun))
        )

    def sent(self, slot: int, *, now: float) -> None:
        """A request goes to ``slot``. If its breaker's time is over, this is the trial."""
        if self._open:
            breaker = self._breakers.get(slot)
            if breaker is not None and breaker.is_open and now >= breaker.open_until:
                breaker.is_tried, breaker.has_begun = True, False

    def begun(self, slot: int) -> None:
        """An answer of ``slot`` has begun: it takes requests, and fails none at once."""
        breaker = self._breakers.get(slot)
        if breaker is not None:
            breaker.has_begun, breaker.refusals = True, 0

    def ended(self, slot: int, verdict: Verdict, *, ranks: int, now: float) -> None:
        """An attempt on ``slot`` is over."""
        breaker = self._breakers.get(slot)
        if verdict is Verdict.NEITHER:
            if breaker is not None:
                breaker.is_tried = False
        elif verdict is Verdict.GOOD:
            if breaker is not None:
                self.forget(slot)
        elif verdict is Verdict.FULL:
            self._refused(self._breakers.setdefault(slot, _Breaker()), ranks=ranks, now=now)
        else:
            self._failed(self._breakers.setdefault(slot, _Breaker()), ranks=ranks, now=now)

    def _failed(self, breaker: _Breaker, *, ranks: int, now: float) -> None:
        parameters = self._parameters
        breaker.failures += 1
        if breaker.is_open:
            if not breaker.is_tried:
                return  # sent before it opened, or when nothing else was left
            breaker.is_tried = False
        elif not self._opens(breaker, breaker.failures, ranks=ranks):
            return
        seconds = parameters.open_seconds * 2.0 ** min(breaker.opened, 30)
        breaker.open_until = now + min(seconds, parameters.longest_open_seconds)
        breaker.opened += 1

    def _refused(self, breaker: _Breaker, *, ranks: int, now: float) -> None:
        if not breaker.refusals:
            breaker.refusing_since = now
        breaker.refusals += 1
        was_tried, breaker.is_tried = breaker.is_tried, False
        if now - breaker.refusing_since < REFUSING_SECONDS or (breaker.is_open and not was_tried):
            return
        if breaker.is_open or self._opens(breaker, breaker.refusals, ranks=ranks):
            breaker.open_until = now + self._parameters.open_seconds

    def _opens(self, breaker: _Breaker, times: int, *, ranks: int) -> bool:
        """Whether so many failures or refusals open it, of all that may be open."""
        enough = self._parameters.failures
        if not 0 < enough <= times or self._open + 1 > self._parameters.max_open_ratio * ranks:
            return False
        breaker.is_open = True
        self._open += 1
        return True

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
