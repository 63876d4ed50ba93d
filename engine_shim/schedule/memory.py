"""The pages of the requests that run: taken from the pools, shared with the tree, given back.

The only place where a page changes its owner::

    pool --extend--> request --store--> tree --evict--> pool
                        |                 |
                        +--slide, leave   +--admit (reads under a lock)

While steps are launched nobody leaves who is in one of them, and pages that are given up are held back (``held_back``),
so none that a launched step uses is ever free. What the tree gives up is in no step: those who are hold its locks.
Transfers go on all the time: what a save reads is pinned in the tree, and what a load writes is the request's own; if
that leaves before the load has landed, the pages are *adrift* until then and belong to nobody else.
"""

from __future__ import annotations

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.radix import RadixCache
from engine_shim.cache.transfers import Mover
from engine_shim.schedule.entry import Entry
from engine_shim.schedule.held_back import HeldBack
from engine_shim.schedule.offload import Offload
from engine_shim.schedule.recount import recount
from engine_shim.schedule.transit import Load, OffloadPlan
from engine_shim.schedule.windows import windows_of
from engine_shim.types import NULL_PAGE, CacheLayout, WindowTails
from router.wire.kv_events import Event


class Memory:
    """Keeps ``tables``, ``computed_tokens`` and the receipts of running requests in step with the cache."""

    def __init__(
        self, layout: CacheLayout, events: EventRecorder, *, plan: OffloadPlan | None = None, mover: Mover | None = None
    ) -> None:
        self.cache = RadixCache(layout, events)
        self.offload = Offload(layout, plan, cache=self.cache, mover=mover, events=events) if plan and mover else None
        self.page_tokens = self._page = layout.page_tokens
        self._layout = layout
        self._stores = layout.window_tails is WindowTails.STORED
        self.held_back = HeldBack(self.cache.pools)
        self._windows = windows_of(layout, self.cache, take=self._take, give_up=self.held_back.give_up)
        self._window = self._windows.group
        self._state = layout.state.index if layout.state else None
        self._checkpoint = layout.checkpoint_tokens
        self._tenants: list[Entry] = []
        self._adrift: list[Load] = []

    @property
    def aligns_chunks(self) -> bool:
        """Prefill chunks should end on page boundaries: only there a recurrent state can be kept."""
        return self._state is not None

    @property
    def tenants(self) -> int:
        """How many requests hold pages."""
        return len(self._tenants)

    @property
    def is_idle(self) -> bool:
        """No request holds a page, and no transfer."""
        return not self._tenants and (self.offload is None or self.offload.is_idle)

    @property
    def lends_pages(self) -> bool:
        """Transfers keep pages that come back by themselves."""
        return self.offload is not None and self.offload.lends_pages

    def look_up(self, entry: Entry) -> None:
        """Have what a request that is queued could use of the disk fetched while it waits."""
        if self.offload is not None:
            request = entry.request
            tokens = request.tokens[: self._cap(entry) * self._page]
            match = self.cache.match(request.namespace, tokens)
            entry.fetches = self.offload.fetch(request.namespace, tokens, match)

    def awaits_fetch(self, entry: Entry) -> bool:
        """Whether something is still on its way from disk."""
        return self.offload is not None and not all(map(self.offload.is_landed, entry.fetches))

    def admit(self, entry: Entry) -> None:
        """Start a request behind the longest prefix that the tree or the host has of it.

        Its last token is always computed. What the host has is loaded from ``begin`` on.
        """
        request = entry.request
        cap = self._cap(entry)
        tokens = request.tokens[: cap * self._page]
        match = self.cache.match(request.namespace, tokens)
        depth, pages, entry.load = match.full_pages, match.pages, None
        found = start = self._layout.resume_tokens(match.pages, match.full_pages)
        if self.offload is not None:
            depth, entry.load = self.offload.find(request.namespace, tokens, match)
        if entry.load is not None:
            pages = entry.load.pages
            start = pages * self._page if self._stores else self._layout.rebuild_tokens(pages)
        elif start != pages * self._page:
            pages = match.full_pages
        is_rebuilt = start < pages * self._page
        entry.rebuilt_until, entry.window_start = (pages * self._page, start) if is_rebuilt else (0, 0)
        if entry.load is None and not is_rebuilt:
            entry.receipt = self.cache.lock(match)
            request.tables = match.tables
        else:
            entry.receipt, request.tables = self.cache.lock_whole(request.namespace, tokens[: pages * self._page])
            if self._state is not None:
                request.tables[self._state][:] = [NULL_PAGE, NULL_PAGE]
            if self._window is not None and is_rebuilt:
                request.tables[self._window][:] = [NULL_PAGE] * (start // self._page)
        if self.offload is not None and entry.load is None and not match.node.is_saved:
            self.offload.reused(match.node)
        entry.loaded_tokens = start - found
        first = start // self._page
        entry.window_from = first if is_rebuilt else max(0, first - self._layout.window_pages())
        entry.window_own_from = first if is_rebuilt else entry.receipt.pages
        entry.kept_slot, entry.kept_tokens = NULL_PAGE, 0
        entry.prefilling = True
        request.computed_tokens = start
        entry.stops = []
        if depth > pages:
            entry.stop_at(depth * self._page)
        if self._state is not None:
            # A state serves at its own position only: leave some along the way, and one for the same prompt again.
            grid = range(0, len(request.tokens), self._checkpoint)
            for tokens in (*grid, cap * self._page):
                if tokens > request.computed_tokens:
                    entry.stop_at(tokens)
        self._tenants.append(entry)

    def _cap(self, entry: Entry) -> int:
        return (len(entry.request.tokens) - 1) // self._page

    def known_tokens(self, entry: Entry) -> int:
        """How much of a waiting request's prompt could be reused now."""
        match = self.cache.match(entry.request.namespace, entry.request.tokens[:-1])
        return self._layout.resume_tokens(match.pages, match.full_pages)

    def share(self, entry: Entry) -> None:
        """Store the pages of a prefill in progress if others can use them: full layers anywhere, others at a stop."""
        if self._window is None and self._state is None:
            self.store(entry)

    def room(self) -> tuple[int, ...]:
        """Of each group the pages that are free or evictable, or will be free once the launched steps are over."""
        return tuple(self._obtainable(group) + len(pages) for group, pages in enumerate(self.held_back.pages()))

    def fit(self, entry: Entry, tokens: int, *, spare_pages: int = 0) -> int:
        """How many of the next ``tokens`` positions fit on pages held, free or evictable.

        ``spare_pages`` of the latter are left for others.
        """
        start, end = entry.next_start, entry.next_start + tokens
        fitting = self._end_that_fits(entry, spare_pages)
        if end > fitting:
            self._windows.trim_passed_locks(self._tenants)
            if self.offload is not None:
                self.offload.relieve()
            fitting = self._end_that_fits(entry, spare_pages)
        return max(0, min(end, fitting) - start)

    def _end_that_fits(self, entry: Entry, spare_pages: int) -> int:
        """Up to which position a request could run on pages held, free or evictable; 0 if not at all."""
        ends = []
        load = entry.load if entry.load is not None and not entry.load.started else None
        for group, table in enumerate(entry.request.tables):
            pages, needed = len(table), 0
            if load is not None:
                needed = len(load.copies[group])
                pages = pages if group == self._window and entry.rebuilt_until else load.pages
            left = self._obtainable(group) - needed - spare_pages
            if load is not None and left < 0:
                return 0
            if group == self._state:
                if table[1] == NULL_PAGE and left <= 0:
                    return 0
            else:
                ends.append(self._windows.end(entry, pages + left) if group == self._window else pages + left)
        return min(ends) * self._page

    def extend(self, entry: Entry, tokens: int) -> None:
        """Make the tables long enough for the next ``tokens`` positions, which must ``fit``."""
        tables = entry.request.tables
        if self._state is not None and tables[self._state][1] == NULL_PAGE:
            tables[self._state][1:] = self._take(self._state, 1)
        pages = -(-(entry.next_start + tokens) // self._page)
        for group, table in enumerate(tables):
            if group == self._window:
                self._windows.grow(entry, pages)
            elif group != self._state and len(table) < pages:
                table += self._take(group, pages - len(table))

    def tables_behind(self, entry: Entry) -> tuple[list[int], ...]:
        """Tables of its own for a chunk behind a launched one: it goes on from the state that this writes, in place."""
        tables = tuple(list(table) for table in entry.request.tables)
        if self._state is not None:
            tables[self._state][0] = tables[self._state][1]
        return tables

    def _start_load(self, entry: Entry, load: Load) -> None:
        """Take pages for a load and send it; the request then is as if it had computed them."""
        assert self.offload is not None
        tables = entry.request.tables
        targets = [self._take(group, len(copies)) for group, copies in enumerate(load.copies)]
        for group, (table, pages) in enumerate(zip(tables, targets, strict=True)):
            if group == self._state:
                entry.kept_slot, entry.kept_tokens = pages[0], load.pages * self._page
                table[0] = entry.kept_slot
            elif group == self._window and entry.rebuilt_until:
                assert not pages, "a window that is rebuilt is not loaded"
            elif group == self._window:
                entry.window_own_from = load.pages - len(pages)
                table += [NULL_PAGE] * entry.window_own_from + pages
            else:
                table += pages
        self.offload.start(load, targets)

    def begin(self, entry: Entry) -> bool:
        """Start an admitted request's load, if it has one; whether a chunk of it can be launched right away."""
        if entry.load is not None and not entry.load.started:
            self._start_load(entry, entry.load)
        return self.may_run(entry)

    def may_run(self, entry: Entry) -> bool:
        """Whether a chunk can be launched: all is there, or the last piece lands while the layers run."""
        if entry.load is None or self.offload is None:
            return True
        return self.offload.overlaps and len(entry.load.outstanding) <= 1

    def poll(self) -> list[Entry]:
        """Take note of the transfers that have landed. Returns the requests whose load did not arrive whole."""
        if self.offload is None:
            return []
        self.offload.poll()
        for load in [load for load in self._adrift if not load.outstanding]:
            self._adrift.remove(load)
            for pool, pages in zip(self.cache.pools, load.targets, strict=True):
                pool.free(pages)
        failed = []
        for entry in self._tenants:
            if entry.load is not None and entry.load.failed:
                failed.append(entry)
            elif entry.load is not None and entry.load.started and not entry.load.outstanding:
                self._loaded(entry)
        self.offload.write_back()
        return failed

    def landed(self, entry: Entry) -> None:
        """The step that read what a load writes has ended well, so it has landed."""
        if entry.load is not None and self.offload is not None:
            self.offload.poll()
            assert not entry.load.outstanding, "the runner did not wait for a load"
            self._loaded(entry)

    def _loaded(self, entry: Entry) -> None:
        entry.load = None
        self.store(entry, loaded=True)

    def computed(self, entry: Entry, tokens: int, *, at_prompt_end: bool) -> None:
        """Book ``tokens`` more positions as run through the layers."""
        entry.request.computed_tokens += tokens
        self._turn_state(entry)
        self._windows.slide(entry, at_prompt_end=at_prompt_end)

    def _turn_state(self, entry: Entry) -> None:
        """The chunk's state is in the slot it wrote: the next chunk reads that, and on a page boundary it is kept."""
        if self._state is None:
            return
        table = entry.request.tables[self._state]
        entry.receipt = self.cache.trim(entry.receipt_held, self._state, keep=0)
        table[0] = table[1]
        if entry.request.computed_tokens % self._page == 0:
            table[1], entry.kept_slot = entry.kept_slot, table[1]
            entry.kept_tokens = entry.request.computed_tokens

    def store(self, entry: Entry, *, loaded: bool = False) -> None:
        """Give the computed whole pages to the tree and go on reading them there, under a new lock.

        After a load or a rebuild there may be window pages and a state to give though the tree has all full pages.
        """
        request, old = entry.request, entry.receipt_held
        known = request.computed_tokens if self._state is None else entry.kept_tokens
        pages = max(known, entry.rebuilt_until if loaded else 0) // self._page
        is_rebuilt = entry.rebuilt_until > 0 and not entry.is_rebuilding
        if pages <= old.pages and not (loaded or is_rebuilt):
            return
        tokens = request.tokens[: pages * self._page]
        given = [self._to_store(entry, group, pages) for group in range(len(request.tables))]
        duplicates = self.cache.insert(request.namespace, tokens, given)
        for group, twins in enumerate(duplicates):
            self.held_back.give_up(group, twins)
        if entry.is_rebuilding:
            entry.receipt, tables = self.cache.lock_whole(request.namespace, tokens)
        else:
            match = self.cache.match(request.namespace, tokens)
            assert match.pages == pages, "what was just stored is usable"
            entry.receipt, tables = self.cache.lock(match), match.tables
        self.cache.release(old)
        for group, (table, stored) in enumerate(zip(request.tables, tables, strict=True)):
            if group == self._state:
                self._give_kept(entry, stored[0])
            elif group == self._window:
                self._windows.stored(entry, pages, stored)
            else:
                table[:pages] = stored
        if is_rebuilt:
            entry.rebuilt_until = entry.window_start = 0
        if self.offload is not None:
            self.offload.stored(entry.receipt.node)

    def _to_store(self, entry: Entry, group: int, pages: int) -> list[int]:
        if group == self._state:
            return [entry.kept_slot]
        return self._windows.to_store(entry, pages) if group == self._window else entry.request.tables[group][:pages]

    def _give_kept(self, entry: Entry, stored: int) -> None:
        """The kept state is the tree's now, as slot ``stored``; if the next chunk starts from it, it reads it there."""
        assert self._state is not None
        table = entry.request.tables[self._state]
        if table[0] == entry.kept_slot:
            table[0] = stored
        else:
            entry.receipt = self.cache.trim(entry.receipt_held, self._state, keep=0)
        entry.kept_slot = NULL_PAGE

    def leave(self, entry: Entry) -> None:
        """End or preempt a request: the whole pages it computed stay in the tree, the rest is freed."""
        if entry.load is None:
            self.store(entry)
        self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """End a request and keep nothing that is not in the tree already: what a failed step wrote is unknown."""
        receipt, owned = entry.receipt_held, self._owned(entry)
        if entry.load is not None and entry.load.outstanding:
            self._adrift.append(entry.load)
            owned = [
                [page for page in pages if page not in targets]
                for pages, targets in zip(owned, map(set, entry.load.targets), strict=True)
            ]
        entry.load = None
        for group, pages in enumerate(owned):
            if group == self._window:
                self._windows.give_back(entry, pages)
            else:
                self.held_back.give_up(group, pages)
        self.cache.release(receipt)
        self._tenants.remove(entry)
        entry.receipt = None
        entry.request.tables = ()

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` unless the cache is what it claims to be."""
        for entry in self._tenants:
            self._windows.check(entry)
        recount(
            self.cache,
            [(entry, self._owned(entry)) for entry in self._tenants],
            ownerless=[self.held_back.pages(), *(load.targets for load in self._adrift)],
            pins=[] if self.offload is None else list(self.offload.pins()),
        )
        if self.offload is not None:
            self.offload.check()

    def snapshot_events(self) -> tuple[Event, ...]:
        """Store events that rebuild what is resident, on the device and below it, from nothing."""
        events = self.cache.snapshot_events()
        return events if self.offload is None else (*events, *self.offload.snapshot_events())

    def reset(self) -> None:
        """Forget all prefixes, copies below the device as well; the memory must be idle."""
        self.cache.reset()
        if self.offload is not None:
            self.offload.reset()

    def _obtainable(self, group: int) -> int:
        component = self.cache.components[group]
        return component.pool.free_pages + component.unlocked.pages

    def _take(self, group: int, pages: int) -> list[int]:
        """Pages out of the pool, which the tree gives up some for if need be."""
        pool = self.cache.pools[group]
        self.cache.evict(group, pages - pool.free_pages)
        return pool.allocate(pages)

    def _owned(self, entry: Entry) -> list[list[int]]:
        """For each group the pages that are the request's own."""
        owned = []
        for group, table in enumerate(entry.request.tables):
            if group == self._state:
                pages = [table[1], entry.kept_slot]
            elif group == self._window:
                pages = self._windows.owned(entry)
            else:
                pages = table[entry.receipt_held.pages :]
            owned.append([page for page in pages if page != NULL_PAGE])
        return owned
