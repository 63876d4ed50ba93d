"""The steps that are launched and not committed: who is in them, and what they read and write meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.pool import PagePool
from engine_shim.schedule.entry import Entry
from engine_shim.types import NULL_PAGE, Batch, CacheGroup, CacheLayout, Chunk, GroupKind, Request


@dataclass(frozen=True, slots=True)
class Launch:
    """A launched batch, and the notes on the requests of its chunks."""

    batch: Batch
    entries: tuple[Entry, ...]


class Launches:
    """Oldest first; each is committed before the next one is.

    ``drafts``: the runner may try some in any step, also in one that follows a step without.
    """

    def __init__(self, layout: CacheLayout, *, drafts: bool) -> None:
        self._layout = layout
        self._drafts = drafts
        self._steps: deque[Launch] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Launch]:
        return iter(self._steps)

    def add(self, batch: Batch, entries: Sequence[Entry]) -> None:
        """Note a step that is launched now, behind all others."""
        self._steps.append(Launch(batch, tuple(entries)))
        for chunk, entry in zip(batch.chunks, entries, strict=True):
            entry.launches += 1
            entry.launched_tokens += chunk.count
            entry.launched_samples += chunk.samples

    def end(self, batch: Batch) -> Launch:
        """The oldest step is over. Raises ``RuntimeError`` if that is not ``batch``."""
        if not self._steps or self._steps[0].batch is not batch:
            raise RuntimeError("this is not the launched batch")
        launch = self._steps.popleft()
        for chunk, entry in zip(launch.batch.chunks, launch.entries, strict=True):
            entry.launches -= 1
            entry.launched_tokens -= chunk.count
            entry.launched_samples -= chunk.samples
        return launch

    def can_be_followed(self) -> bool:
        """Whether the step after the one launched can be chosen and run before anybody has seen that one's tokens.

        One is enough: more would only run in vain behind an end.
        What a grammar or a penalty makes of the next step depends on them, and so it waits: for all requests, lest some
        run less often than others. Where drafts are tried every step waits: how many hold says where the next begins,
        and one that went ahead would try none. It also waits where the step's end changes more than lengths: loads
        that land, a window that has been rebuilt, a state that is kept on a page boundary, pages that go to the host.
        """
        if self._drafts or len(self._steps) != 1 or self._steps[0].batch.loads:
            return False
        state, page = self._layout.state, self._layout.page_tokens
        return not any(
            entry.aborted
            or entry.rebuilt_until
            or entry.head_pages is not None
            or (chunk.samples and _needs_tokens(entry.request))
            or (state is not None and (chunk.start + chunk.count) % page == 0)
            for chunk, entry in zip(self._steps[0].batch.chunks, self._steps[0].entries, strict=True)
        )

    def check(self, pools: Sequence[PagePool]) -> None:
        """Raise ``IntegrityError`` if a page that a launched step reads or writes is free."""
        for group, pool in zip(self._layout.groups, pools, strict=True):
            free = pool.free_set()
            for launch in self._steps:
                for chunk in launch.batch.chunks:
                    if not free.isdisjoint(_used(chunk, group, page_tokens=self._layout.page_tokens)):
                        raise IntegrityError(
                            f"a launched step uses a free page of group {group.index} for {chunk.request.id!r}"
                        )


def _needs_tokens(request: Request) -> bool:
    """Whether the host has to know a request's tokens before it can choose the next one."""
    wanted = request.sampling
    penalises = wanted.presence_penalty or wanted.frequency_penalty or wanted.repetition_penalty != 1.0
    return request.constraint is not None or bool(penalises)


def _used(chunk: Chunk, group: CacheGroup, *, page_tokens: int) -> set[int]:
    """Pages that a chunk reads or writes."""
    table, first = chunk.tables[group.index], 0
    if group.kind is GroupKind.STATE:
        return {*table} - {NULL_PAGE}
    if group.window_tokens is not None:
        first = max(chunk.window_start, chunk.start + 1 - group.window_tokens, 0) // page_tokens
    return {*table[first : -(-(chunk.start + chunk.count + chunk.room) // page_tokens)]} - {NULL_PAGE}
