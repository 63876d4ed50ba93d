"""Contexts longer than the device's pool: what lies behind their head goes to the host and is read there.

::

    page         0   1   2   3 | 4   5   6   7   8 | 9  10  11      of a pool of 8 pages, half of them for a head
    full table   t   t   t   t | .   .   .   .   . | o   o   o      t: the tree's, locked by the receipt   o: its own
    host                       | h   h   h   h   h |                h: copies that are pinned for the request
                               ^ receipt.pages     ^ own_from

The first ``head_pages`` of such a context go to the tree, like any other's. The tree has every page up to where it
ends, so it can take none behind a gap: from there on the request's own whole pages *sink*. They are copied to the host
from where they are, and beside them, where others may go on from here, the last window and the state. Meanwhile the
request does not run, so what is copied stands still; when all has landed the device's pages are free, and the copies
stay pinned as long as the request reads them. A request that leaves while something of its own sinks leaves all it has
*adrift* until that has landed.

Who comes next with the same prefix starts behind what the tree has of the head and the host of the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine_shim.cache.copies import Copies, Copy, Page
from engine_shim.cache.radix import FULL, RadixCache, Receipt
from engine_shim.cache.transfers import Place, moves_of
from engine_shim.schedule.entry import Entry
from engine_shim.schedule.flights import Flights
from engine_shim.schedule.transit import Flight, OffloadCounters, OffloadPlan, Sinking
from engine_shim.types import NULL_PAGE, CacheLayout, Request, Sunk
from router.wire.block_keys import block_keys, namespace_seed


@dataclass(slots=True, eq=False)
class Adrift:
    """What a request has left behind that transfers still read: its lock, its own pages of each group, its copies."""

    receipt: Receipt
    owned: list[list[int]]
    sunk: list[Copy]
    waits: set[int]


class Sinks:
    """Which contexts are too long for the device, and where their parts are.

    ``context_pages``: so much of one context has room below the device; 0 where that is no more than on it, or where a
    draft head keeps pages as well, which cannot sink.
    """

    def __init__(
        self,
        layout: CacheLayout,
        plan: OffloadPlan,
        *,
        cache: RadixCache,
        copies: Copies,
        flights: Flights,
        counters: OffloadCounters,
    ) -> None:
        self._page = layout.page_tokens
        self._device_pages = layout.pages[FULL] - 1
        self._host_pages = plan.host_pages[FULL] - 1
        self._piece_pages = plan.piece_pages
        self._layout = layout
        self._cache = cache
        self._copies = copies
        self._flights = flights
        self._counters = counters
        self.context_pages = self._host_pages if layout.draft is None and self._host_pages > self._device_pages else 0
        # Half of the device for what stays, little for what is computed: so others find room beside it.
        self.head_pages = self._device_pages // 2
        self._own_pages = max(1, self._device_pages // 8)
        self.adrift: list[Adrift] = []

    # --- how far ------------------------------------------------------------------------------------

    def fills_device(self, tokens: int) -> bool:
        """Whether a context of so many tokens leaves no room on the device for another one."""
        return self.context_pages > 0 and tokens >= self._device_pages * self._page

    def exceeds_device(self, request: Request) -> bool:
        """Whether the device cannot hold a request's known tokens, and the next one if that is to be computed.

        The last token it may sample never is, so a prompt may fill the device to the brim and not exceed it.
        """
        last = len(request.prompt) + request.sampling.max_tokens - 1
        return self.fills_device(min(len(request.tokens), last - 1))

    def reach_tokens(self, entry: Entry) -> int:
        """Up to which position a long context may run before a part of it has to sink."""
        known = entry.own_from if entry.load is None else entry.load.pages
        reach = known + self._own_pages
        if entry.head_pages is not None and not entry.sunk:
            reach = max(reach, entry.head_pages)
        return reach * self._page

    def has_room(self, entry: Entry, others: Iterable[Entry]) -> bool:
        """Whether the host can take all of a long context beside those that run: two that cannot would push each other.

        A context that is alone always has room.
        """
        pinned, missing, is_alone = set(entry.sunk), self._missing_pages(entry), True
        for other in others:
            if other is not entry and other.head_pages is not None:
                pinned.update(other.sunk)
                missing += self._missing_pages(other)
                is_alone = False
        return is_alone or missing <= self._host_pages - len(pinned)

    def _missing_pages(self, entry: Entry) -> int:
        """What will sink of the tokens that are known."""
        there = entry.own_from if entry.sunk else max(entry.own_from, entry.head_pages or 0)
        return max(0, -(-len(entry.request.tokens) // self._page) - there)

    # --- down ---------------------------------------------------------------------------------------

    def is_deep(self, entry: Entry) -> bool:
        """What the request computes from here on is not the tree's any more."""
        if entry.sunk:
            return True
        return entry.head_pages is not None and entry.request.computed_tokens // self._page > entry.head_pages

    def begin(self, entry: Entry, *, at_boundary: bool) -> None:
        """Copy a request's own whole pages, if it has some; at a boundary also what others need to go on from here."""
        request, first = entry.request, entry.own_from
        end = request.computed_tokens // self._page
        items = [(FULL, index, request.tables[FULL][index]) for index in range(first, end)]
        if at_boundary:
            items += self._boundary_items(entry)
        if not items:
            return
        if entry.head_pages is None:
            entry.head_pages = entry.receipt_held.pages
        tokens = tuple(request.tokens[: end * self._page])
        hashes = block_keys(tokens, block_tokens=self._page, parent=namespace_seed(request.namespace))
        chain = self._copies.grow(request.namespace, tokens, hashes)
        entry.sinking = Sinking(chain[first:end], self._send(chain, items))

    def _boundary_items(self, entry: Entry) -> Iterator[tuple[int, int, int]]:
        """(group, index of the page, device page) of the window and the state at the last place others can use.

        One page more than the window, as the tree's are copied (see ``WindowComponent.to_copy``).
        """
        request, state = entry.request, self._layout.state
        tokens = request.computed_tokens if state is None else entry.kept_tokens
        boundary = tokens // self._page
        if state is not None:
            if entry.kept_slot == NULL_PAGE or not boundary:
                return
            yield state.index, boundary - 1, entry.kept_slot
        if self._layout.window is not None:
            group = self._layout.window.index
            extent = self._cache.components[group].copied_extent(boundary)
            first = max(0, boundary - extent - 1) if extent else boundary
            pages = request.tables[group][first:boundary]
            if pages.count(NULL_PAGE) <= len(pages) - extent:
                yield from ((group, index, page) for index, page in enumerate(pages, first) if page != NULL_PAGE)

    def _send(self, chain: list[Page], items: list[tuple[int, int, int]]) -> set[int]:
        """Copy what has no copy, as far as the host has room, but not at the cost of the same path: what to await."""
        chain[-1].is_in_use = True
        kept = [copy for page in chain for copy in page.copies.values()]
        for copy in kept:
            self._copies.pin(copy)
        waits: set[int] = set()
        pairs: list[tuple[int, Copy]] = []
        for group, index, source in items:
            there = chain[index].copies.get((Place.HOST, group))
            if there is not None:
                if not there.is_ready:
                    waits.add(there.bringer)
                continue
            target = self._copies.reserve(chain[index], Place.HOST, group)
            if target is None:
                break
            pairs.append((source, target))
        for copy in kept:
            self._copies.unpin(copy)
        for start in range(0, len(pairs), self._piece_pages):
            piece = pairs[start : start + self._piece_pages]
            moves = moves_of((copy.group, source, copy.slot, copy.page.hash) for source, copy in piece)
            flight = Flight(writes=[copy for _, copy in piece], sinks=True)
            waits.add(self._flights.send(Place.DEVICE, Place.HOST, moves, flight))
        self._counters.saved_pages += len(pairs)
        chain[-1].is_in_use = False
        self._copies.prune(chain[-1])
        return waits

    def has_landed(self, entry: Entry) -> bool:
        """Whether all that a request waits for to sink has come to its end."""
        return entry.sinking is not None and self._are_landed(entry.sinking.waits)

    def _are_landed(self, waits: Iterable[int]) -> bool:
        return all(map(self._flights.is_landed, waits))

    def settle(self, entry: Entry) -> list[int]:
        """Read on the host what has arrived there, up to the first page that has not. Returns pages that are free."""
        assert entry.sinking is not None
        table, first, freed = entry.request.tables[FULL], entry.own_from, []
        arrived: list[Copy] = []
        for page in entry.sinking.pages:
            copy = page.ready(Place.HOST, FULL)
            if copy is None:
                break
            arrived.append(copy)
        for index in range(first, first + len(arrived)):
            freed.append(table[index])
            table[index] = NULL_PAGE
        entry.sinking = None
        self.hold(entry, arrived)
        return freed

    def hold(self, entry: Entry, copies: list[Copy]) -> None:
        """Pin copies for a request that reads them behind its lock and what it has of the host already."""
        for copy in copies:
            self._copies.pin(copy)
        entry.sunk += copies
        if entry.sunk:
            entry.below = Sunk(entry.receipt_held.pages, tuple(copy.slot for copy in entry.sunk))

    # --- ends ---------------------------------------------------------------------------------------

    def leave(self, entry: Entry, owned: list[list[int]]) -> bool:
        """A request leaves, and these pages are its own; True if they are adrift, with its lock, and not free yet."""
        is_read = entry.sinking is not None and not self._are_landed(entry.sinking.waits)
        if entry.sinking is not None and is_read:
            self.adrift.append(Adrift(entry.receipt_held, owned, entry.sunk, entry.sinking.waits))
            entry.fetches = entry.fetches | entry.sinking.waits
        else:
            self._let_go(entry.sunk)
        entry.sinking, entry.sunk, entry.below, entry.head_pages = None, [], None, None
        return is_read

    def washed_up(self) -> list[Adrift]:
        """What was adrift and is read by nobody any more: its pages and its lock are to be given back."""
        landed = [each for each in self.adrift if self._are_landed(each.waits)]
        for each in landed:
            self.adrift.remove(each)
            self._let_go(each.sunk)
        return landed

    def _let_go(self, sunk: list[Copy]) -> None:
        if sunk:
            path: list[Page] = []
            page: Page | None = sunk[-1].page
            while page is not None and page.parent is not None:
                path.append(page)
                page = page.parent
            self._copies.touch(path[::-1])
        for copy in sunk:
            self._copies.unpin(copy)
