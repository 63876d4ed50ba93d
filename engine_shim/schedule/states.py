"""What a running request has of the recurrent group: slots that its chunks write in turn, so no state is copied."""

from __future__ import annotations

from collections.abc import Callable

from engine_shim.cache.radix import RadixCache
from engine_shim.schedule.entry import Entry
from engine_shim.types import NULL_PAGE, CacheLayout

#: Slots of a group out of its pool, which the tree gives up some for if need be.
Take = Callable[[int, int], list[int]]


class States:
    """``group`` is the recurrent group's number, None without one: then nothing here does anything.

    See ``Entry`` for the slots.
    """

    def __init__(self, layout: CacheLayout, cache: RadixCache, *, take: Take) -> None:
        self.group = layout.state.index if layout.state else None
        self._page = layout.page_tokens
        self._cache = cache
        self._take = take

    def extend(self, entry: Entry) -> None:
        """See that there is a slot to write."""
        if self.group is not None and (table := entry.request.tables[self.group])[1] == NULL_PAGE:
            table[1:] = self._take(self.group, 1)

    def tables_behind(self, entry: Entry) -> tuple[list[int], ...]:
        """Tables of its own for a chunk behind a launched one: it goes on from the state that this writes, in place."""
        tables = tuple(list(table) for table in entry.request.tables)
        if self.group is not None:
            tables[self.group][0] = tables[self.group][1]
        return tables

    def loaded(self, entry: Entry, slot: int, *, tokens: int) -> None:
        """The state after ``tokens`` is being loaded into a slot of its own, and the first chunk reads it there."""
        assert self.group is not None
        entry.kept_slot, entry.kept_tokens = slot, tokens
        entry.request.tables[self.group][0] = slot

    def turn(self, entry: Entry) -> None:
        """The chunk's state is in the slot it wrote: the next chunk reads that, and on a page boundary it is kept."""
        if self.group is None:
            return
        table = entry.request.tables[self.group]
        entry.receipt = self._cache.trim(entry.receipt_held, self.group, keep=0)
        table[0] = table[1]
        if entry.request.computed_tokens % self._page == 0:
            table[1], entry.kept_slot = entry.kept_slot, table[1]
            entry.kept_tokens = entry.request.computed_tokens

    def given(self, entry: Entry, stored: int) -> None:
        """The kept state is the tree's now, as slot ``stored``; if the next chunk starts from it, it reads it there."""
        assert self.group is not None
        table = entry.request.tables[self.group]
        if table[0] == entry.kept_slot:
            table[0] = stored
        else:
            entry.receipt = self._cache.trim(entry.receipt_held, self.group, keep=0)
        entry.kept_slot = NULL_PAGE
