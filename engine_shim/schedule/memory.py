"""The pages of the requests that run: taken from the pools, shared with the tree, given back.

The only place where a page changes its owner::

    pool --extend--> request --store--> tree --evict--> pool
                        |                 |
                        +--slide, leave   +--admit (reads under a lock)

Nothing here is called while a batch runs, so no page that is given back can still be written.
"""

from __future__ import annotations

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import IntegrityError, check_integrity
from engine_shim.cache.radix import FULL, RadixCache, Receipt, shared_pages
from engine_shim.schedule.entry import Entry
from engine_shim.types import NULL_PAGE, CacheLayout


class Memory:
    """Keeps ``tables``, ``computed_tokens`` and the receipts of running requests in step with the cache."""

    def __init__(self, layout: CacheLayout, events: EventRecorder) -> None:
        self.cache = RadixCache(layout, events)
        self._page = layout.page_tokens
        self._window = layout.window.index if layout.window else None
        self._state = layout.state.index if layout.state else None
        self._checkpoint = layout.checkpoint_tokens
        self._window_pages = layout.window_pages()
        self._tenants: list[Entry] = []

    @property
    def aligns_chunks(self) -> bool:
        """Prefill chunks should end on page boundaries: only there a recurrent state can be kept."""
        return self._state is not None

    @property
    def is_idle(self) -> bool:
        """No request holds a page."""
        return not self._tenants

    def admit(self, entry: Entry) -> None:
        """Start a request behind the longest prefix the tree has of it; its last token is always computed."""
        request = entry.request
        cap = (len(request.tokens) - 1) // self._page
        match = self.cache.match(request.namespace, request.tokens[: cap * self._page])
        entry.receipt = self.cache.lock(match)
        entry.window_from = max(0, match.pages - self._window_pages)
        entry.kept_slot, entry.kept_tokens = NULL_PAGE, 0
        entry.prefilling = True
        request.tables = match.tables
        request.computed_tokens = match.pages * self._page
        entry.stops = []
        if match.full_pages > match.pages:
            entry.stop_at(match.full_pages * self._page)
        if self._state is not None:
            # A state serves at its own position only: leave some along the way, and one for the same prompt again.
            grid = range(0, len(request.tokens), self._checkpoint)
            for tokens in (*grid, cap * self._page):
                if tokens > request.computed_tokens:
                    entry.stop_at(tokens)
        self._tenants.append(entry)

    def shared_tokens(self, entry: Entry, other: Entry) -> int:
        """How much of its prompt, in whole pages, ``entry`` could reuse if ``other`` had stored all of its own."""
        ours, theirs = entry.request, other.request
        if ours.namespace != theirs.namespace or ours.tokens[: self._page] != theirs.tokens[: self._page]:
            return 0
        pages = shared_pages(ours.tokens, theirs.tokens, page_tokens=self._page)
        return min(pages, (len(ours.tokens) - 1) // self._page) * self._page

    def known_tokens(self, entry: Entry) -> int:
        """How much of a waiting request's prompt could be reused now."""
        return self.cache.match(entry.request.namespace, entry.request.tokens[:-1]).pages * self._page

    def share(self, entry: Entry) -> None:
        """Store the pages of a prefill in progress if others can use them: full layers anywhere, others at a stop."""
        if len(self.cache.pools) == 1:
            self.store(entry)

    def fit(self, entry: Entry, tokens: int, *, spare_pages: int = 0) -> int:
        """How many of the next ``tokens`` positions fit on pages held, free or evictable.

        ``spare_pages`` of the latter are left for others.
        """
        held = len(entry.request.tables[FULL]) - spare_pages
        end = entry.request.computed_tokens + tokens
        if not self._state_fits(entry, spare=spare_pages):
            return 0
        if end > (held + self._obtainable_pages()) * self._page:
            self._trim_passed_locks()
        end = min(end, (held + self._obtainable_pages()) * self._page)
        return max(0, end - entry.request.computed_tokens)

    def extend(self, entry: Entry, tokens: int) -> None:
        """Make the tables long enough for the next ``tokens`` positions, which must ``fit``."""
        tables = entry.request.tables
        if self._state is not None and tables[self._state][1] == NULL_PAGE:
            tables[self._state][1:] = self._take(self._state, 1)
        pages = -(-(entry.request.computed_tokens + tokens) // self._page) - len(tables[FULL])
        if pages <= 0:
            return
        for group, table in enumerate(tables):
            if group != self._state:
                table += self._take(group, pages)

    def computed(self, entry: Entry, tokens: int, *, at_prompt_end: bool) -> None:
        """Book ``tokens`` more positions as run through the layers."""
        entry.request.computed_tokens += tokens
        self._turn_state(entry)
        self._slide(entry, at_prompt_end=at_prompt_end)

    def _turn_state(self, entry: Entry) -> None:
        """The chunk's state is in the slot it wrote: the next chunk reads that, and on a page boundary it is kept."""
        if self._state is None:
            return
        table = entry.request.tables[self._state]
        entry.receipt = self.cache.trim(_receipt(entry), self._state, keep=0)
        table[0] = table[1]
        if entry.request.computed_tokens % self._page == 0:
            table[1], entry.kept_slot = entry.kept_slot, table[1]
            entry.kept_tokens = entry.request.computed_tokens

    def _slide(self, entry: Entry, *, at_prompt_end: bool) -> None:
        """Let go of window pages that no position from the current page on looks back to.

        Counted from the start of the page in progress, not from the position itself, so that a prefix that
        ends on this page boundary has its whole window when it is stored. At the end of a prompt, from the page
        of its last token: whoever sends the same prompt again computes that token and needs the window before it.
        """
        if self._window is None:
            return
        receipt, table = _receipt(entry), entry.request.tables[self._window]
        current = (entry.request.computed_tokens - at_prompt_end) // self._page
        start = max(entry.window_from, current - self._window_pages)
        own = table[max(entry.window_from, receipt.pages) : start]
        self.cache.pools[self._window].free(own)
        table[entry.window_from : start] = [NULL_PAGE] * (start - entry.window_from)
        entry.window_from = start
        if start >= receipt.pages:
            entry.receipt = self.cache.trim(receipt, self._window, keep=0)

    def store(self, entry: Entry) -> None:
        """Give the computed whole pages to the tree and go on reading them there, under a new lock."""
        request, old = entry.request, _receipt(entry)
        pages = (request.computed_tokens if self._state is None else entry.kept_tokens) // self._page
        if pages <= old.pages:
            return
        tokens = request.tokens[: pages * self._page]
        given = [
            [entry.kept_slot] if group == self._state else table[:pages] for group, table in enumerate(request.tables)
        ]
        duplicates = self.cache.insert(request.namespace, tokens, given)
        for pool, twins in zip(self.cache.pools, duplicates, strict=True):
            pool.free(twins)
        match = self.cache.match(request.namespace, tokens)
        assert match.pages == pages, "what was just stored is usable"
        entry.receipt = self.cache.lock(match)
        self.cache.release(old)
        for group, (table, stored) in enumerate(zip(request.tables, match.tables, strict=True)):
            if group == self._state:
                self._give_kept(entry, stored[0])
            else:
                table[:pages] = stored
        entry.window_from = max(entry.window_from, pages - self._window_pages)

    def _give_kept(self, entry: Entry, stored: int) -> None:
        """The kept state is the tree's now, as slot ``stored``; if the next chunk starts from it, it reads it there."""
        assert self._state is not None
        table = entry.request.tables[self._state]
        if table[0] == entry.kept_slot:
            table[0] = stored
        else:
            entry.receipt = self.cache.trim(_receipt(entry), self._state, keep=0)
        entry.kept_slot = NULL_PAGE

    def leave(self, entry: Entry) -> None:
        """End or preempt a request: the whole pages it computed stay in the tree, the rest is freed."""
        self.store(entry)
        self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """End a request and keep nothing that is not in the tree already: what a failed step wrote is unknown."""
        receipt = _receipt(entry)
        for pool, pages in zip(self.cache.pools, self._owned(entry), strict=True):
            pool.free(pages)
        self.cache.release(receipt)
        self._tenants.remove(entry)
        entry.receipt = None
        entry.request.tables = ()

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` unless every page has exactly one owner and all counts are true."""
        held: list[list[int]] = [[] for _ in self.cache.pools]
        for entry in self._tenants:
            self._check_reads(entry)
            for pages, own in zip(held, self._owned(entry), strict=True):
                pages += own
        check_integrity(self.cache, held=held, receipts=[_receipt(entry) for entry in self._tenants])

    def _check_reads(self, entry: Entry) -> None:
        """What a request reads and does not own is the tree's, and under its lock."""
        receipt = _receipt(entry)
        for group, table in enumerate(entry.request.tables):
            locked = self.cache.locked_pages(receipt, group)
            read = set(table[:1] if group == self._state else table[: receipt.pages])
            if not read <= {NULL_PAGE, *locked, *self._owned(entry)[group]}:
                raise IntegrityError(f"request {entry.request.id!r} reads pages of group {group} that may be evicted")

    def _state_fits(self, entry: Entry, *, spare: int) -> bool:
        if self._state is None or entry.request.tables[self._state][1] != NULL_PAGE:
            return True
        return self._obtainable(self._state) > spare

    def _trim_passed_locks(self) -> None:
        """Unlock window pages of locks that the window has passed in part.

        That splits nodes, so ``slide`` leaves it until the whole lock is passed or pages are short.
        """
        for entry in self._tenants:
            receipt = _receipt(entry)
            keep = max(0, receipt.pages - entry.window_from)
            if self._window is not None and keep < receipt.extents[self._window]:
                entry.receipt = self.cache.trim(receipt, self._window, keep=keep)

    def _obtainable_pages(self) -> int:
        return min(self._obtainable(group) for group in range(len(self.cache.pools)) if group != self._state)

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
            pages = [table[1], entry.kept_slot] if group == self._state else table[_receipt(entry).pages :]
            owned.append([page for page in pages if page != NULL_PAGE])
        return owned


def _receipt(entry: Entry) -> Receipt:
    assert entry.receipt is not None, "only an admitted request holds pages"
    return entry.receipt
