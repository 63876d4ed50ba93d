"""Snapshots of what a rank holds: taken before its messages, and what is no snapshot."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from router.errors import WorkerError
from router.wire.kv_events import (
    EventBatch,
    Snapshot,
    decode_snapshot,
)
from tests.fakes.event_consumer import TIMES, Consumer
from tests.fakes.kv_publisher import KvPublisher, removed, stored


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


async def test_a_picture_that_begins_in_the_middle_is_completed_while_messages_come(
    consumer: Consumer, publisher: KvPublisher
) -> None:
    """The first snapshot fails and there are no replays: the rank, which is never silent, is asked once more."""
    publisher.epoch = "e"
    source = replace(await publisher.start(), snapshot_path="/kv_snapshot", replay_endpoint=None)
    await publisher.publish(stored(0))
    asked: list[int] = []

    async def snapshot() -> Snapshot:
        asked.append(len(publisher.log))
        if len(asked) == 1:
            raise WorkerError("no")
        held = tuple(stored(number) for number in range(len(publisher.log)))
        await asyncio.sleep(0.05)  # more is published meanwhile
        return Snapshot(sequence=len(held) - 1, batch=EventBatch(timestamp=0.0, events=held, epoch="e"))

    consumer.follow(source, snapshot=snapshot, times=replace(TIMES, check_quiet=0.3))
    await publisher.subscribed()
    while len(asked) < 2:
        await publisher.publish(stored(len(publisher.log)))
        await asyncio.sleep(0.02)
    for _ in range(5):
        await publisher.publish(stored(len(publisher.log)))
        await asyncio.sleep(0.02)
    published = len(publisher.log)
    await consumer.until(set(range(published)), upto=published)
    assert len(asked) <= 3  # one more where this process stood still, so that the rank seemed to be silent


async def test_a_silent_rank_without_replays_is_asked_for_its_tail(consumer: Consumer, publisher: KvPublisher) -> None:
    """Its last message was lost, and it says nothing more; it is asked ever more rarely."""
    publisher.epoch = "e"
    source = replace(await publisher.start(), snapshot_path="/kv_snapshot", replay_endpoint=None)
    asked: list[float] = []
    held = [stored(0)]

    async def snapshot() -> Snapshot:
        asked.append(asyncio.get_running_loop().time())
        return Snapshot(len(held) - 1, EventBatch(timestamp=0.0, events=tuple(held), epoch="e"))

    consumer.follow(source, snapshot=snapshot, times=replace(TIMES, check_quiet=0.1))
    await consumer.until({0})
    held.append(stored(1))
    await consumer.until({0, 1})
    while len(asked) < 5:  # noqa: ASYNC110 (no event tells)
        await asyncio.sleep(0.02)
    assert asked[4] - asked[0] > 1.3  # 0.1, 0.2, 0.4 and 0.8 seconds, the first of which began before


async def test_what_was_held_leaves_the_loop_to_others(consumer: Consumer, publisher: KvPublisher) -> None:
    """Three thousand small messages come before a snapshot does: they are applied some at a time."""
    source = replace(await publisher.start(), snapshot_path="/kv_snapshot")
    is_asked, is_had = asyncio.Event(), asyncio.Event()

    async def snapshot() -> Snapshot:
        is_asked.set()
        await is_had.wait()
        return Snapshot(sequence=-1, batch=EventBatch(timestamp=0.0, events=()))

    consumer.follow(source, snapshot=snapshot)
    await publisher.subscribed()
    await is_asked.wait()
    await publisher.publish(stored(0), lost=True)
    for number in range(1, 3000):
        await publisher.publish(stored(number % 10), removed(number % 10))
    await publisher.publish(stored(11))
    async with asyncio.timeout(60):
        while consumer.count("kv_event_batches") < 3000:  # noqa: ASYNC110 (a counter has no event)
            await asyncio.sleep(0.01)
    is_had.set()
    seen = set()
    async with asyncio.timeout(60):
        while consumer.holds() != {0, 11}:
            await asyncio.sleep(0)
            seen.add(consumer.count("kv_events", type="BlockStored"))
    assert len(seen) > 10
    assert consumer.count("kv_events", type="BlockStored") == 3001
    assert consumer.resyncs() == 0
