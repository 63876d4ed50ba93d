"""Between host and disk: what arrives on the host goes on, and what a waiting request needs comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine_shim.cache.copies import Copies, Copy, Page
from engine_shim.cache.transfers import Place, moves_of
from engine_shim.schedule.flights import Flights
from engine_shim.schedule.transit import Flight, OffloadCounters, OffloadPlan

#: Pieces that are let pass after failures in a row, at most.
_LONGEST_PAUSE = 32


class Spills:
    """Copies from host to disk, a piece at a time, and from disk to host as they are asked for.

    A disk that takes nothing, as a full one, is left in peace: after one failure, two, three in a row what waits and
    1, 2, 4 pieces more stay on the host alone.
    """

    def __init__(self, copies: Copies, flights: Flights, *, plan: OffloadPlan, counters: OffloadCounters) -> None:
        self._copies = copies
        self._flights = flights
        self._plan = plan
        self._counters = counters
        self._unspilled: deque[Copy] = deque()
        self._spilling = False
        self._pause = self._passing = 0

    def landed(self, flight: Flight, *, whole: bool) -> None:
        """What has arrived on the host goes on to disk, and when a piece has been written the next one follows."""
        if flight.writes and flight.writes[0].place is Place.DISK:
            self._spilling = False
            self._pause = 0 if whole else min(2 * self._pause or 1, _LONGEST_PAUSE)
            self._passing = self._pause
            if not whole:
                self._unspilled.clear()
        elif flight.writes and whole and self._passing:
            self._passing -= 1
        elif whole:
            self._unspilled.extend(flight.writes)
        pairs: list[tuple[Copy, Copy]] = []
        while self._unspilled and not self._spilling and len(pairs) < self._plan.piece_pages:
            source = self._unspilled.popleft()
            gone = source.page.copies.get((Place.HOST, source.group)) is not source
            if gone or (Place.DISK, source.group) in source.page.copies:
                continue
            target = self._copies.reserve(source.page, Place.DISK, source.group)
            if target is None:
                self._unspilled.clear()
                break
            pairs.append((source, target))
        if pairs:
            self._spilling = True
            moves = moves_of(
                ((source.group, source.slot, target.slot, source.page.hash) for source, target in pairs),
                labels=[source.page.label for source, _ in pairs],
            )
            self._counters.spilled_pages += len(pairs)
            flight = Flight(reads=[source for source, _ in pairs], writes=[target for _, target in pairs])
            self._flights.send(Place.HOST, Place.DISK, moves, flight)

    def fetch(self, needed: Sequence[tuple[Page, int]]) -> set[int]:
        """Bring these (page, group) to the host, as much as it has room for: the transfers to wait for."""
        kept = [copy for page, _ in needed for copy in page.copies.values()]
        for copy in kept:
            self._copies.pin(copy)
        waits: set[int] = set()
        pairs: list[tuple[Copy, Copy]] = []
        for page, group in needed:
            there = page.copies.get((Place.HOST, group))
            source = page.ready(Place.DISK, group)
            if there is not None:
                if not there.is_ready:
                    waits.add(there.bringer)
            elif source is not None:
                target = self._copies.reserve(page, Place.HOST, group)
                if target is None:
                    break
                pairs.append((source, target))
        for start in range(0, len(pairs), self._plan.piece_pages):
            waits.add(self._submit_fetch(pairs[start : start + self._plan.piece_pages]))
        for copy in kept:
            self._copies.unpin(copy)
        return waits

    def _submit_fetch(self, pairs: Sequence[tuple[Copy, Copy]]) -> int:
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        moves = moves_of((source.group, source.slot, target.slot, source.page.hash) for source, target in pairs)
        self._counters.fetched_pages += len(pairs)
        return self._flights.send(Place.DISK, Place.HOST, moves, Flight(reads=sources, writes=targets))

    def forget(self) -> None:
        """Nothing goes on to disk that has arrived so far."""
        self._unspilled.clear()
