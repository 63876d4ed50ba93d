"""How much of a request one step runs: cut to pages, with drafts behind it where there is room."""

from __future__ import annotations

from engine_shim.schedule.entry import Entry
from engine_shim.schedule.limits import Limits
from engine_shim.schedule.memory import Memory
from engine_shim.types import Chunk


class Chunks:
    """Makes the chunks of one step after the other, and has the memory extended for them."""

    def __init__(self, memory: Memory, limits: Limits, *, draft_tokens: int) -> None:
        self._memory = memory
        self._limits = limits
        self._page = memory.page_tokens
        self._draft_tokens = draft_tokens
        self._draft_budget = 0

    def begin(self, *, draft_budget: int) -> None:
        """A new step, in which so many drafts may be tried."""
        self._draft_budget = draft_budget

    def cut(self, entry: Entry, fitting: int) -> Chunk:
        """The next ``fitting`` positions of a request, or fewer; the memory has room for them."""
        request, count = entry.request, self._aligned(entry, fitting)
        room = self._room(entry, count)
        self._draft_budget -= room
        self._memory.extend(entry, count + room)
        return Chunk(
            request=request,
            start=entry.next_start,
            count=count,
            tables=self._memory.tables_behind(entry) if entry.launches else request.tables,
            samples=count == entry.remaining_tokens,
            draws=len(request.tokens) + entry.launched_samples - len(request.prompt),
            room=room,
            rebuilt_until=entry.rebuilt_until,
            window_start=entry.window_start,
            awaits_token=entry.launched_samples > 0,
            sunk=entry.below,
        )

    def _aligned(self, entry: Entry, count: int) -> int:
        """A prefill chunk cut back to a page boundary, if the cache has a use for that and the chunk holds one."""
        start = entry.next_start
        if not self._memory.aligns_chunks or count == entry.remaining_tokens:
            return count
        aligned = (start + count) // self._page * self._page - start
        return aligned if aligned > 0 else count

    def _room(self, entry: Entry, count: int) -> int:
        """How many drafts may be tried behind the last known token, without harm to anybody."""
        if entry.prefilling or count < entry.remaining_tokens:
            return 0
        room = min(self._draft_tokens, self._draft_budget, self._limits.unsampled_tokens(entry.request) - 1)
        if self._memory.aligns_chunks:
            # Or a state that stands on a page boundary, where alone it can be kept, would be jumped over.
            room = min(room, self._page - 1 - (len(entry.request.tokens) - 1) % self._page)
        if room <= 0:
            return 0
        return max(0, self._memory.fit(entry, count + room, spare_pages=self._memory.tenants) - count)
