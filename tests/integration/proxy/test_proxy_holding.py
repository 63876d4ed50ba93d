"""Conversations held while the caches have no room for them: visible, in order, and gone with their clients."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from router.settings import QueueSettings, RoutingSettings
from tests.fakes.fault_worker import OK, OK_BODY, FaultWorker, Move, Script, answer, chunk, event, stream_head
from tests.fakes.fleet_rig import ASK, FleetRig
from tests.fakes.proxy_rig import Client, until

#: Each conversation is charged with some 600 tokens; two do not fit the pool.
POOL_TOKENS = 1000
DELTA = event({"choices": [{"delta": {"content": "a"}}]})
STREAM: Script = (stream_head(), chunk(DELTA), chunk(b"data: [DONE]\n\n"), chunk(b""))


def _big(session: int) -> dict[str, object]:
    """A prompt that takes most of a pool, and shares nothing with other sessions' ones."""
    return {"messages": [{"role": "user", "content": f"{session} " + 800 * "hi "}], "max_tokens": 8}


@asynccontextmanager
async def _full(*scripts: Script, **queue: float) -> AsyncIterator[tuple[FleetRig, FaultWorker]]:
    """One rank, whose pool is taken by the conversation of session 0. ``scripts`` are played from then on."""
    routing = RoutingSettings(admission="guarded")
    async with FaultWorker([OK, *(scripts or (OK,))]) as worker:
        world = FleetRig(
            worker.port,
            routing=routing,
            queue=QueueSettings(**queue),
            pool_tokens=POOL_TOKENS,
        )
        await world.start()
        try:
            assert (await world.ask(0, **_big(0))).status == 200
            yield world, worker
        finally:
            await world.plane.drain(0)
        assert world.count("homing_admission_held_requests") == 0
        assert world.count("homing_inflight_requests") == 0


async def _held(world: FleetRig, session: int, **fields: object) -> Client:
    client = await world.connect()
    before = world.count("homing_admission_held_requests")
    await client.send({**ASK, **_big(session), **fields}, headers={"x-session-id": f"s{session}"})
    await until(lambda: world.count("homing_admission_held_requests") == before + 1)
    return client


async def test_a_new_conversation_waits_and_an_old_one_does_not() -> None:
    """Held until another rank brings room; the admitted conversation's next turn passes meanwhile."""
    async with _full() as (world, worker), FaultWorker() as other:
        client = await _held(world, 1)
        assert (await world.ask(0, **_big(0))).status == 200
        assert len(worker.requests) == 2
        world.add_rank(other.port)
        async with asyncio.timeout(20):
            answer_ = await client.answer()
        assert (answer_.status, answer_.body) == (200, OK_BODY)
        assert answer_.headers["x-homing-worker"] == "w1"
        assert world.count("homing_admission_hold_seconds_count", end="released") == 1
        assert world.count("homing_admissions_total", why="budget") == 1
        await client.close()


async def test_held_for_too_long() -> None:
    """After the longest wait the client is told to come again, and when: nobody was let go for over a second, and one
    who comes then will not wait less.
    """
    async with _full(hold_seconds=1.1) as (world, worker):
        answer_ = await world.ask(1, **_big(1))
        assert (answer_.status, answer_.error["code"]) == (429, "held_too_long")
        assert len(worker.requests) == 1
        assert world.count("homing_admission_hold_seconds_count", end="late") == 1
        waited_seconds = world.count("homing_admission_hold_seconds_sum", end="late")
        assert waited_seconds > 1.0
        assert answer_.headers["retry-after"] == f"{math.ceil(waited_seconds)}"


async def test_what_failed_waits_for_room_again() -> None:
    """The rank that had room answers 500 and the other is full: the request is sent to neither until a third comes."""
    async with (
        _full(max_inflight=1) as (world, worker),
        FaultWorker([(answer(500, b"{}"),)]) as failing,
        FaultWorker() as other,
    ):
        world.add_rank(failing.port)
        client = await _held(world, 1)
        assert len(failing.requests) == 1
        assert (await world.ask(0, **_big(0))).status == 200
        assert len(worker.requests) == 2
        world.add_rank(other.port)
        async with asyncio.timeout(20):
            answer_ = await client.answer()
        assert (answer_.status, answer_.headers["x-homing-attempts"]) == (200, "2")
        assert (len(worker.requests), len(failing.requests), len(other.requests)) == (2, 1, 1)
        await client.close()
        assert (await world.ask(1, **_big(1))).status == 200


async def test_no_more_wait_than_may() -> None:
    """With room for one in the queue the next one is refused at once, and the first goes on waiting."""
    async with _full(max_held=1) as (world, worker):
        client = await _held(world, 1)
        refused = await world.ask(2, **_big(2))
        assert (refused.status, refused.error["code"]) == (429, "hold_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert world.count("homing_admission_hold_seconds_count", end="refused") == 1
        assert 600 <= world.count("homing_admission_held_tokens") < 700
        assert 0 < world.count("homing_admission_oldest_hold_seconds") < 10
        assert 600 <= world.count("homing_admission_charged_tokens") < 700
        assert len(worker.requests) == 1
        await client.close()


async def test_what_is_held_takes_no_place_among_those_under_way() -> None:
    """One place: two are held, and the admitted conversation is served all the same; when there is room they take a
    place each, so that the next one waits for its turn.
    """
    answers = asyncio.Event()
    async with _full(max_inflight=1) as (world, worker), FaultWorker([(answers, *OK)]) as other:
        held = [await _held(world, session) for session in (1, 2)]
        assert (await world.ask(0, **_big(0))).status == 200
        assert len(worker.requests) == 2
        world.add_rank(other.port)
        await until(lambda: len(other.requests) == 1)
        late = asyncio.create_task(world.ask(0, **_big(0)))
        await until(lambda: world.count("homing_queued_requests") == 1)
        answers.set()
        assert (await held[0].answer()).status == 200
        assert (await late).status == 200
        for client in held:
            await client.close()
        assert (await world.ask(0, **_big(0))).status == 200


async def test_who_leaves_is_held_no_more() -> None:
    """A held client that goes away is forgotten at once, and the next in the queue moves up."""
    async with _full(comment_seconds=0.05) as (world, _):
        leaver = await _held(world, 1)
        stayer = await _held(world, 2, stream=True)
        await stayer.head()
        assert await stayer.piece() == b": waiting, position 2\n\n"
        await leaver.close()
        await until(lambda: world.count("homing_admission_held_requests") == 1)
        async with asyncio.timeout(20):
            while await stayer.piece() != b": waiting, position 1\n\n":
                pass
        await stayer.close()


async def test_who_is_held_has_no_place_to_give_back() -> None:
    """It gave its place up when it began to wait. When it leaves, no more may be under way at once than before."""
    answers = asyncio.Event()
    async with _full((answers, *OK), max_inflight=1) as (world, worker):
        leaver = await _held(world, 1)
        await leaver.close()
        await until(lambda: world.count("homing_admission_held_requests") == 0)
        asking = [asyncio.create_task(world.ask(0, **_big(0))) for _ in range(2)]
        await until(lambda: world.count("homing_queued_requests") == 1)
        assert len(worker.requests) <= 2  # the one that filled the pool, and one of these
        answers.set()
        assert [answer_.status for answer_ in await asyncio.gather(*asking)] == [200, 200]


def _events(body: bytes) -> Iterator[bytes]:
    return (part for part in body.split(b"\n\n") if part and not part.startswith(b":"))


async def test_a_held_stream_is_kept_open_and_then_answered() -> None:
    """Comments come while it waits, then the worker's events as they are, in the same stream."""
    async with _full(comment_seconds=0.05) as (world, _), FaultWorker([STREAM]) as other:
        client = await _held(world, 1, stream=True)
        await asyncio.sleep(0.15)
        world.add_rank(other.port)
        async with asyncio.timeout(20):
            answer_ = await client.answer()
        assert answer_.complete
        assert answer_.headers["content-type"] == "text/event-stream"
        assert answer_.body.startswith(b": waiting, position 1\n\n")
        decided = next(part for part in answer_.body.split(b"\n\n") if b"x-homing-worker" in part)
        assert b"\n: x-homing-worker: w1\n: x-homing-rank: 0\n" in b"\n" + decided + b"\n"
        assert list(_events(answer_.body)) == [DELTA.strip(), b"data: [DONE]"]
        await client.close()


async def test_a_stream_that_is_held_no_more_is_told_of_no_place_in_the_queue() -> None:
    """While the rank that had room computes, comments keep the stream open; they do not name a place."""
    answers = asyncio.Event()
    async with (
        _full(comment_seconds=0.02) as (world, _),
        FaultWorker([(answers, *STREAM)]) as other,
    ):
        client = await _held(world, 1, stream=True)
        await client.head()
        assert await client.piece() == b": waiting, position 1\n\n"
        world.add_rank(other.port)
        async with asyncio.timeout(20):
            while b"position" in (piece := await client.piece() or b""):
                pass
            assert piece == b": waiting for the answer\n\n"
            answers.set()
            rest = b""
            while (piece := await client.piece()) is not None:
                rest += piece
        assert b"position" not in rest
        assert list(_events(rest)) == [DELTA.strip(), b"data: [DONE]"]
        await client.close()


async def test_a_held_stream_is_kept_open_while_another_rank_is_tried() -> None:
    """The first one that had room answers that it cannot; the second one takes its time."""
    answers = asyncio.Event()
    async with (
        _full(comment_seconds=0.02) as (world, _),
        FaultWorker([(answer(500, b"{}"),), (answers, *STREAM)]) as other,
    ):
        client = await _held(world, 1, stream=True)
        await client.head()
        world.add_rank(other.port)
        world.add_rank(other.port)
        async with asyncio.timeout(20):
            await until(lambda: len(other.requests) == 2)
            pieces: list[bytes] = []
            while (piece := await client.piece()) is not None:
                pieces.append(piece)
                if pieces.count(b": waiting for the answer\n\n") == 5:
                    answers.set()
        assert list(_events(b"".join(pieces))) == [DELTA.strip(), b"data: [DONE]"]
        await client.close()


async def test_a_stream_that_was_never_open_is_not_opened_once_it_is_held_no_more() -> None:
    """Its status is still to come, and is the worker's."""
    async with (
        _full(comment_seconds=1) as (world, _),
        FaultWorker([(1.2, answer(400, TOO_LONG))]) as other,
    ):
        client = await _held(world, 1, stream=True)
        world.add_rank(other.port)
        assert (await world.ask(0, **_big(0))).status == 200  # at its end the rank is seen, before the first comment
        async with asyncio.timeout(20):
            answer_ = await client.answer()
        assert (answer_.status, answer_.body) == (400, TOO_LONG)
        await client.close()


async def test_who_is_held_twice_gets_its_comments_once() -> None:
    """The rank that had room fails without a word. Nothing is said in between once the answer has begun."""
    slow: Script = (stream_head(), *(step for _ in range(5) for step in (chunk(DELTA), 0.05)), *STREAM[2:])
    async with (
        _full(comment_seconds=0.02) as (world, _),
        FaultWorker([(0.1, Move.RESET)]) as failing,
        FaultWorker([slow]) as other,
    ):
        client = await _held(world, 1, stream=True)
        world.add_rank(failing.port)
        await until(lambda: len(failing.requests) == 1)
        await until(lambda: world.count("homing_admission_held_requests") == 1)
        world.add_rank(other.port)
        async with asyncio.timeout(20):
            answer_ = await client.answer()
        assert answer_.complete
        _, _, said = answer_.body.partition(b"x-homing-worker")
        assert b"waiting" not in said
        assert list(_events(b": " + said)) == [*(5 * [DELTA.strip()]), b"data: [DONE]"]
        await client.close()


TOO_LONG = b'{"error": {"message": "Too long.", "type": "BadRequestError", "code": "context_length_exceeded"}}'


async def test_a_held_stream_that_cannot_be_answered_ends_with_an_event() -> None:
    """What would have been a status is an error event once comments have been sent, in the worker's own words."""
    refusals: tuple[tuple[Script, str], ...] = (
        ((answer(400, b"{}"),), '"worker_refused"'),
        ((answer(400, TOO_LONG),), '"context_length_exceeded"'),
        ((answer(400, TOO_LONG, headers={"retry-after": "17"}),), 'retry_after_seconds": 17'),
        ((answer(500, b"{}"),), '"held_too_long"'),  # the only other rank has no room for it
        (OK, '"upstream_failed"'),
    )
    for script, said in refusals:
        async with (
            _full(script, comment_seconds=0.02, hold_seconds=1.5 if "held" in said else 30.0) as (world, _),
            FaultWorker([script]) as other,
        ):
            client = await _held(world, 1, stream=True)
            await client.head()
            world.add_rank(other.port)
            body = b""
            async with asyncio.timeout(20):
                while (piece := await client.piece()) is not None:
                    body += piece
            (error,) = _events(body)
            assert said.encode() in error
            await client.close()


async def test_a_stream_held_too_long_ends_with_an_event_that_says_when_to_come_again() -> None:
    """Its status and headers have gone out with the first comment, so the event has what ``Retry-After`` would say."""
    async with _full(comment_seconds=0.02, hold_seconds=1.1) as (world, _):
        answer_ = await world.ask(1, stream=True, **_big(1))
        assert (answer_.status, answer_.complete) == (200, True)
        assert "retry-after" not in answer_.headers
        (error,) = _events(answer_.body)
        said = json.loads(error.removeprefix(b"data: "))["error"]
        waited_seconds = world.count("homing_admission_hold_seconds_sum", end="late")
        assert (said["code"], said["type"]) == ("held_too_long", "rate_limit_error")
        assert said["retry_after_seconds"] == math.ceil(waited_seconds) > 1
