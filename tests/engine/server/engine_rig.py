"""An engine's thread around any runner, and what tests of it ask for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine_shim.engine import Engine
from engine_shim.events import EventPublisher
from engine_shim.mailbox import Delta, Mailbox
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import CacheGroup, CacheLayout, GroupKind, Request, Runner, Sampling

LAYOUT = CacheLayout(4, (CacheGroup(0, GroupKind.FULL, (0,)),), (65,))


@asynccontextmanager
async def running(
    runner: Runner,
    *,
    kind: type[Scheduler] = Scheduler,
    publisher: EventPublisher | None = None,
    overlaps: bool = False,
) -> AsyncIterator[Engine]:
    engine = Engine(
        0,
        kind(LAYOUT, max_context_tokens=200),
        runner=runner,
        layout=LAYOUT,
        publisher=publisher,
        clock=time.perf_counter,
        overlaps=overlaps,
    )
    engine.start(asyncio.get_running_loop())
    try:
        yield engine
    finally:
        engine.stop()
        await asyncio.to_thread(engine.join)


def request(name: str, *, tokens: int = 3, prompt: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Request:
    return Request(id=name, prompt=prompt, sampling=Sampling(tokens), arrival_seconds=time.perf_counter())


async def read_all(mailbox: Mailbox) -> list[Delta]:
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish is None:
        deltas += await asyncio.wait_for(mailbox.take(), 30)
    return deltas


async def answer(engine: Engine, name: str, *, tokens: int) -> list[Delta]:
    """All that one request is told."""
    box = Mailbox(1)
    engine.submit(request(name, tokens=tokens), mailbox=box, index=0)
    return await read_all(box)
