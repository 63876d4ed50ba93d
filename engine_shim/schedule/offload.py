"""What is copied below the device and back: when, how much of it, and who has to wait.

**Out.** See ``saves``.

**Back.** A prompt whose boundary the tree does not have, and the copies do, is *loaded*: full pages behind those of the
tree, and the whole window and state at the boundary. All of a group's part or none: a window with a hole is of no use.
The pages that a load writes are the request's own until it has landed, then they go to the tree.

**Disk.** What arrives on the host goes on to disk, piece by piece (see ``spills``). A request that needs pages of the
disk has them fetched to the host while it waits in the queue, and others pass it. What earlier processes have left
there counts from the start.

A transfer that fails is a miss: copies that may be damaged are dropped, and whoever waited computes instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from engine_shim.cache.copies import Copies, Copy, Page
from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.node import Node
from engine_shim.cache.radix import FULL, Match, RadixCache, Receipt
from engine_shim.cache.transfers import Mover, Place, moves_of
from engine_shim.schedule.flights import Flights
from engine_shim.schedule.saves import Saves
from engine_shim.schedule.sinks import Sinks
from engine_shim.schedule.spills import Spills
from engine_shim.schedule.transit import BelowStats, Flight, Load, OffloadCounters, OffloadPlan
from engine_shim.types import CacheLayout, WindowTails
from router.wire.kv_events import Event


class Offload:
    """Decides what moves between the tree's pools and what lies below them. Pure; a mover carries it out."""

    def __init__(
        self, layout: CacheLayout, plan: OffloadPlan, *, cache: RadixCache, mover: Mover, events: EventRecorder
    ) -> None:
        slots = {Place.HOST: plan.host_pages}
        if plan.disk_pages is not None:
            slots[Place.DISK] = plan.disk_pages
        self.copies = Copies(slots, page_tokens=layout.page_tokens, events=events)
        self.counters = OffloadCounters()
        self.overlaps = mover.overlaps
        self._layout = layout
        self._plan = plan
        self._cache = cache
        self._mover = mover
        self._flights = Flights(self.copies, mover)
        self._saves = Saves(self.copies, self._flights, cache=cache, plan=plan, counters=self.counters)
        self.sinks = Sinks(layout, plan, cache=cache, copies=self.copies, flights=self._flights, counters=self.counters)
        self._spills: Spills | None = None
        if plan.disk_pages is not None:
            self._spills = Spills(self.copies, self._flights, plan=plan, counters=self.counters)
            kept = mover.kept()
            self.copies.adopt(kept.pages)
            self.counters.refused_pages = dict(kept.refused)

    @property
    def generations(self) -> dict[Place, tuple[array[int], ...]]:
        """For each place and group how often each slot has been freed."""
        return {place: tuple(pool.generations for pool in shelf.pools) for place, shelf in self.copies.shelves.items()}

    @property
    def in_flight(self) -> int:
        """Transfers that have not landed."""
        return len(self._flights)

    @property
    def lends_pages(self) -> bool:
        """A transfer under way keeps pages of the device."""
        return any(flight.save or flight.load or flight.sinks for flight in self._flights)

    @property
    def is_idle(self) -> bool:
        """Nothing moves and nothing waits to."""
        return not (self._flights or self._saves)

    # --- out -------------------------------------------------------------------------------------------

    def stored(self, node: Node) -> None:
        """A prefix has come into the tree."""
        self._saves.stored(node)

    def reused(self, node: Node) -> None:
        """A request starts behind a prefix that the tree had."""
        self._saves.reused(node)

    def save(self, node: Node) -> None:
        """Copy a prefix whatever the policy: what is behind it will be on the host alone, and of no use without."""
        if not node.is_saved:
            self._saves.save(node)

    def write_back(self) -> None:
        """Copy what will have to give way next, ahead of that: eviction itself never waits for a copy."""
        self._saves.write_back()

    def relieve(self) -> None:
        """Give up all saves but the piece under way: a request needs the pages that they keep."""
        self._saves.relieve()

    # --- back ------------------------------------------------------------------------------------------

    def find(self, namespace: str, tokens: Sequence[int], match: Match) -> tuple[int, Load | None]:
        """How far full pages go, copies on the host included, and the load that reaches further than ``match``."""
        chain = self.copies.walk(namespace, tuple(tokens))
        depth, boundary = self._boundary(chain, match, (Place.HOST,))
        layout = self._layout
        usable = boundary if layout.window_tails is WindowTails.STORED else match.pages
        if layout.resume_tokens(usable, boundary) <= layout.resume_tokens(match.pages, match.full_pages):
            return depth, None
        full_from = min(match.full_pages, boundary)
        copies = []
        for component in self._cache.components:
            first = full_from if component.is_whole else boundary - component.copied_extent(boundary)
            found = [page.ready(Place.HOST, component.index) for page in chain[first:boundary]]
            copies.append([copy for copy in found if copy is not None])
        self.copies.touch(chain[:boundary])
        return depth, Load(boundary, full_from, copies)

    def fetch(self, namespace: str, tokens: Sequence[int], match: Match) -> set[int]:
        """Bring what a prompt could use of the disk to the host: the transfers to wait for.

        A prompt that needs more than the host has room for gets as much as that.
        """
        if self._spills is None:
            return set()
        chain = self.copies.walk(namespace, tuple(tokens))
        _, boundary = self._boundary(chain, match, (Place.HOST, Place.DISK))
        _, without = self._boundary(chain, match, (Place.HOST,))
        if boundary <= max(without, match.pages):
            return set()
        needed: list[tuple[Page, int]] = []
        for component in self._cache.components:
            first = match.full_pages if component.is_whole else boundary - component.copied_extent(boundary)
            needed += [(page, component.index) for page in chain[first:boundary]]
        return self._spills.fetch(needed)

    def is_landed(self, transfer: int) -> bool:
        """Whether a transfer has ended."""
        return self._flights.is_landed(transfer)

    def _boundary(self, chain: list[Page], match: Match, places: Sequence[Place]) -> tuple[int, int]:
        """(how far full pages go, the last boundary up to there at which every group has what it needs)."""

        def ready(page: Page, group: int) -> bool:
            return any(page.ready(place, group) for place in places)

        depth = match.full_pages
        whole = [each.index for each in self._cache.components if each.is_whole]
        while depth < len(chain) and all(ready(chain[depth], group) for group in whole):
            depth += 1
        others = [each for each in self._cache.components if not each.is_whole]
        if not others:
            return depth, min(depth, len(chain))
        runs, boundary = [0] * len(others), 0
        for pages, page in enumerate(chain[:depth], start=1):
            runs = [run + 1 if ready(page, each.index) else 0 for run, each in zip(runs, others, strict=True)]
            if all(run >= each.copied_extent(pages) for run, each in zip(runs, others, strict=True)):
                boundary = pages
        return depth, boundary

    def start(self, load: Load, targets: list[list[int]]) -> None:
        """Begin to write a load's copies to the request's pages ``targets[g]``."""
        load.targets = targets
        items = [
            (copy, target)
            for copies, pages in zip(load.copies, targets, strict=True)
            for copy, target in zip(copies, pages, strict=True)
        ]
        for begin in range(0, len(items), self._plan.piece_pages):
            piece = items[begin : begin + self._plan.piece_pages]
            moves = moves_of((copy.group, copy.slot, target, copy.page.hash) for copy, target in piece)
            flight = Flight(reads=[copy for copy, _ in piece], load=load)
            load.outstanding.add(self._flights.send(Place.HOST, Place.DEVICE, moves, flight))
        self.counters.loaded_pages += len(items)

    # --- transfers ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take note of what has landed, and send what waited for that."""
        for landing in self._mover.landed():
            self._land(landing.id, whole=landing.whole)

    def _land(self, transfer: int, *, whole: bool) -> None:
        flight = self._flights.land(transfer, whole=whole)
        self.counters.failed_transfers += not whole
        if flight.save is not None:
            self._saves.landed(flight.save)
        if flight.load is not None:
            flight.load.outstanding.discard(transfer)
            flight.load.failed |= not whole
        if self._spills is not None:
            self._spills.landed(flight, whole=whole)

    def reset(self) -> None:
        """Forget all copies, on disk for processes to come as well; nothing may be under way."""
        assert self.is_idle, "transfers are under way"
        self.copies.clear()
        if self._spills is not None:
            self._spills.forget()
            self._mover.wipe()

    # --- for snapshots and checks ------------------------------------------------------------------------------------

    def stats(self) -> BelowStats:
        """The numbers as they stand now."""
        pools = {place: shelf.pools[FULL] for place, shelf in self.copies.shelves.items()}
        counters = self.counters
        return BelowStats(
            used_pages={place: pool.used_pages for place, pool in pools.items()},
            total_pages={place: pool.total for place, pool in pools.items()},
            moved_pages={
                (Place.DEVICE, Place.HOST): counters.saved_pages,
                (Place.HOST, Place.DEVICE): counters.loaded_pages,
                (Place.HOST, Place.DISK): counters.spilled_pages,
                (Place.DISK, Place.HOST): counters.fetched_pages,
            },
            failed_transfers=counters.failed_transfers,
            refused_pages=counters.refused_pages,
        )

    def snapshot_events(self) -> tuple[Event, ...]:
        """Store events of all copies that can be read."""
        recorder = EventRecorder(self._layout)
        self.copies.record(recorder)
        return recorder.take()

    def pins(self) -> Iterator[Receipt]:
        """What the saves have pinned in the tree."""
        return self._saves.pins()

    def check(self, sunk: Iterable[Copy]) -> None:
        """Raise ``IntegrityError`` if copies, who reads them (``sunk``) and transfers contradict each other."""
        adrift = (copy for each in self.sinks.adrift for copy in each.sunk)
        self.copies.check([*self._flights.copies(), *sunk, *adrift])
        if self._saves.is_sending != any(flight.save is not None for flight in self._flights):
            raise IntegrityError("a save is said to be under way, and none is, or the other way round")
