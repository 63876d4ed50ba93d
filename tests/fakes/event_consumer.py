"""A fleet that follows event streams over real sockets."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable

import zmq.asyncio
from prometheus_client import CollectorRegistry

from router.core.continuity_types import Cause
from router.core.index import PrefixIndex
from router.core.types import Engine, RankId
from router.fleet.event_stream import EventStream, StreamTimes
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.settings import RoutingSettings
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import (
    EventSource,
    Snapshot,
)
from tests.fakes.kv_publisher import BLOCK_TOKENS, KvPublisher, stored

#: On no machine is an answer given up that comes, and nothing is asked again, unless a test wants either.
TIMES = StreamTimes(replay_idle=5.0, replay_total=30.0, check_quiet=60.0, check_every=60.0, between_asks=0.01)


class Consumer:
    """A fleet and its streams; the picture is asked of the real index."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.context = context
        self.metrics = Metrics(CollectorRegistry())
        self.fleet = Fleet(RoutingSettings(), self.metrics, clock=asyncio.get_running_loop().time)
        self.log = io.StringIO()
        self.streams: list[EventStream] = []
        self.tasks: list[asyncio.Task[None]] = []

    def follow(
        self,
        source: EventSource,
        *,
        rank: int = 0,
        snapshot: Callable[[], Awaitable[Snapshot]] | None = None,
        times: StreamTimes = TIMES,
    ) -> EventStream:
        name = RankId("w", rank)
        slot = self.fleet.add_rank(
            name,
            target=Target(host="w", port=1, rank=rank, dp_size=2, engine=Engine.VLLM),
            models=frozenset({"m"}),
            block_tokens=BLOCK_TOKENS,
            pool_tokens=None,
        )
        stream = EventStream(
            source,
            self.fleet,
            slot=slot,
            rank=name,
            metrics=self.metrics,
            log=make_logger(level="info", form="json", stream=self.log),
            clock=asyncio.get_running_loop().time,
            wall_clock=lambda: 0.0,
            context=self.context,
            snapshot=snapshot,
            times=times,
        )
        self.streams.append(stream)
        self.tasks.append(asyncio.create_task(stream.run()))
        return stream

    def holds(self, *, slot: int = 0, upto: int = 12) -> set[int]:
        """The blocks, each a prefix of its own, that the index believes to be on a rank."""
        index = self.fleet.indexes("m")[0]
        found = set()
        for number in range(upto):
            tokens = range(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
            keys = block_keys(list(tokens), block_tokens=BLOCK_TOKENS, parent=namespace_seed("", ""))
            if index.reusable_tokens(keys, prompt_tokens=BLOCK_TOKENS + 1).get(slot):
                found.add(number)
        return found

    async def until(self, wanted: set[int], *, slot: int = 0, upto: int = 12) -> None:
        """The picture becomes this within ten seconds."""
        for _ in range(500):
            if self.holds(slot=slot, upto=upto) == wanted:
                return
            await asyncio.sleep(0.02)
        assert self.holds(slot=slot, upto=upto) == wanted

    async def joined(self) -> None:
        """The first replay is over, so that the next one is for what a test does."""
        while not self.count("kv_event_replays", result="whole"):  # noqa: ASYNC110 (a counter has no event)
            await asyncio.sleep(0.01)

    def count(self, name: str, **labels: str) -> float:
        return (
            self.metrics.registry.get_sample_value(f"homing_{name}_total", {"worker": "w", "rank": "0"} | labels) or 0.0
        )

    def resyncs(self) -> float:
        return sum(self.count("kv_resyncs", cause=cause) for cause in Cause)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        for task in self.tasks:
            await asyncio.wait([task])
            assert task.cancelled(), task


async def joined(consumer: Consumer, publisher: KvPublisher, *, times: StreamTimes = TIMES) -> PrefixIndex:
    """The consumer's index, which follows the publisher and knows its block 0."""
    consumer.follow(await publisher.start(), times=times)
    await publisher.subscribed()
    await publisher.publish(stored(0))
    await consumer.joined()
    await consumer.until({0})
    return consumer.fleet.indexes("m")[0]
