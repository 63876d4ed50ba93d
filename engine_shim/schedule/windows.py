"""What a running request has of the sliding-window group: taken page by page, let go of as the window passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine_shim.cache.radix import RadixCache
from engine_shim.cache.ring import Rings
from engine_shim.schedule.entry import Entry
from engine_shim.types import NULL_PAGE, CacheLayout, WindowTails

#: Pages of a group out of its pool, which the tree gives up some for if need be.
Take = Callable[[int, int], list[int]]
#: Pages of a group back into its pool, as soon as no launched step uses them.
GiveUp = Callable[[int, Iterable[int]], None]


class Windows:
    """Pages come from the pool one by one; the tree has those that prefixes need, if it has not given them up.

    ``group`` is the window group's number, None without one: then nothing here is called but ``slide`` and
    ``trim_passed_locks``.
    """

    def __init__(self, layout: CacheLayout, cache: RadixCache, *, take: Take, give_up: GiveUp) -> None:
        self.group = layout.window.index if layout.window else None
        self.reach_pages = layout.window_pages()
        self._page = layout.page_tokens
        self._cache = cache
        self._take = take
        self._give_up = give_up

    def end(self, entry: Entry, pages: int) -> int:
        """Up to which page a request can run, if there are so many as ``pages`` by what is free or evictable."""
        return pages

    def grow(self, entry: Entry, pages: int) -> None:
        """Lengthen a request's table to ``pages`` pages, for which there has to be room."""
        table = self._table(entry)
        if len(table) < pages:
            table += self._take(self._window, pages - len(table))

    def slide(self, entry: Entry, *, at_prompt_end: bool) -> None:
        """Let go of window pages that no position from the current page on looks back to.

        Counted from the start of the page in progress, not from the position itself, so that a prefix that
        ends on this page boundary has its whole window when it is stored. At the end of a prompt, from the page
        of its last token: whoever sends the same prompt again computes that token and needs the window before it.
        """
        if self.group is None:
            return
        current = (entry.request.computed_tokens - at_prompt_end) // self._page
        start = max(entry.window_from, current - self.reach_pages)
        own = self._table(entry)[max(entry.window_from, entry.window_own_from) : start]
        self._give_up(self.group, own)
        self._pass(entry, start)
        if start >= entry.receipt_held.pages:
            entry.receipt = self._cache.trim(entry.receipt_held, self.group, keep=0)

    def trim_passed_locks(self, entries: Iterable[Entry]) -> None:
        """Unlock window pages of locks that the window has passed in part.

        That splits nodes, so ``slide`` leaves it until the whole lock is passed or pages are short.
        """
        if self.group is None:
            return
        for entry in entries:
            receipt = entry.receipt_held
            keep = max(0, receipt.pages - entry.window_from)
            if keep < receipt.extents[self.group]:
                entry.receipt = self._cache.trim(receipt, self.group, keep=keep)

    def to_store(self, entry: Entry, pages: int) -> list[int]:
        """Of a table of ``pages`` pages what the tree may have: nothing while the window is being rebuilt."""
        return [NULL_PAGE] * pages if entry.is_rebuilding else self._table(entry)[:pages]

    def stored(self, entry: Entry, pages: int, table: Sequence[int]) -> None:
        """The tree has the first ``pages`` pages now, and ``table`` says as which."""
        if not entry.is_rebuilding:
            self._table(entry)[:pages] = table
            entry.window_from = max(entry.window_from, pages - self.reach_pages)
            entry.window_own_from = pages

    def owned(self, entry: Entry) -> list[int]:
        """The pages that are the request's own."""
        return [page for page in self._table(entry)[entry.window_own_from :] if page != NULL_PAGE]

    def give_back(self, entry: Entry, pages: Sequence[int]) -> None:
        """A request leaves, and these are its own."""
        self._give_up(self._window, pages)

    def check(self, entry: Entry) -> None:
        """Raise ``PageError`` unless what a request has is what its table says, as far as that can be told here."""

    @property
    def _window(self) -> int:
        assert self.group is not None, "there are no windows"
        return self.group

    def _table(self, entry: Entry) -> list[int]:
        return entry.request.tables[self._window]

    def _pass(self, entry: Entry, start: int) -> None:
        self._table(entry)[entry.window_from : start] = [NULL_PAGE] * (start - entry.window_from)
        entry.window_from = start


class RingWindows(Windows):
    """Each request goes round in a ring of its own: nothing is shared, and nothing can be short but rings."""

    def __init__(self, layout: CacheLayout, cache: RadixCache, *, take: Take, give_up: GiveUp) -> None:
        super().__init__(layout, cache, take=take, give_up=give_up)
        self._pool = cache.pools[self._window]
        self.rings = Rings(self._pool, pages=layout.ring_pages, page_tokens=layout.page_tokens)

    def end(self, entry: Entry, pages: int) -> int:
        can = self.rings.is_open(entry.request.id) or self._pool.free_pages >= self.rings.pages
        return entry.window_from + self.rings.pages if can else 0

    def grow(self, entry: Entry, pages: int) -> None:
        owner, table = entry.request.id, self._table(entry)
        if len(table) < pages and not self.rings.is_open(owner):
            self.rings.open(owner)
        while len(table) < pages:
            table.append(self.rings.claim(owner, len(table), keep_from=entry.window_from))

    def slide(self, entry: Entry, *, at_prompt_end: bool) -> None:
        """As little as the next position needs is kept: nothing is for others."""
        self._pass(entry, max(entry.window_from, entry.request.computed_tokens // self._page - self.reach_pages))

    def trim_passed_locks(self, entries: Iterable[Entry]) -> None:
        """There are none."""

    def to_store(self, entry: Entry, pages: int) -> list[int]:
        return [NULL_PAGE] * pages

    def stored(self, entry: Entry, pages: int, table: Sequence[int]) -> None:
        """Nothing has changed hands."""

    def owned(self, entry: Entry) -> list[int]:
        return self.rings.held(entry.request.id)

    def give_back(self, entry: Entry, pages: Sequence[int]) -> None:
        self.rings.close(entry.request.id)

    def check(self, entry: Entry) -> None:
        self.rings.check(entry.request.id, self._table(entry))


def windows_of(layout: CacheLayout, cache: RadixCache, *, take: Take, give_up: GiveUp) -> Windows:
    """As the layout has it."""
    has_rings = layout.window is not None and layout.window_tails is WindowTails.RING
    return (RingWindows if has_rings else Windows)(layout, cache, take=take, give_up=give_up)
