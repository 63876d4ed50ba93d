"""Where a request starts: behind the longest prefix that the tree, the host or the disk has of it."""

from __future__ import annotations

from collections.abc import Sequence

from engine_shim.cache.radix import FULL, Match, RadixCache
from engine_shim.schedule.entry import Entry
from engine_shim.schedule.offload import Offload
from engine_shim.schedule.sinks import Sinks
from engine_shim.types import NULL_PAGE, CacheLayout, Request, WindowTails


class Admission:
    """Looks a request up and takes the locks it starts with."""

    def __init__(self, layout: CacheLayout, cache: RadixCache, offload: Offload | None) -> None:
        self._layout = layout
        self._cache = cache
        self._offload = offload
        self._page = layout.page_tokens
        self._stores = layout.window_tails is WindowTails.STORED
        self._window = layout.window.index if layout.window else None
        self._state = layout.state.index if layout.state else None
        self._checkpoint = layout.checkpoint_tokens

    def look_up(self, entry: Entry) -> None:
        """Have what a request that is queued could use of the disk fetched while it waits."""
        if self._offload is not None:
            request = entry.request
            tokens = request.tokens[: self._cap(entry) * self._page]
            entry.fetches = self._offload.fetch(request.namespace, tokens, self._match(request, tokens))

    def known_tokens(self, entry: Entry) -> int:
        """How much of a waiting request's prompt could be reused now."""
        match = self._cache.match(entry.request.namespace, entry.request.tokens[:-1])
        return self._layout.resume_tokens(match.pages, match.full_pages)

    def admit(self, entry: Entry) -> None:
        """Start a request. Its last token is always computed. What the host has is loaded from ``Memory.begin`` on."""
        request = entry.request
        cap = self._cap(entry)
        tokens = request.tokens[: cap * self._page]
        match = self._match(request, tokens)
        depth, pages, entry.load = match.full_pages, match.pages, None
        found = start = self._layout.resume_tokens(match.pages, match.full_pages)
        if self._offload is not None:
            depth, entry.load = self._offload.find(request.namespace, tokens, match)
        if entry.load is not None:
            pages = entry.load.pages
            start = pages * self._page if self._stores else self._layout.rebuild_tokens(pages)
        elif start != pages * self._page:
            pages = match.full_pages
        is_rebuilt = start < pages * self._page
        entry.rebuilt_until, entry.window_start = (pages * self._page, start) if is_rebuilt else (0, 0)
        if entry.load is None and not is_rebuilt:
            entry.receipt = self._cache.lock(match)
            request.tables = match.tables
        else:
            locked = pages if entry.load is None else entry.load.full_from
            entry.receipt, request.tables = self._cache.lock_whole(request.namespace, tokens[: locked * self._page])
            if self._state is not None:
                request.tables[self._state][:] = [NULL_PAGE, NULL_PAGE]
            if self._window is not None and is_rebuilt:
                request.tables[self._window][:] = [NULL_PAGE] * (start // self._page)
        if self._offload is not None and entry.load is None and not match.node.is_saved:
            self._offload.reused(match.node)
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
        if self._offload is not None and self._offload.sinks.exceeds_device(request):
            self._offload.save(match.node)
            self._start_below(entry, self._offload.sinks)

    def _start_below(self, entry: Entry, sinks: Sinks) -> None:
        """A context longer than the device reads on the host what that has behind the head, or else gets a head."""
        entry.head_pages = sinks.head_pages
        load = entry.load
        if load is not None and load.pages > entry.head_pages:
            copies, load.copies[FULL] = load.copies[FULL], []
            entry.request.tables[FULL].extend([NULL_PAGE] * len(copies))
            sinks.hold(entry, copies)
            if not any(load.copies):
                entry.load = None
        elif entry.head_pages * self._page > entry.request.computed_tokens:
            entry.stop_at(entry.head_pages * self._page)

    def _match(self, request: Request, tokens: Sequence[int]) -> Match:
        """What the tree has of a request's tokens; of a context longer than the device no more than a head."""
        if self._offload is not None and self._offload.sinks.exceeds_device(request):
            tokens = tokens[: self._offload.sinks.head_pages * self._page]
        return self._cache.match(request.namespace, tokens)

    def _cap(self, entry: Entry) -> int:
        return (len(entry.request.tokens) - 1) // self._page
