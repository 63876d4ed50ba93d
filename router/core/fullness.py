"""Ranks that have just said that they are full are not asked second.

A request goes to the rank that was chosen for it, whatever that has told others: it may have room again, and it may be
where the session is at home. But where a whole fleet is full, each request that then tries one rank after another is
as many requests to engines that have no time for them. So once a rank has turned it away, those that have just turned
others away are taken at their word, and when no others are left the client is told at once.

| event | then |
|---|---|
| a rank answers 408, 429 or 503 | it is full for a second: ``Retry-After`` has no smaller unit |
| a request ends well there | it is not: there is a place free |
"""

from __future__ import annotations

from typing import Final

FULL_SECONDS: Final = 1.0
_NONE: Final = frozenset[int]()


class FullRanks:
    """What ranks said, by slot. ``now`` from one monotonic clock."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def turned_away(self, slot: int, *, now: float) -> None:
        """The rank had no room for a request."""
        self._until[slot] = now + FULL_SECONDS

    def forget(self, slot: int) -> None:
        """A request ended well there, or the rank is gone."""
        self._until.pop(slot, None)

    def slots(self, *, now: float) -> frozenset[int]:
        """Those that are full as far as is known. Empty almost always, and then it costs nothing."""
        if not self._until:
            return _NONE
        return frozenset(slot for slot, until in self._until.items() if now < until)
