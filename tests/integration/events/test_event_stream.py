"""Event streams over real sockets: what the index believes equals what the publisher holds, whatever gets lost."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import FunctionType

import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from router.core.continuity_types import Cause
from router.core.index import PrefixIndex
from router.core.types import Engine, RankId
from router.errors import WorkerError
from router.fleet.event_stream import EventStream, StreamTimes
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.settings import RoutingSettings
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import (
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    EventSource,
    Snapshot,
    decode_snapshot,
)
from tests.fakes.kv_publisher import BLOCK_TOKENS, KvPublisher, removed, stored

TIMES = StreamTimes(replay_idle=0.3, replay_total=5.0, check_quiet=60.0, check_every=60.0, between_asks=0.01)


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

    async def until(self, wanted: set[int], *, slot: int = 0) -> None:
        """The picture becomes this within a few seconds."""
        for _ in range(300):
            if self.holds(slot=slot) == wanted:
                return
            await asyncio.sleep(0.02)
        assert self.holds(slot=slot) == wanted

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


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def consumer(context: zmq.asyncio.Context) -> AsyncIterator[Consumer]:
    consumer = Consumer(context)
    yield consumer
    await consumer.stop()


@pytest.fixture
async def publisher(context: zmq.asyncio.Context) -> AsyncIterator[KvPublisher]:
    publisher = KvPublisher(context)
    yield publisher
    await publisher.stop()


async def _joined(consumer: Consumer, publisher: KvPublisher, *, times: StreamTimes = TIMES) -> PrefixIndex:
    """The consumer's index, which follows the publisher and knows its block 0."""
    consumer.follow(await publisher.start(), times=times)
    await publisher.subscribed()
    await publisher.publish(stored(0))
    await consumer.joined()
    await consumer.until({0})
    return consumer.fleet.indexes("m")[0]


async def test_a_lost_range_is_replayed(consumer: Consumer, publisher: KvPublisher) -> None:
    """Messages 2 to 5, with a removal among them, never arrive live; the next one brings them all."""
    consumer.follow(await publisher.start())
    await publisher.subscribed()
    await publisher.publish(stored(0))
    await publisher.publish(stored(1))
    await consumer.joined()
    await consumer.until({0, 1})
    await publisher.publish(stored(2), lost=True)
    await publisher.publish(stored(3), lost=True)
    await publisher.publish(removed(0), lost=True)
    await publisher.publish(stored(4), lost=True)
    await publisher.publish(stored(5))
    await consumer.until({1, 2, 3, 4, 5})
    assert consumer.count("kv_event_gaps") == 1
    assert consumer.count("kv_event_replays", result="whole") >= 1
    assert publisher.replays[-1] == 1  # the last one applied, to know the publisher by
    assert consumer.count("kv_resyncs", cause="gap") == 0


async def test_a_late_joiner_of_an_idle_rank_learns_what_it_holds(consumer: Consumer, publisher: KvPublisher) -> None:
    """No live message comes; the replay alone shows the warm cache."""
    source = await publisher.start()
    for number in range(3):
        await publisher.publish(stored(number))
    await publisher.publish(removed(1))
    consumer.follow(source)
    await consumer.until({0, 2})


async def test_a_last_message_that_was_lost_is_found_by_the_check(consumer: Consumer, publisher: KvPublisher) -> None:
    """Nothing follows that would show a gap; the periodic question does."""
    consumer.follow(await publisher.start(), times=replace(TIMES, check_quiet=0.1))
    await publisher.subscribed()
    await publisher.publish(stored(0))
    await publisher.publish(stored(1), lost=True)
    await consumer.until({0, 1})


async def test_checks_become_rare_while_a_rank_is_idle(consumer: Consumer, publisher: KvPublisher) -> None:
    """Each pause is twice the one before, until there is a message again."""
    consumer.follow(await publisher.start(), times=replace(TIMES, check_quiet=0.05))
    await publisher.subscribed()
    await publisher.publish(stored(0))
    await consumer.until({0})
    await asyncio.sleep(1.5)
    assert 3 <= len(publisher.replays) <= 7  # one to join, then after 0.1, 0.2, 0.4, 0.8 and 1.6 seconds
    await publisher.publish(stored(1))
    await publisher.publish(stored(2), lost=True)
    await consumer.until({0, 1, 2})


async def test_a_check_without_answer_costs_nothing(consumer: Consumer, publisher: KvPublisher) -> None:
    """The replay socket is silent, the stream whole: what is known stays, what comes counts, one line is logged."""
    await _joined(consumer, publisher, times=replace(TIMES, replay_idle=0.1, check_quiet=0.05, check_every=0.05))
    publisher.answers_replays = False
    while consumer.count("kv_event_replays", result="failed") < 3:  # noqa: ASYNC110 (a counter has no event)
        await asyncio.sleep(0.01)
    assert consumer.holds() == {0}
    await publisher.publish(stored(1))
    await consumer.until({0, 1})
    assert consumer.resyncs() == 0
    assert consumer.log.getvalue().count("could not be asked for again") == 1


async def test_an_idle_rank_whose_replay_came_too_late_is_asked_again(
    consumer: Consumer, publisher: KvPublisher
) -> None:
    """A warm engine pauses when the router joins, and says nothing after that."""
    source = await publisher.start()
    await publisher.publish(stored(0))
    publisher.answers_replays = False
    consumer.follow(source, times=replace(TIMES, replay_idle=0.1, check_quiet=0.05))
    while not consumer.count("kv_event_replays", result="failed"):  # noqa: ASYNC110 (a counter has no event)
        await asyncio.sleep(0.01)
    publisher.answers_replays = True
    await consumer.until({0})


async def test_times_that_are_no_number_are_harmless(consumer: Consumer, publisher: KvPublisher) -> None:
    """A check knows the publisher's last message by its time, whatever that is; the lag stays a number."""
    await _joined(consumer, publisher)
    for number, time in enumerate((float("nan"), float("-inf"), -1e308, -1e308), 1):
        await publisher.publish(stored(number), at=time)
    await publisher.publish(stored(5), at=float("nan"))
    await consumer.until({0, 1, 2, 3, 4, 5})
    before = len(publisher.replays)
    consumer.streams[0].check()
    while not consumer.count("kv_event_replays", result="unchanged"):  # noqa: ASYNC110 (a counter has no event)
        await asyncio.sleep(0.01)
    assert publisher.replays[before:] == [5]
    assert consumer.resyncs() == 0
    lag = consumer.metrics.registry.get_sample_value("homing_kv_event_lag_seconds_sum")
    assert lag is not None
    assert lag <= 6 * 3600


@pytest.mark.parametrize("epochs", [(None, None), ("first", "second")])
async def test_a_new_process_on_the_same_ports_replaces_the_picture(
    consumer: Consumer, context: zmq.asyncio.Context, epochs: tuple[str | None, str | None]
) -> None:
    """The old one's blocks go, also those that no message of the new one mentions."""
    old = KvPublisher(context, epoch=epochs[0])
    source = await old.start()
    consumer.follow(source)
    await old.subscribed()
    for number in range(3):
        await old.publish(stored(number))
    await consumer.until({0, 1, 2})
    await old.stop()
    new = KvPublisher(context, epoch=epochs[1])
    ports = [int(str(endpoint).rsplit(":", 1)[1]) for endpoint in (source.endpoint, source.replay_endpoint)]
    await new.start(port=ports[0], replay_port=ports[1])
    for number in range(5, 9):  # past the old one's number before the connection stands again
        await new.publish(stored(number))
    await consumer.until({5, 6, 7, 8})
    await new.publish(stored(9))
    await consumer.until({5, 6, 7, 8, 9})
    assert consumer.count("kv_resyncs", cause="restart") >= 1
    await new.stop()


async def test_a_replay_without_answer_gives_up_and_goes_on(consumer: Consumer, publisher: KvPublisher) -> None:
    """The replay socket is silent: nothing from before the gap is believed any more."""
    await _joined(consumer, publisher)
    publisher.answers_replays = False
    await publisher.publish(stored(1), lost=True)
    await publisher.publish(stored(2))
    await consumer.until({2})
    await publisher.publish(stored(3))
    await consumer.until({2, 3})
    assert consumer.count("kv_event_replays", result="failed") == 1
    assert consumer.count("kv_resyncs", cause="replay") == 1


async def test_a_gap_longer_than_the_buffer_keeps_only_what_is_sure(
    consumer: Consumer, context: zmq.asyncio.Context
) -> None:
    """The buffer holds three messages, five were lost: the picture is what those three and the rest say."""
    publisher = KvPublisher(context, kept=3)
    await _joined(consumer, publisher)
    for number in range(1, 6):
        await publisher.publish(stored(number), lost=True)
    await publisher.publish(stored(6))
    await consumer.until({4, 5, 6})
    assert consumer.count("kv_event_replays", result="incomplete") == 1
    await publisher.stop()


async def test_damage_is_counted_logged_once_and_followed_by_a_new_beginning(
    consumer: Consumer, publisher: KvPublisher
) -> None:
    """Three messages nobody can read, in replays neither: counted, one line, no old belief, and the stream goes on."""
    await _joined(consumer, publisher)
    for _ in range(3):
        await publisher.publish(damaged=True)
    await publisher.publish(stored(1))
    await consumer.until({1})
    assert consumer.count("kv_event_decode_errors") >= 3
    assert consumer.count("kv_resyncs", cause="damage") >= 1
    assert consumer.log.getvalue().count("not understood") == 1


async def test_what_is_damaged_on_the_way_is_had_again(consumer: Consumer, publisher: KvPublisher) -> None:
    """The publisher has the message whole: nothing is forgotten."""
    await _joined(consumer, publisher)
    await publisher.publish(stored(1), damaged_on_the_way=True)
    await consumer.until({0, 1})
    assert consumer.count("kv_event_decode_errors") == 1


async def test_a_snapshot_is_taken_before_a_replay_from_the_beginning(
    consumer: Consumer, publisher: KvPublisher
) -> None:
    """A publisher that offers one is asked for it; the messages it covers are not applied again."""
    publisher.epoch = "e"
    source = replace(await publisher.start(), snapshot_path="/kv_snapshot")
    for number in range(4):
        await publisher.publish(stored(number))
    await publisher.publish(removed(2))

    async def snapshot() -> Snapshot:
        held = EventBatch(timestamp=0.0, events=(stored(0), stored(1), stored(3)), epoch="e")
        return Snapshot(sequence=4, batch=held)

    consumer.follow(source, snapshot=snapshot)
    await consumer.until({0, 1, 3})
    await publisher.publish(removed(0))
    await consumer.until({1, 3})
    assert publisher.replays == []


async def test_a_snapshot_that_fails_is_followed_by_a_replay(consumer: Consumer, publisher: KvPublisher) -> None:
    """The second way is taken when the first is closed."""
    source = replace(await publisher.start(), snapshot_path="/kv_snapshot")
    await publisher.publish(stored(0))

    async def snapshot() -> Snapshot:
        raise WorkerError("no")

    consumer.follow(source, snapshot=snapshot)
    await consumer.until({0})


async def test_a_snapshot_that_is_none_is_followed_by_a_replay(consumer: Consumer, publisher: KvPublisher) -> None:
    """Nested deeper than anything that is meant."""
    source = replace(await publisher.start(), snapshot_path="/kv_snapshot")
    await publisher.publish(stored(0))

    async def snapshot() -> Snapshot:
        return decode_snapshot(b"\x92\x05" + b"\x91" * 5000 + b"\xc0")

    consumer.follow(source, snapshot=snapshot)
    await consumer.until({0})


async def test_a_snapshot_that_never_ends_is_followed_by_a_replay(consumer: Consumer, publisher: KvPublisher) -> None:
    """Whatever trickles in, there is an end to waiting."""
    source = replace(await publisher.start(), snapshot_path="/kv_snapshot")
    await publisher.publish(stored(0))

    async def snapshot() -> Snapshot:
        await asyncio.Event().wait()
        raise AssertionError

    consumer.follow(source, snapshot=snapshot, times=replace(TIMES, replay_total=0.3))
    await consumer.until({0})


async def test_two_ranks_do_not_mix(consumer: Consumer, context: zmq.asyncio.Context, publisher: KvPublisher) -> None:
    """Each stream writes its own rank; a clear on one leaves the other alone."""
    other = KvPublisher(context)
    consumer.follow(await publisher.start(), rank=0)
    consumer.follow(await other.start(), rank=1)
    await publisher.subscribed()
    await other.subscribed()
    await publisher.publish(stored(0))
    await publisher.publish(stored(1))
    await other.publish(stored(1))
    await other.publish(stored(2))
    await consumer.until({0, 1}, slot=0)
    await consumer.until({1, 2}, slot=1)
    await publisher.publish(AllBlocksCleared())
    await consumer.until(set(), slot=0)
    assert consumer.holds(slot=1) == {1, 2}
    await other.stop()


@pytest.mark.skipif(not isinstance(Fleet.apply, FunctionType), reason="a compiled class cannot be patched")
async def test_an_index_that_discards_its_picture_is_told_everything_again(
    consumer: Consumer, publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index says so once, at the second message: both are read again from the start."""
    told: list[int | bytes | str] = []

    def apply(slot: int, batch: EventBatch, *, now: float) -> bool:
        told.extend(event.hashes[0] for event in batch.events if isinstance(event, BlockStored))
        return told != [0, 1]

    monkeypatch.setattr(consumer.fleet, "apply", apply)
    monkeypatch.setattr(consumer.fleet, "clear", lambda slot, cause: told.append(str(cause)))
    consumer.follow(await publisher.start())
    await publisher.subscribed()
    await publisher.publish(stored(0))
    await consumer.joined()
    await publisher.publish(stored(1))
    async with asyncio.timeout(5):
        while told != [0, 1, "layout", 0, 1]:  # noqa: ASYNC110 (a list has no event)
            await asyncio.sleep(0.01)
    assert publisher.replays[-1] == 0


async def test_a_long_replay_leaves_the_loop_to_others(consumer: Consumer, publisher: KvPublisher) -> None:
    """Two thousand messages are replayed in one go, and others get their turns in between."""
    for number in range(2000):
        await publisher.publish(stored(number % 10), removed(number % 10), lost=True)
    await publisher.publish(stored(11), lost=True)
    consumer.follow(await publisher.start())
    seen = set()
    async with asyncio.timeout(60):
        while consumer.holds() != {11}:
            seen.add(consumer.count("kv_events", type="BlockStored"))
            await asyncio.sleep(0)
    assert len(seen) > 10


async def test_a_fault_of_the_index_is_mended_by_a_replay(
    consumer: Consumer, publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a live event does to the index: the damage is counted, and all is asked for again, as after damage."""
    index = await _joined(consumer, publisher)
    apply = index.apply

    def trip(slot: int, event: Event) -> None:
        monkeypatch.setattr(index, "apply", apply)
        raise KeyError(slot)

    monkeypatch.setattr(index, "apply", trip)
    await publisher.publish(stored(1))
    await consumer.until({0, 1})
    await publisher.publish(stored(2))
    await consumer.until({0, 1, 2})

    assert publisher.replays[-1] == 0
    assert consumer.count("kv_event_decode_errors") == 1
    assert consumer.count("kv_resyncs", cause="damage") == 1
    assert "KeyError" in consumer.log.getvalue()


async def test_an_event_that_always_fails_is_asked_for_once(
    consumer: Consumer, publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in the replay, too: what is stored behind it counts, and no other replay is asked for."""
    index = await _joined(consumer, publisher)
    apply = index.apply

    def trip(slot: int, event: Event) -> None:
        if isinstance(event, BlockStored) and event.hashes == (1,):
            raise KeyError(slot)
        apply(slot, event)

    monkeypatch.setattr(index, "apply", trip)
    before = len(publisher.replays)
    await publisher.publish(stored(1))
    await publisher.publish(stored(2))
    await consumer.until({2})
    await publisher.publish(stored(1))
    await publisher.publish(stored(3))
    await consumer.until({3})

    assert publisher.replays[before:] == [0]
