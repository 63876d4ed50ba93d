"""What the scheduler counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_shim.cache.component import Component
from engine_shim.schedule.entry import Entry
from engine_shim.schedule.transit import BelowStats
from engine_shim.types import Sampled


@dataclass(slots=True)
class Counters:
    """Counts since the start of the process; a reset of the cache leaves them alone."""

    queried_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: list[int] = field(default_factory=list)

    def count_admission(self, entry: Entry, *, times: int) -> None:
        """Book what a request was found to have at its first admission; -1 times takes that back."""
        self.queried_tokens += times * len(entry.request.prompt)
        self.cached_tokens += times * entry.request.cached_tokens
        self.loaded_tokens += times * entry.loaded_tokens

    def count_drafts(self, sampled: Sampled) -> None:
        """Book how a chunk's drafts fared."""
        if not sampled.drafted or not sampled.tokens:
            return
        self.drafts += 1
        self.drafted_tokens += sampled.drafted
        accepted = len(sampled.tokens) - 1
        self.accepted_tokens += [0] * (sampled.drafted - len(self.accepted_tokens))
        for place in range(accepted):
            self.accepted_tokens[place] += 1


@dataclass(frozen=True, slots=True)
class Stats:
    """A rank at one moment. Tuples have one entry for each cache group; null pages are not counted.

    ``used_pages`` are held by requests or the tree; ``evictable_pages``, part of them, are the tree's and in
    no one's way. ``queried_tokens`` and ``cached_tokens`` are prompt tokens at first admission, those found
    in the cache among them, and ``loaded_tokens`` among these what came from copies below the device;
    ``computed_tokens`` are positions run through the layers, repeated work after
    preemptions included, drafts that did not hold left out. ``drafts`` are steps of one request with
    ``drafted_tokens`` proposed tokens in all; ``accepted_tokens[n]`` is how often the n-th of them held.
    ``below`` is None without copies below the device.
    """

    running: int
    waiting: int
    used_pages: tuple[int, ...]
    evictable_pages: tuple[int, ...]
    total_pages: tuple[int, ...]
    evicted_pages: tuple[int, ...]
    queried_tokens: int
    cached_tokens: int
    loaded_tokens: int
    computed_tokens: int
    preemptions: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: tuple[int, ...]
    below: BelowStats | None = None


def stats_of(
    counters: Counters,
    components: Sequence[Component],
    *,
    running: int,
    waiting: int,
    below: BelowStats | None = None,
) -> Stats:
    """The numbers as they stand now."""
    pools = [component.pool for component in components]
    return Stats(
        running=running,
        waiting=waiting,
        used_pages=tuple(pool.used_pages for pool in pools),
        evictable_pages=tuple(component.unlocked.pages for component in components),
        total_pages=tuple(pool.total for pool in pools),
        evicted_pages=tuple(component.evicted_pages for component in components),
        queried_tokens=counters.queried_tokens,
        cached_tokens=counters.cached_tokens,
        loaded_tokens=counters.loaded_tokens,
        computed_tokens=counters.computed_tokens,
        preemptions=counters.preemptions,
        drafts=counters.drafts,
        drafted_tokens=counters.drafted_tokens,
        accepted_tokens=tuple(counters.accepted_tokens),
        below=below,
    )
