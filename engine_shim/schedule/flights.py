"""Transfers under way: what each reads and writes below the device, pinned until it has landed."""

from __future__ import annotations

from collections.abc import Iterator

from engine_shim.cache.copies import Copies, Copy
from engine_shim.cache.transfers import Move, Mover, Place, Transfer
from engine_shim.schedule.transit import Flight


class Flights:
    """Sends transfers to the mover and keeps the copies they use."""

    def __init__(self, copies: Copies, mover: Mover) -> None:
        self._copies = copies
        self._mover = mover
        self._under_way: dict[int, Flight] = {}
        self._names = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._under_way.values())

    def is_landed(self, transfer: int) -> bool:
        """Whether a transfer has ended."""
        return transfer not in self._under_way

    def send(self, source: Place, target: Place, moves: tuple[Move, ...], flight: Flight) -> int:
        """Begin a transfer; returns its id."""
        self._names += 1
        for copy in flight.reads:
            self._copies.pin(copy)
        for copy in flight.writes:
            copy.bringer = self._names
        self._under_way[self._names] = flight
        self._mover.submit(Transfer(self._names, source, target, moves))
        return self._names

    def land(self, transfer: int, *, whole: bool) -> Flight:
        """Book the end of a transfer. What did not arrive is gone, and so is what it was read from, if that may be bad.

        Of a transfer that failed the host is to blame where it was read for the device, and the disk where that was
        read; a disk that could not be written leaves what is on the host.
        """
        flight = self._under_way.pop(transfer)
        for copy in flight.reads:
            if not whole and (not flight.writes or copy.place is Place.DISK):
                self._copies.damaged(copy)
            self._copies.unpin(copy)
        for copy in flight.writes:
            self._copies.arrived(copy, whole=whole)
        return flight

    def copies(self) -> Iterator[Copy]:
        """All that is pinned, once for each transfer."""
        for flight in self:
            yield from flight.reads
            yield from flight.writes
