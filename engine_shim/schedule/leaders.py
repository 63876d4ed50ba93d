"""Siblings that arrive together cost one prefill: who waits for whom, and where the one that runs stores its part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine_shim.cache.node import shared_pages
from engine_shim.schedule.entry import Entry
from engine_shim.schedule.memory import Memory
from engine_shim.types import Chunk


def find_leader(entry: Entry, running: Iterable[Entry], chunks: dict[Entry, Chunk], memory: Memory) -> None:
    """Look for the running prefill that will store most of this request's prompt, and have it do so in time.

    ``chunks`` are those of the step being scheduled; the leader's is cut where it has to store.
    """
    shares = {
        other: tokens
        for other in running
        if other.prefilling and (tokens := _shared_tokens(entry, other, page=memory.page_tokens)) > 0
    }
    if not shares:
        return
    known_tokens = memory.known_tokens(entry)
    for other, tokens in shares.items():
        if tokens > known_tokens and other.request.computed_tokens >= tokens and not other.is_moving:
            memory.share(other)
        elif tokens > max(known_tokens, entry.lead_tokens):
            entry.leader, entry.lead_tokens = other, tokens
    leader = entry.leader
    if leader is None or leader.request.computed_tokens >= entry.lead_tokens:  # it is being loaded that far
        return
    leader.stop_at(entry.lead_tokens)
    chunk = chunks.get(leader)
    if chunk is not None and chunk.start + chunk.count > entry.lead_tokens:
        chunks[leader] = replace(chunk, count=entry.lead_tokens - chunk.start, samples=False)


def _shared_tokens(entry: Entry, other: Entry, *, page: int) -> int:
    """How much of its prompt, in whole pages, ``entry`` could reuse if ``other`` had stored all of its own."""
    ours, theirs = entry.request, other.request
    if ours.namespace != theirs.namespace or ours.tokens[:page] != theirs.tokens[:page]:
        return 0
    pages = shared_pages(ours.tokens, theirs.tokens, page_tokens=page)
    return min(pages, (len(ours.tokens) - 1) // page) * page
