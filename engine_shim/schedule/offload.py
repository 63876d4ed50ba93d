"""What is copied below the device and back: when, how much of it, and who has to wait.

**Out.** A *save* copies what a boundary of the tree needs that has no copy yet: full pages of its whole path, the last
window before it, the state at it. It goes in pieces of ``piece_pages``, one under way at a time, its nodes
pinned in the tree until the last piece has landed; a save that stands in a request's way is given up after the
piece under way. A page that is being copied for one request is not copied again for its twin.

**Back.** A prompt whose boundary the tree does not have, and the copies do, is *loaded*: full pages behind those of the
tree, and the whole window and state at the boundary. All of a group's part or none: a window with a hole is of no use.
The pages that a load writes are the request's own until it has landed, then they go to the tree.

**Disk.** What arrives on the host goes on to disk, piece by piece. A request that needs pages of the disk has them
fetched to the host while it waits in the queue, and others pass it.

A transfer that fails is a miss: copies that may be damaged are dropped, and whoever waited computes instead.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from engine_shim.cache.component import Component
from engine_shim.cache.copies import Copies, Copy, Page
from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.node import Node
from engine_shim.cache.radix import FULL, Match, RadixCache, Receipt
from engine_shim.cache.transfers import Move, Mover, Place, Transfer, WritePolicy, moves_of
from engine_shim.schedule.transit import BelowStats, Flight, Load, OffloadCounters, OffloadPlan, Save
from engine_shim.types import CacheLayout
from router.wire.kv_events import Event

#: So many nodes that are next to go are looked at in one step, to be written back in time.
_WRITE_BACK_NODES = 32


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
        self._flights: dict[int, Flight] = {}
        self._names = 0
        self._saves: deque[Save] = deque()
        self._saving: Save | None = None
        self._unspilled: deque[Copy] = deque()
        self._spilling = False

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
        return any(flight.save or flight.load for flight in self._flights.values())

    @property
    def is_idle(self) -> bool:
        """Nothing moves and nothing waits to."""
        return not (self._flights or self._saves)

    # --- out -------------------------------------------------------------------------------------------

    def stored(self, node: Node) -> None:
        """A prefix has come into the tree."""
        if self._plan.policy is WritePolicy.THROUGH:
            self._save(node)

    def reused(self, node: Node) -> None:
        """A request starts behind a prefix that the tree had."""
        if self._plan.policy is WritePolicy.SELECTIVE:
            self._save(node)

    def write_back(self) -> None:
        """Copy what will have to give way next, ahead of that: eviction itself never waits for a copy."""
        if self._plan.policy is not WritePolicy.BACK or self._saves:
            return
        for component in self._cache.components:
            missing = max(1, component.pool.total // 8) - component.pool.free_pages
            if missing > 0:
                self._save_oldest(component, missing)

    def _save_oldest(self, component: Component, pages: int) -> None:
        nodes: list[Node] = []
        for node in component.unlocked:
            if pages <= 0 or len(nodes) == _WRITE_BACK_NODES:
                break
            pages -= len(component.held(node))
            if not node.is_saved:
                nodes.append(node)
        for node in nodes:
            self._save(node)

    def relieve(self) -> None:
        """Give up all saves but the piece under way: a request needs the pages that they keep."""
        while self._saves:
            self._cache.unpin(self._saves.pop().receipt)
        if self._saving is not None:
            self._saving.items.clear()

    def _save(self, node: Node) -> None:
        path = list(node.path())[::-1]
        if not path:
            return
        node.is_saved = True
        tokens = tuple(token for above in path for token in above.tokens)
        hashes = [key for above in path for key in above.hashes]
        known = self.copies.walk(node.namespace, tokens)
        self.copies.touch(known)
        extents, items = [], deque[tuple[int, int, int]]()
        for component in self._cache.components:
            held = component.tail(node, component.extent(len(hashes)))
            first = len(hashes) - len(held)
            new = [
                (component.index, index, page)
                for index, page in enumerate(held, start=first)
                if index >= len(known) or (Place.HOST, component.index) not in known[index].copies
            ]
            extents.append(len(held) if new or component.is_whole else 0)
            items.extend(new)
        if not items:
            return
        receipt = Receipt(node, tuple(extents))
        self._cache.pin(receipt)
        self._saves.append(Save(node.namespace, tokens, hashes, receipt, items))
        self._next_piece()

    def _next_piece(self) -> None:
        """Send the next piece of the first save that has something left."""
        while self._saving is None and self._saves:
            save = self._saves.popleft()
            items, copies = self._reserve(save)
            if not items:
                self._cache.unpin(save.receipt)
                continue
            self._saving = save
            moves = moves_of((copy.group, page, copy.slot, copy.page.hash) for (_, _, page), copy in items)
            self._submit(Place.DEVICE, Place.HOST, moves, Flight(writes=copies, save=save))
            self.counters.saved_pages += len(copies)

    def _reserve(self, save: Save) -> tuple[list[tuple[tuple[int, int, int], Copy]], list[Copy]]:
        """Slots for the next items, without pushing out what the same path has already."""
        chain = self.copies.grow(save.namespace, save.tokens, save.hashes)
        chain[-1].is_in_use = True
        kept = [copy for page in chain for copy in page.copies.values()]
        for copy in kept:
            self.copies.pin(copy)
        items: list[tuple[tuple[int, int, int], Copy]] = []
        while save.items and len(items) < self._plan.piece_pages:
            item = save.items.popleft()
            group, index, _ = item
            if (Place.HOST, group) in chain[index].copies:
                continue  # a twin was faster
            reserved = self.copies.reserve(chain[index], Place.HOST, group)
            if reserved is None:
                save.items.clear()
                break
            items.append((item, reserved))
        for copy in kept:
            self.copies.unpin(copy)
        chain[-1].is_in_use = False
        self.copies.prune(chain[-1])
        return items, [copy for _, copy in items]

    # --- back ------------------------------------------------------------------------------------------

    def find(self, namespace: str, tokens: Sequence[int], match: Match) -> tuple[int, Load | None]:
        """How far full pages go, copies on the host included, and the load that reaches further than ``match``."""
        chain = self.copies.walk(namespace, tuple(tokens))
        depth, boundary = self._boundary(chain, match, (Place.HOST,))
        if boundary <= match.pages:
            return depth, None
        full_from = min(match.full_pages, boundary)
        copies = []
        for component in self._cache.components:
            first = full_from if component.is_whole else boundary - component.extent(boundary)
            found = [page.ready(Place.HOST, component.index) for page in chain[first:boundary]]
            copies.append([copy for copy in found if copy is not None])
        self.copies.touch(chain[:boundary])
        return depth, Load(boundary, full_from, copies)

    def fetch(self, namespace: str, tokens: Sequence[int], match: Match) -> set[int]:
        """Bring what a prompt could use of the disk to the host: the transfers to wait for.

        A prompt that needs more than the host has room for gets as much as that.
        """
        if Place.DISK not in self.copies.shelves:
            return set()
        chain = self.copies.walk(namespace, tuple(tokens))
        _, boundary = self._boundary(chain, match, (Place.HOST, Place.DISK))
        _, without = self._boundary(chain, match, (Place.HOST,))
        if boundary <= max(without, match.pages):
            return set()
        needed: list[tuple[Page, int]] = []
        for component in self._cache.components:
            first = match.full_pages if component.is_whole else boundary - component.extent(boundary)
            needed += [(page, component.index) for page in chain[first:boundary]]
        kept = [copy for page, _ in needed for copy in page.copies.values()]
        for copy in kept:
            self.copies.pin(copy)
        waits: set[int] = set()
        pairs: list[tuple[Copy, Copy]] = []
        for page, group in needed:
            there = page.copies.get((Place.HOST, group))
            source = page.ready(Place.DISK, group)
            if there is not None:
                if not there.is_ready:
                    waits.add(there.bringer)
            elif source is not None:
                target = self.copies.reserve(page, Place.HOST, group)
                if target is None:
                    break
                pairs.append((source, target))
        for start in range(0, len(pairs), self._plan.piece_pages):
            waits.add(self._submit_fetch(pairs[start : start + self._plan.piece_pages]))
        for copy in kept:
            self.copies.unpin(copy)
        return waits

    def is_landed(self, transfer: int) -> bool:
        """Whether a transfer has ended."""
        return transfer not in self._flights

    def _submit_fetch(self, pairs: Sequence[tuple[Copy, Copy]]) -> int:
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        moves = moves_of((source.group, source.slot, target.slot, source.page.hash) for source, target in pairs)
        self.counters.fetched_pages += len(pairs)
        return self._submit(Place.DISK, Place.HOST, moves, Flight(reads=sources, writes=targets))

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
            if all(run >= each.extent(pages) for run, each in zip(runs, others, strict=True)):
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
            load.outstanding.add(self._submit(Place.HOST, Place.DEVICE, moves, flight))
        self.counters.loaded_pages += len(items)

    # --- transfers ---------------------------------------------------------------------------------------

    def _submit(self, source: Place, target: Place, moves: tuple[Move, ...], flight: Flight) -> int:
        self._names += 1
        for copy in flight.reads:
            self.copies.pin(copy)
        for copy in flight.writes:
            copy.bringer = self._names
        self._flights[self._names] = flight
        self._mover.submit(Transfer(self._names, source, target, moves))
        return self._names

    def poll(self) -> None:
        """Take note of what has landed, and send what waited for that."""
        for landing in self._mover.landed():
            self._land(landing.id, whole=landing.whole)

    def _land(self, transfer: int, *, whole: bool) -> None:
        flight = self._flights.pop(transfer)
        self.counters.failed_transfers += not whole
        for copy in flight.reads:
            if not whole and (not flight.writes or copy.place is Place.DISK):
                self.copies.damaged(copy)
            self.copies.unpin(copy)
        for copy in flight.writes:
            self.copies.arrived(copy, whole=whole)
        if flight.save is not None:
            self._saving = None
            self._saves.appendleft(flight.save)
            self._next_piece()
        if flight.load is not None:
            flight.load.outstanding.discard(transfer)
            flight.load.failed |= not whole
        self._spill(flight, whole=whole)

    def _spill(self, flight: Flight, *, whole: bool) -> None:
        if Place.DISK not in self.copies.shelves:
            return
        if flight.writes and flight.writes[0].place is Place.DISK:
            self._spilling = False
        elif whole:
            self._unspilled.extend(flight.writes)
        pairs: list[tuple[Copy, Copy]] = []
        while self._unspilled and not self._spilling and len(pairs) < self._plan.piece_pages:
            source = self._unspilled.popleft()
            gone = source.page.copies.get((Place.HOST, source.group)) is not source
            if gone or (Place.DISK, source.group) in source.page.copies:
                continue
            target = self.copies.reserve(source.page, Place.DISK, source.group)
            if target is None:
                self._unspilled.clear()
                break
            pairs.append((source, target))
        if pairs:
            self._spilling = True
            moves = moves_of((source.group, source.slot, target.slot, source.page.hash) for source, target in pairs)
            self.counters.spilled_pages += len(pairs)
            flight = Flight(reads=[source for source, _ in pairs], writes=[target for _, target in pairs])
            self._submit(Place.HOST, Place.DISK, moves, flight)

    def reset(self) -> None:
        """Forget all copies; nothing may be under way."""
        assert self.is_idle, "transfers are under way"
        self._unspilled.clear()
        self.copies.clear()

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
        )

    def snapshot_events(self) -> tuple[Event, ...]:
        """Store events of all copies that can be read."""
        recorder = EventRecorder(self._layout)
        self.copies.record(recorder)
        return recorder.take()

    def pins(self) -> Iterator[Receipt]:
        """What the saves have pinned in the tree."""
        for save in self._saves:
            yield save.receipt
        if self._saving is not None:
            yield self._saving.receipt

    def check(self) -> None:
        """Raise ``IntegrityError`` if copies and transfers contradict each other."""
        self.copies.check(copy for flight in self._flights.values() for copy in (*flight.reads, *flight.writes))
        if (self._saving is not None) != any(flight.save is not None for flight in self._flights.values()):
            raise IntegrityError("a save is said to be under way, and none is, or the other way round")
