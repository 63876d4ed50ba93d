"""A rank whose whole picture cannot be had is asked for it ever more rarely, and little is logged of it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from router.core.types import RankId
from router.errors import WorkerError
from router.fleet.event_stream import EventStream, StreamTimes
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics
from router.wire.kv_events import BlockStored, EventBatch, EventSource, Snapshot
from tests.fakes.kv_publisher import KvPublisher, stored

QUIET = 0.05
TIMES = StreamTimes(check_quiet=QUIET, check_every=60.0, between_asks=0.0)


class Picture:
    """Notes, when it is thrown away, when that was asked for which it is thrown away for. While it is fussy, block 2
    and every snapshot contradict what it knows.
    """

    def __init__(self) -> None:
        self.is_fussy = True
        self.blocks: set[int | bytes | str] = set()
        self.stream: EventStream | None = None
        self.asked_at: list[float] = []

    def apply(self, slot: int, batch: EventBatch, *, now: float, is_last: bool) -> bool:
        self.blocks.update(event.hashes[0] for event in batch.events if isinstance(event, BlockStored))
        return not (self.is_fussy and 2 in self.blocks)

    def clear(self, slot: int, cause: str) -> None:
        self.blocks.clear()
        assert self.stream is not None
        self.asked_at.append(self.stream._last_ask_at)

    def load_snapshot(self, slot: int, snapshot: Snapshot, *, now: float, is_last: bool) -> bool:
        return not self.is_fussy

    async def cleared(self, times: int) -> list[float]:
        """The pauses before it was asked for again, of the next so many times it is thrown away."""
        begin = len(self.asked_at)
        async with asyncio.timeout(30):
            while len(self.asked_at) < begin + times:  # noqa: ASYNC110 (a list has no event)
                await asyncio.sleep(0.01)
        at = self.asked_at[begin:]
        return [later - earlier for earlier, later in pairwise(at)]


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@asynccontextmanager
async def _following(
    context: zmq.asyncio.Context,
    source: EventSource,
    picture: Picture,
    log: io.StringIO,
    snapshot: Callable[[], Awaitable[Snapshot]] | None = None,
) -> AsyncIterator[None]:
    stream = EventStream(
        source,
        picture,
        slot=0,
        rank=RankId("w", 0),
        metrics=Metrics(CollectorRegistry()),
        log=make_logger(level="info", form="json", stream=log),
        clock=asyncio.get_running_loop().time,
        wall_clock=lambda: 0.0,
        context=context,
        snapshot=snapshot,
        times=TIMES,
    )
    picture.stream = stream
    task = asyncio.create_task(stream.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled(), task


@pytest.mark.parametrize("kept", [10, 2], ids=["from the start", "what is kept"])
async def test_a_replay_that_contradicts_itself_is_asked_for_ever_more_rarely(
    context: zmq.asyncio.Context, kept: int
) -> None:
    """Each pause is twice the one before, until a replay can be applied."""
    publisher, picture, log = KvPublisher(context, kept=kept), Picture(), io.StringIO()
    source = await publisher.start()
    for number in range(3):
        await publisher.publish(stored(number))
    async with _following(context, source, picture, log):
        pauses = await picture.cleared(5)
        assert all(pause >= QUIET * 2**number * 0.9 for number, pause in enumerate(pauses)), pauses
        assert log.getvalue().count("thrown away") == 1
        picture.is_fussy = False
        async with asyncio.timeout(30):
            while len(picture.blocks) < min(kept, 3):  # noqa: ASYNC110 (a set has no event)
                await asyncio.sleep(0.01)
        await asyncio.sleep(QUIET)
        picture.is_fussy = True
        await publisher.publish(stored(2))
        assert min(await picture.cleared(3)) < pauses[-1]
    await publisher.stop()


@pytest.mark.parametrize("is_had", [False, True], ids=["fails", "contradicts"])
async def test_a_snapshot_that_cannot_be_used_is_asked_for_ever_more_rarely(
    context: zmq.asyncio.Context, is_had: bool
) -> None:
    """An idle rank, without replays: its snapshot fails, or does not fit."""
    picture, log = Picture(), io.StringIO()

    async def snapshot() -> Snapshot:
        if is_had:
            return Snapshot(sequence=2, batch=EventBatch(timestamp=0.0, events=(stored(0),)))
        raise WorkerError("no")

    source = EventSource(rank=0, endpoint="inproc://silent", replay_endpoint=None, snapshot_path="/kv_snapshot")
    async with _following(context, source, picture, log, snapshot):
        pauses = await picture.cleared(6)
    assert pauses[-1] >= QUIET * 2**3, pauses
    assert log.getvalue().count("thrown away") == 1
    assert log.getvalue().count("could not be asked for again") == (0 if is_had else 1)
