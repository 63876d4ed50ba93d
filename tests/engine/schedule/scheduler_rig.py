"""A scheduler with the checking memory behind it, stepped by hand."""

from __future__ import annotations

from kv_memory import KvMemory

from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import Batch, CacheGroup, CacheLayout, GroupKind, Output, Request, Sampling

PAGE = 4


def layout_of(full_pages: int = 100, window: int | None = None, window_pages: int = 100) -> CacheLayout:
    """Pages of 4 tokens; pools without the null page; ``window`` in tokens."""
    full = CacheGroup(0, GroupKind.FULL, (1,))
    if window is None:
        return CacheLayout(PAGE, (full,), (full_pages + 1,))
    sliding = CacheGroup(1, GroupKind.WINDOW, (0,), window)
    return CacheLayout(PAGE, (full, sliding), (full_pages + 1, window_pages + 1))


class Rank:
    """A scheduler with the checking memory behind it."""

    def __init__(self, layout: CacheLayout, *, chunk_tokens: int = 512, max_running: int = 64, context: int = 1000):
        self.scheduler = Scheduler(
            layout, max_running=max_running, chunk_tokens=chunk_tokens, max_context_tokens=context
        )
        self.memory = KvMemory(layout)

    def add(self, name: str, prompt: tuple[int, ...], *, max_tokens: int = 1, **sampling: object) -> Request:
        request = Request(name, prompt, Sampling(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]
        self.scheduler.add(request)
        return request

    def step(self) -> tuple[list[tuple[str, int, int]], list[Output]]:
        """One step: the chunks as (id, start, count), and the outputs."""
        batch = self.scheduler.schedule()
        assert batch is not None
        return shape(batch), self.land(batch)

    def land(self, batch: Batch) -> list[Output]:
        outputs = self.scheduler.commit(batch, self.memory.run(batch))
        self.scheduler.check_integrity()
        return outputs

    def finish(self) -> list[list[tuple[str, int, int]]]:
        """Step until all is done; the shapes of the batches."""
        shapes = []
        while self.scheduler.has_work:
            self.scheduler.drain_outputs()
            if self.scheduler.has_work:
                shapes.append(self.step()[0])
        return shapes


def shape(batch: Batch) -> list[tuple[str, int, int]]:
    return [(chunk.request.id, chunk.start, chunk.count) for chunk in batch.chunks]


def numbers(count: int, *, start: int = 100) -> tuple[int, ...]:
    """Distinct tokens that are never sampled."""
    return tuple(range(start, start + count))
