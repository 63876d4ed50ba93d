"""Work in slices, between which others have their turn. What has happened is reacted to in its order all the same."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Final, Generic, TypeVar

from router.wire.kv_events import BlockRemoved, BlockStored, Event, EventBatch

#: Of a batch no more is applied in one go: some milliseconds. An event weighs as much as so many of its blocks.
SLICE_BLOCKS: Final = 8192
EVENT_BLOCKS: Final = 16

_T = TypeVar("_T")


class Reactions(Generic[_T]):
    """Reacts to one thing after the other. ``react`` pauses after each slice of its work."""

    def __init__(self, react: Callable[[_T], Iterator[None]]) -> None:
        self._react = react
        self._due: deque[_T] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, event: _T, tasks: asyncio.TaskGroup) -> None:
        """React to this at once, as far as a slice goes; ``tasks`` runs the rest. It waits for what is under way."""
        self._due.append(event)
        if not self._idle.is_set():
            return
        self._idle.clear()
        steps = self._to_all()
        for _ in steps:
            tasks.create_task(self._go_on(steps))
            return
        self._idle.set()

    async def over(self) -> None:
        """Nothing is left to react to."""
        await self._idle.wait()

    def _to_all(self) -> Iterator[None]:
        while self._due:
            yield from self._react(self._due.popleft())

    async def _go_on(self, steps: Iterator[None]) -> None:
        await asyncio.sleep(0)
        for _ in steps:
            await asyncio.sleep(0)
        self._idle.set()


async def in_turns(steps: Generator[None, None, _T]) -> _T:
    """What work comes to that pauses after each slice: others have their turn then."""
    try:
        while True:
            next(steps)
            await asyncio.sleep(0)
    except StopIteration as end:
        result: _T = end.value
        return result


def weight(batch: EventBatch) -> int:
    """How long it takes to apply, in blocks."""
    return sum(map(_weight, batch.events))


def slices(batch: EventBatch) -> Iterator[tuple[EventBatch, bool]]:
    """A batch in parts that take no long time each, and whether one is the last."""
    start = blocks = 0
    for end, event in enumerate(batch.events):
        if blocks >= SLICE_BLOCKS:
            yield replace(batch, events=batch.events[start:end]), False
            start, blocks = end, 0
        blocks += _weight(event)
    yield (replace(batch, events=batch.events[start:]) if start else batch), True


def _weight(event: Event) -> int:
    return EVENT_BLOCKS + (len(event.hashes) if isinstance(event, BlockStored | BlockRemoved) else 0)
