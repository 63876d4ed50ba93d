"""Event streams over real sockets: what the index believes equals what the publisher holds, whatever gets lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import FunctionType

import pytest
import zmq.asyncio

from router.fleet.fleet import Fleet
from router.wire.kv_events import (
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    EventSource,
)
from tests.fakes.event_consumer import TIMES, Consumer, joined
from tests.fakes.kv_publisher import KvPublisher, removed, stored
from tests.fakes.ports import reserve


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
    await consumer.joined()
    await consumer.until({0})
    asked, begun = len(publisher.replays), asyncio.get_running_loop().time()
    while len(publisher.replays) < asked + 4:  # noqa: ASYNC110 (no event tells)
        await asyncio.sleep(0.01)
    # Pauses of 0.05, 0.1, 0.2 and 0.4 seconds; the first has begun before.
    assert asyncio.get_running_loop().time() - begun >= 0.7
    await publisher.publish(stored(1))
    await publisher.publish(stored(2), lost=True)
    await consumer.until({0, 1, 2})


async def test_a_check_without_answer_costs_nothing(consumer: Consumer, publisher: KvPublisher) -> None:
    """The replay socket is silent, the stream whole: what is known stays, what comes counts, one line is logged."""
    await joined(consumer, publisher)
    publisher.answers_replays = False
    consumer.streams[0]._times = replace(TIMES, replay_idle=0.1)
    while consumer.count("kv_event_replays", result="failed") < 3:
        consumer.streams[0].check()
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
    await joined(consumer, publisher)
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
    places = [reserve() for _ in range(2)]
    port, replay_port = (place.getsockname()[1] for place in places)
    source = await old.start(port=port, replay_port=replay_port)
    consumer.follow(source)
    await old.subscribed()
    for number in range(3):
        await old.publish(stored(number))
    await consumer.until({0, 1, 2})
    await old.stop()
    new = KvPublisher(context, epoch=epochs[1])
    await new.start(port=port, replay_port=replay_port)
    for number in range(5, 9):  # past the old one's number before the connection stands again
        await new.publish(stored(number))
    await consumer.until({5, 6, 7, 8})
    await new.publish(stored(9))
    await consumer.until({5, 6, 7, 8, 9})
    assert consumer.count("kv_resyncs", cause="restart") >= 1
    await new.stop()
    for place in places:
        place.close()


async def test_a_replay_without_answer_gives_up_and_goes_on(consumer: Consumer, publisher: KvPublisher) -> None:
    """The replay socket is silent: nothing from before the gap is believed any more."""
    await joined(consumer, publisher)
    publisher.answers_replays = False
    consumer.streams[0]._times = replace(TIMES, replay_idle=0.1)
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
    await joined(consumer, publisher)
    for number in range(1, 6):
        await publisher.publish(stored(number), lost=True)
    await publisher.publish(stored(6))
    await consumer.until({4, 5, 6})
    assert consumer.count("kv_event_replays", result="incomplete") == 1
    await publisher.stop()


async def test_damage_is_counted_logged_once_and_followed_by_a_new_beginning(
    consumer: Consumer, publisher: KvPublisher
) -> None:
    """Three messages nobody can read, in replays neither: each is counted once, one line, no old belief, and the stream
    goes on.
    """
    await joined(consumer, publisher)
    for _ in range(3):
        await publisher.publish(damaged=True)
    await publisher.publish(stored(1))
    await consumer.until({1})
    assert consumer.count("kv_event_decode_errors") == 3
    assert consumer.count("kv_resyncs", cause="damage") >= 1
    assert consumer.log.getvalue().count("not understood") == 1


async def test_what_is_damaged_on_the_way_is_had_again(consumer: Consumer, publisher: KvPublisher) -> None:
    """The publisher has the message whole: nothing is forgotten."""
    await joined(consumer, publisher)
    await publisher.publish(stored(1), damaged_on_the_way=True)
    await consumer.until({0, 1})
    assert consumer.count("kv_event_decode_errors") == 1


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

    def apply(slot: int, batch: EventBatch, *, now: float, is_last: bool) -> bool:
        told.extend(event.hashes[0] for event in batch.events if isinstance(event, BlockStored))
        return told != [0, 1]

    monkeypatch.setattr(consumer.fleet, "apply", apply)
    monkeypatch.setattr(consumer.fleet, "clear", lambda slot, cause: told.append(str(cause)))
    consumer.follow(await publisher.start())
    await publisher.subscribed()
    await publisher.publish(stored(0))
    await consumer.joined()
    await publisher.publish(stored(1))
    async with asyncio.timeout(10):
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


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_long_message_leaves_the_loop_to_others(
    consumer: Consumer, publisher: KvPublisher, is_late: bool
) -> None:
    """Of twenty thousand events in one message, live or replayed, some are applied, then others get their turns; what
    comes behind it takes effect behind it, a clear by hand, too.
    """
    many = tuple(each for number in range(10_000) for each in (stored(number % 10), removed(number % 10)))
    source = await publisher.start()
    if is_late:
        await publisher.publish(*many, stored(1), lost=True)
        consumer.follow(source)
        await publisher.subscribed()
    else:
        consumer.follow(source)
        await publisher.subscribed()
        await publisher.publish(*many, stored(1))
    await publisher.publish(stored(2), removed(1))
    seen = set()
    async with asyncio.timeout(60):
        while consumer.holds() != {2}:
            seen.add(consumer.count("kv_events", type="BlockStored"))
            await asyncio.sleep(0)
    assert len(seen) > 10
    assert consumer.count("kv_events", type="BlockStored") == 10_002
    assert consumer.resyncs() == 0


async def test_a_fault_of_the_index_is_mended_by_a_replay(
    consumer: Consumer, publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a live event does to the index: the damage is counted, and all is asked for again, as after damage."""
    index = await joined(consumer, publisher)
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
    index = await joined(consumer, publisher)
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


async def test_an_endpoint_that_is_none_costs_the_worker_nothing(consumer: Consumer) -> None:
    """No host begins like that: the rank's stream ends, with a line of its own, and those beside it go on."""
    consumer.follow(EventSource(rank=0, endpoint="tcp://_a:5557"))
    await asyncio.wait_for(consumer.tasks.pop(), 10)
    assert "cache events cannot be followed" in consumer.log.getvalue()
