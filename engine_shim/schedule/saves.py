"""What goes out: prefixes of the tree to the host, piece by piece.

A *save* copies what a boundary of the tree needs that has no copy yet: full pages of its whole path, the last window
before it and one page more, the state at it. It goes in pieces of ``piece_pages``, one under way at a time, its nodes
pinned in the tree until the last piece has landed; a save that stands in a request's way is given up after the piece
under way. A page that is being copied for one request is not copied again for its twin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine_shim.cache.component import Component
from engine_shim.cache.copies import Copies, Copy
from engine_shim.cache.node import Node
from engine_shim.cache.radix import RadixCache, Receipt
from engine_shim.cache.transfers import Place, WritePolicy, moves_of
from engine_shim.schedule.flights import Flights
from engine_shim.schedule.transit import Flight, OffloadCounters, OffloadPlan, Save

#: So many nodes that are next to go are looked at in one step, to be written back in time.
_WRITE_BACK_NODES = 32


class Saves:
    """The queue of saves, and when the plan's policy wants one."""

    def __init__(
        self,
        copies: Copies,
        flights: Flights,
        *,
        cache: RadixCache,
        plan: OffloadPlan,
        counters: OffloadCounters,
    ) -> None:
        self._copies = copies
        self._flights = flights
        self._cache = cache
        self._plan = plan
        self._counters = counters
        self._queue: deque[Save] = deque()
        self._current: Save | None = None

    def __len__(self) -> int:
        """Saves that wait for their turn."""
        return len(self._queue)

    def stored(self, node: Node) -> None:
        """A prefix has come into the tree."""
        if self._plan.policy is WritePolicy.THROUGH:
            self.save(node)

    def reused(self, node: Node) -> None:
        """A request starts behind a prefix that the tree had."""
        if self._plan.policy is WritePolicy.SELECTIVE:
            self.save(node)

    def write_back(self) -> None:
        """Copy what will have to give way next, ahead of that: eviction itself never waits for a copy."""
        if self._plan.policy is not WritePolicy.BACK or self._queue:
            return
        for component in self._cache.components:
            if component.is_rebuilt:
                continue
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
            self.save(node)

    def relieve(self) -> None:
        """Give up all saves but the piece under way: a request needs the pages that they keep."""
        while self._queue:
            self._cache.unpin(self._queue.pop().receipt)
        if self._current is not None:
            self._current.items.clear()

    def save(self, node: Node) -> None:
        """Queue what a prefix needs and has no copy of."""
        path = list(node.path())[::-1]
        if not path:
            return
        node.is_saved = True
        tokens = tuple(token for above in path for token in above.tokens)
        hashes = [key for above in path for key in above.hashes]
        known = self._copies.walk(node.namespace, tokens)
        self._copies.touch(known)
        extents, items = [], deque[tuple[int, int, int]]()
        for component in self._cache.components:
            held = component.to_copy(node, len(hashes))
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
        self._queue.append(Save(node.namespace, tokens, hashes, receipt, items))
        self._next_piece()

    def _next_piece(self) -> None:
        """Send the next piece of the first save that has something left."""
        while self._current is None and self._queue:
            save = self._queue.popleft()
            items, copies = self._reserve(save)
            if not items:
                self._cache.unpin(save.receipt)
                continue
            self._current = save
            moves = moves_of((copy.group, page, copy.slot, copy.page.hash) for (_, _, page), copy in items)
            self._flights.send(Place.DEVICE, Place.HOST, moves, Flight(writes=copies, save=save))
            self._counters.saved_pages += len(copies)

    def _reserve(self, save: Save) -> tuple[list[tuple[tuple[int, int, int], Copy]], list[Copy]]:
        """Slots for the next items, without pushing out what the same path has already."""
        chain = self._copies.grow(save.namespace, save.tokens, save.hashes)
        chain[-1].is_in_use = True
        kept = [copy for page in chain for copy in page.copies.values()]
        for copy in kept:
            self._copies.pin(copy)
        items: list[tuple[tuple[int, int, int], Copy]] = []
        while save.items and len(items) < self._plan.piece_pages:
            item = save.items.popleft()
            group, index, _ = item
            if (Place.HOST, group) in chain[index].copies:
                continue  # a twin was faster
            reserved = self._copies.reserve(chain[index], Place.HOST, group)
            if reserved is None:
                save.items.clear()
                break
            items.append((item, reserved))
        for copy in kept:
            self._copies.unpin(copy)
        chain[-1].is_in_use = False
        self._copies.prune(chain[-1])
        return items, [copy for _, copy in items]

    def landed(self, save: Save) -> None:
        """The piece under way has landed; send the next one."""
        self._current = None
        self._queue.appendleft(save)
        self._next_piece()

    def pins(self) -> Iterator[Receipt]:
        """What the saves have pinned in the tree."""
        for save in self._queue:
            yield save.receipt
        if self._current is not None:
            yield self._current.receipt

    @property
    def is_sending(self) -> bool:
        """A piece is under way."""
        return self._current is not None
