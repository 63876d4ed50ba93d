"""The pages of the requests that run: taken from the pools, shared with the tree, given back.

The only place where a page changes its owner::

    pool --extend--> request --store--> tree --evict--> pool
                        |                 |
                        +--slide, leave   +--admit (reads under a lock)

Nothing here is called while a batch runs, so no page that is given back can still be written.
"""

from __future__ import annotations

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import check_integrity
from engine_shim.cache.radix import FULL, WINDOW, RadixCache, Receipt, shared_pages
from engine_shim.schedule.entry import Entry
from engine_shim.types import NULL_PAGE, CacheLayout


class Memory:
    """Keeps ``tables``, ``computed_tokens`` and the receipts of running requests in step with the cache."""

    def __init__(self, layout: CacheLayout, events: EventRecorder) -> None:
        self.cache = RadixCache(layout, events)
        self._page = layout.page_tokens
        self._has_window = layout.window is not None
        self._window_pages = layout.window_pages()
        self._tenants: list[Entry] = []

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
        entry.stops = [match.full_pages * self._page] if match.full_pages > match.pages else []
        entry.prefilling = True
        request.tables = match.tables
        request.computed_tokens = match.pages * self._page
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
        """Store the pages of a prefill in progress, if others can use them: with window layers only at a stop."""
        if not self._has_window:
            self.store(entry)

    def fit(self, entry: Entry, tokens: int, *, spare_pages: int = 0) -> int:
        """How many of the next ``tokens`` positions fit on pages held, free or evictable.

        ``spare_pages`` of the latter are left for others.
        """
        held = len(entry.request.tables[FULL]) - spare_pages
        end = entry.request.computed_tokens + tokens
        if end > (held + self._obtainable_pages()) * self._page:
            self._trim_passed_locks()
        end = min(end, (held + self._obtainable_pages()) * self._page)
        return max(0, end - entry.request.computed_tokens)

    def extend(self, entry: Entry, tokens: int) -> None:
        """Make the tables long enough for the next ``tokens`` positions, which must ``fit``."""
        tables = entry.request.tables
        pages = -(-(entry.request.computed_tokens + tokens) // self._page) - len(tables[FULL])
        if pages <= 0:
            return
        cache = self.cache
        cache.evict_full(pages - cache.pools[FULL].free_pages)
        if self._has_window:
            cache.evict_window(pages - cache.pools[WINDOW].free_pages)
        for pool, table in zip(cache.pools, tables, strict=True):
            table += pool.allocate(pages)

    def slide(self, entry: Entry, *, at_prompt_end: bool) -> None:
        """Let go of window pages that no position from the current page on looks back to.

        Counted from the start of the page in progress, not from the position itself, so that a prefix that
        ends on this page boundary has its whole window when it is stored. At the end of a prompt, from the page
        of its last token: whoever sends the same prompt again computes that token and needs the window before it.
        """
        if not self._has_window:
            return
        receipt, table = _receipt(entry), entry.request.tables[WINDOW]
        current = (entry.request.computed_tokens - at_prompt_end) // self._page
        start = max(entry.window_from, current - self._window_pages)
        own = table[max(entry.window_from, receipt.pages) : start]
        self.cache.pools[WINDOW].free(own)
        table[entry.window_from : start] = [NULL_PAGE] * (start - entry.window_from)
        entry.window_from = start
        if start >= receipt.pages:
            entry.receipt = self.cache.trim_window(receipt, 0)

    def store(self, entry: Entry) -> None:
        """Give the computed whole pages to the tree and go on reading them there, under a new lock."""
        request, old = entry.request, _receipt(entry)
        pages = request.computed_tokens // self._page
        if pages <= old.pages:
            return
        tokens = request.tokens[: pages * self._page]
        duplicates = self.cache.insert(request.namespace, tokens, [table[:pages] for table in request.tables])
        for pool, twins in zip(self.cache.pools, duplicates, strict=True):
            pool.free(twins)
        match = self.cache.match(request.namespace, tokens)
        assert match.pages == pages, "what was just stored is usable"
        entry.receipt = self.cache.lock(match)
        self.cache.release(old)
        for table, stored in zip(request.tables, match.tables, strict=True):
            table[:pages] = stored
        entry.window_from = max(entry.window_from, pages - self._window_pages)

    def leave(self, entry: Entry) -> None:
        """End or preempt a request: the whole pages it computed stay in the tree, the rest is freed."""
        self.store(entry)
        self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """End a request and keep nothing that is not in the tree already: what a failed step wrote is unknown."""
        receipt = _receipt(entry)
        for pool, table in zip(self.cache.pools, entry.request.tables, strict=True):
            pool.free(page for page in table[receipt.pages :] if page != NULL_PAGE)
        self.cache.release(receipt)
        self._tenants.remove(entry)
        entry.receipt = None
        entry.request.tables = ()

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` unless every page has exactly one owner and all counts are true."""
        held: list[set[int]] = [set() for _ in self.cache.pools]
        for entry in self._tenants:
            for pages, table in zip(held, entry.request.tables, strict=True):
                pages.update(table[_receipt(entry).pages :])
        for pages in held:
            pages.discard(NULL_PAGE)
        check_integrity(self.cache, held=held, receipts=[_receipt(entry) for entry in self._tenants])

    def _trim_passed_locks(self) -> None:
        """Unlock window pages of locks that the window has passed in part.

        That splits nodes, so ``slide`` leaves it until the whole lock is passed or pages are short.
        """
        for entry in self._tenants:
            receipt = _receipt(entry)
            keep = max(0, receipt.pages - entry.window_from)
            if keep < receipt.window_pages:
                entry.receipt = self.cache.trim_window(receipt, keep)

    def _obtainable_pages(self) -> int:
        cache = self.cache
        full = cache.pools[FULL].free_pages + cache.full_unlocked.pages
        if not self._has_window:
            return full
        return min(full, cache.pools[WINDOW].free_pages + cache.window_unlocked.pages)


def _receipt(entry: Entry) -> Receipt:
    assert entry.receipt is not None, "only an admitted request holds pages"
    return entry.receipt
