"""The pages of the requests that run: taken from the pools, shared with the tree, given back.

The only place where a page changes its owner::

    pool --extend--> request --store--> tree --evict--> pool
                        |                 |
                        +--slide, leave   +--admit (reads under a lock)

While steps are launched nobody leaves who is in one of them, and pages that are given up are held back (``held_back``),
so none that a launched step uses is ever free. What the tree gives up is in no step: those who are hold its locks.
Transfers go on all the time: what a save reads is pinned in the tree, and what a load writes is the request's own; if
that leaves before the load has landed, the pages are *adrift* until then and belong to nobody else. Of a context longer
than the device a part sinks to the host instead of going to the tree (see ``sinks``).
"""

from __future__ import annotations

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.radix import FULL, RadixCache
from engine_shim.cache.transfers import Mover
from engine_shim.schedule.admission import Admission
from engine_shim.schedule.entry import Entry
from engine_shim.schedule.held_back import HeldBack
from engine_shim.schedule.offload import Offload
from engine_shim.schedule.recount import recount
from engine_shim.schedule.sinks import Sinks
from engine_shim.schedule.states import States
from engine_shim.schedule.transit import Load, OffloadPlan
from engine_shim.schedule.windows import windows_of
from engine_shim.types import NULL_PAGE, CacheLayout
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
        self.held_back = HeldBack(self.cache.pools)
        self._windows = windows_of(layout, self.cache, take=self._take, give_up=self.held_back.give_up)
        self._window = self._windows.group
        self._states = States(layout, self.cache, take=self._take)
        self._state = self._states.group
        self._admission = Admission(layout, self.cache, self.offload)
        self._tenants: list[Entry] = []
        self._adrift: list[Load] = []

    @property
    def context_tokens(self) -> int:
        """The longest context: the last sampled token is never computed, so it needs no page."""
        pages = self._layout.pages[FULL] - 1
        return 1 + self._page * (pages if self.offload is None else max(pages, self.offload.sinks.context_pages))

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
        self._admission.look_up(entry)

    def awaits_fetch(self, entry: Entry) -> bool:
        """Whether something that a queued request needs is still on its way to the host."""
        return self.offload is not None and not all(map(self.offload.is_landed, entry.fetches))

    def admit(self, entry: Entry) -> None:
        """Start a request behind the longest prefix that is known; what the host has is loaded from ``begin`` on."""
        self._admission.admit(entry)
        self._tenants.append(entry)

    def known_tokens(self, entry: Entry) -> int:
        """How much of a waiting request's prompt could be reused now."""
        return self._admission.known_tokens(entry)

    def has_room_below(self, entry: Entry) -> bool:
        """Whether an admitted request has room on the host for what the device cannot hold of it."""
        if self.offload is None or entry.head_pages is None:
            return True
        return self.offload.sinks.has_room(entry, self._tenants)

    def within_reach(self, entry: Entry, tokens: int) -> int:
        """The next ``tokens`` positions, or as many as can be run before a part of the context has to sink."""
        if self.offload is None or entry.head_pages is None:
            return tokens
        return max(0, min(tokens, self.offload.sinks.reach_tokens(entry) - entry.next_start))

    def share(self, entry: Entry) -> None:
        """Store the pages of a prefill in progress if others can use them: full layers anywhere, others at a stop."""
        if self._window is not None or self._state is not None:
            return
        if self.offload is None or not self.offload.sinks.is_deep(entry):  # a chunk of this very step reads its parts
            self.store(entry)

    def room(self) -> tuple[int, ...]:
        """Of each group the pages that are free or evictable, or will be free once the launched steps are over."""
        return tuple(self._obtainable(group) + len(pages) for group, pages in enumerate(self.held_back.pages()))

    def fit(self, entry: Entry, tokens: int, *, spare_pages: int = 0) -> int:
        """How many of the next ``tokens`` positions fit on pages held, free or evictable.

        ``spare_pages`` of the latter are left for others.
        """
        start, end = entry.next_start, entry.next_start + self.within_reach(entry, tokens)
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
        self._states.extend(entry)
        pages = -(-(entry.next_start + tokens) // self._page)
        for group, table in enumerate(entry.request.tables):
            if group == self._window:
                self._windows.grow(entry, pages)
            elif group != self._state and len(table) < pages:
                table += self._take(group, pages - len(table))

    def tables_behind(self, entry: Entry) -> tuple[list[int], ...]:
        """Tables of its own for a chunk behind a launched one."""
        return self._states.tables_behind(entry)

    def _start_load(self, entry: Entry, load: Load) -> None:
        """Take pages for a load and send it; the request then is as if it had computed them."""
        assert self.offload is not None
        tables = entry.request.tables
        targets = [self._take(group, len(copies)) for group, copies in enumerate(load.copies)]
        for group, (table, pages) in enumerate(zip(tables, targets, strict=True)):
            if group == self._state:
                self._states.loaded(entry, pages[0], tokens=load.pages * self._page)
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
        """Whether a chunk can be launched: nothing sinks, and all is there or the last piece lands while layers run."""
        if entry.load is None or self.offload is None:
            return entry.sinking is None
        return self.offload.overlaps and len(entry.load.outstanding) <= 1

    def poll(self) -> list[Entry]:
        """Take note of the transfers that have landed. Returns the requests whose load did not arrive whole."""
        if self.offload is None:
            return []
        self._note_landings(self.offload)
        failed = []
        for entry in self._tenants:
            if self.offload.sinks.has_landed(entry):
                self._settle(entry, self.offload.sinks)
            if (entry.load is not None and entry.load.failed) or any(copy.is_damaged for copy in entry.sunk):
                failed.append(entry)
            elif entry.load is not None and entry.load.started and not entry.load.outstanding:
                self._loaded(entry)
        self.offload.write_back()
        return failed

    def _note_landings(self, offload: Offload) -> None:
        """What was adrift and has come ashore is free."""
        offload.poll()
        for load in [load for load in self._adrift if not load.outstanding]:
            self._adrift.remove(load)
            for pool, pages in zip(self.cache.pools, load.targets, strict=True):
                pool.free(pages)
        for left in offload.sinks.washed_up():
            self.cache.release(left.receipt)
            for pool, pages in zip(self.cache.pools, left.owned, strict=True):
                pool.free(pages)

    def landed(self, entry: Entry) -> None:
        """The step that read what a load writes has ended well, so it has landed."""
        if entry.load is not None and self.offload is not None:
            self._note_landings(self.offload)
            assert not entry.load.outstanding, "the runner did not wait for a load"
            self._loaded(entry)

    def _loaded(self, entry: Entry) -> None:
        entry.load = None
        if not entry.sunk:
            self.store(entry, loaded=True)

    def computed(self, entry: Entry, tokens: int, *, at_prompt_end: bool) -> None:
        """Book ``tokens`` more positions as run through the layers."""
        entry.request.computed_tokens += tokens
        self._states.turn(entry)
        self._windows.slide(entry, at_prompt_end=at_prompt_end)

    def sink(self, entry: Entry, *, fitting: int) -> bool:
        """Have a part of a context longer than the device go to the host, as no more than ``fitting`` tokens fit else.

        Whether that made room, or will when it has landed.
        """
        sinks = self.offload.sinks if self.offload is not None else None
        if sinks is None or not (sinks.is_deep(entry) or (fitting == 0 and self._is_long(entry, sinks))):
            return False
        return self._sink(entry, sinks, at_boundary=False)

    def _is_long(self, entry: Entry, sinks: Sinks) -> bool:
        return entry.head_pages is not None or sinks.fills_device(entry.next_start)

    def _sink(self, entry: Entry, sinks: Sinks, *, at_boundary: bool) -> bool:
        before = entry.own_from
        sinks.begin(entry, at_boundary=at_boundary)
        if sinks.has_landed(entry):
            self._settle(entry, sinks)
        return entry.sinking is not None or entry.own_from > before

    def _settle(self, entry: Entry, sinks: Sinks) -> None:
        """What has sunk is free, and so is the window page that was kept at the end of a prompt to be copied."""
        self.held_back.give_up(FULL, sinks.settle(entry))
        self._windows.slide(entry, at_prompt_end=False)

    def store(self, entry: Entry, *, loaded: bool = False) -> None:
        """Give the computed whole pages to the tree and go on reading them there, under a new lock.

        After a load or a rebuild there may be window pages and a state to give though the tree has all full pages.
        """
        if entry.sinking is not None:  # transfers read its own pages, which the tree may have twins of
            return
        if self.offload is not None and self.offload.sinks.is_deep(entry):
            self._store_below(entry, self.offload.sinks)
            return
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
                self._states.given(entry, stored[0])
            elif group == self._window:
                self._windows.stored(entry, pages, stored)
            else:
                table[:pages] = stored
        if is_rebuilt:
            entry.rebuilt_until = entry.window_start = 0
        if self.offload is not None:
            self.offload.stored(entry.receipt.node)
            if entry.head_pages is not None:
                self.offload.save(entry.receipt.node)

    def _store_below(self, entry: Entry, sinks: Sinks) -> None:
        """What the tree cannot take goes to the host, with all that others need to go on from there."""
        if entry.rebuilt_until and not entry.is_rebuilding:
            entry.rebuilt_until = entry.window_start = 0
        self._sink(entry, sinks, at_boundary=True)

    def _to_store(self, entry: Entry, group: int, pages: int) -> list[int]:
        if group == self._state:
            return [entry.kept_slot]
        return self._windows.to_store(entry, pages) if group == self._window else entry.request.tables[group][:pages]

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
        if self._window is not None and self.cache.components[self._window].is_rebuilt:  # nothing copies that
            self._windows.give_back(entry, owned[self._window])
            owned[self._window] = []
        if self.offload is None or not self.offload.sinks.leave(entry, owned):
            for group, pages in enumerate(owned):
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
            ownerless=[
                self.held_back.pages(),
                *(load.targets for load in self._adrift),
                *([] if self.offload is None else [left.owned for left in self.offload.sinks.adrift]),
            ],
            left=[] if self.offload is None else [left.receipt for left in self.offload.sinks.adrift],
            pins=[] if self.offload is None else list(self.offload.pins()),
        )
        if self.offload is not None:
            self.offload.check(copy for entry in self._tenants for copy in entry.sunk)

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
