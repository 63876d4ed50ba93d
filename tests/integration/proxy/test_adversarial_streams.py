"""Clients that leave in storms and streams that break, through the whole router: what is left, who is asked twice."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import FunctionType

import pytest

from router.core.load import Claim, LoadBook
from router.core.session import identify
from tests.fakes.fault_worker import FaultWorker, Move, Script, chunk, event, stream_head
from tests.fakes.fleet_rig import ASK, FleetRig
from tests.fakes.proxy_rig import Client, rig, target, until

DELTA = event({"choices": [{"delta": {"content": "a"}}]})
#: A short prefill, a token, some decoding, the end.
STREAM: Script = (0.02, stream_head(), chunk(DELTA), 0.02, chunk(DELTA), chunk(b"data: [DONE]\n\n"), chunk(b""))
BREAKS_LATE: Script = (stream_head(), chunk(DELTA), 0.01, Move.RESET)
BREAKS_EARLY: Script = (0.005, Move.RESET)


@asynccontextmanager
async def _world(*scripts: list[Script]) -> AsyncIterator[tuple[FleetRig, list[FaultWorker]]]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FaultWorker(list(script))) for script in scripts]
        # No worker here is slow, but the machine may be.
        world = FleetRig(*(worker.port for worker in workers), first_byte_seconds=30.0)
        await world.start()
        try:
            yield world, workers
        finally:
            await world.plane.drain(0)


async def test_a_request_leaves_no_garbage_behind() -> None:
    """Nothing that only a collection would free: at thousands of requests a second those would stop the router."""
    async with _world([(0.0, *STREAM)]) as (world, _):
        client = await world.connect()
        for stream in (False, True, False, True):  # what is made once has been made
            await client.send({**ASK, "stream": stream}, headers={"x-session-id": "s"})
            await client.answer()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for stream in (False, True, False, True):
                await client.send({**ASK, "stream": stream}, headers={"x-session-id": "s"})
                await client.answer()
            gc.collect()
            left = Counter(type(found).__module__ + "." + type(found).__name__ for found in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        await client.close()
    assert not [name for name in left if name.startswith("router.")]


# --- 10: a fifth of the clients leave -----------------------------------------------------------------


async def _storm(world: FleetRig) -> Counter[str]:
    """400 streams of 40 sessions over twenty clients. Each fifth leaves, half of those before the first token."""
    rng, numbers, outcomes = random.Random(2), iter(range(400)), Counter[str]()

    async def client() -> None:
        for number in numbers:
            connection = await world.connect()
            await connection.send({**ASK, "stream": True}, headers={"x-session-id": f"s{number % 40}"})
            if number % 5 == 0:
                await asyncio.sleep(rng.uniform(0.0, 0.015))
                outcomes["left early"] += 1
            elif number % 5 == 1 and number % 2:
                await connection.head()
                await connection.piece()
                outcomes["left late"] += 1
            else:
                answer = await connection.answer()
                outcomes["whole" if answer.complete and b"[DONE]" in answer.body else "broken"] += 1
            await connection.close()

    async with asyncio.TaskGroup() as clients:
        for _ in range(20):
            clients.create_task(client())
    return outcomes


def _left_behind(world: FleetRig) -> dict[str, float]:
    """Every count that must be zero when nobody asks."""
    loads = [world.fleet.loads.load(member.slot) for member in world.fleet.members()]
    return {
        "in flight": sum(load.inflight for load in loads),
        "tokens in flight": sum(load.inflight_tokens for load in loads),
        "waiting": sum(load.waiting for load in loads),
        "tokens waiting": sum(load.waiting_tokens for load in loads),
        "seconds waiting": sum(load.waiting_seconds for load in loads),
        "sessions at work": sum(binding.inflight for _, binding in world.fleet.sessions.recent()),
        "requests": world.count("homing_inflight_requests"),
        "clients": world.count("homing_connections"),
    }


async def test_a_storm_of_aborts_leaves_nothing_behind() -> None:
    """All counts return to zero, all workers' connections are free, and who stayed got whole answers."""
    async with _world([STREAM], [STREAM], [STREAM], [STREAM]) as (world, workers):
        outcomes = await _storm(world)
        assert outcomes == {"whole": 280, "left early": 80, "left late": 40}
        await until(lambda: not any(_left_behind(world).values()))
        served = sum(len(worker.requests) for worker in workers)
        assert 320 <= served <= 400  # who left at once may never have been sent on
        assert (await world.ask(1)).status == 200


@pytest.mark.skipif(not isinstance(LoadBook.close, FunctionType), reason="a compiled class cannot be patched")
async def test_a_book_that_forgets_who_left_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same storm over a book that closes no claim that still waits: counts stay, and that is what is looked at."""
    close = LoadBook.close

    def forgetful(self: LoadBook, claim: Claim, *, now: float, is_computed: bool) -> None:
        if not claim.waiting:
            close(self, claim, now=now, is_computed=is_computed)

    monkeypatch.setattr(LoadBook, "close", forgetful)
    async with _world([STREAM], [STREAM], [STREAM], [STREAM]) as (world, _):
        await _storm(world)
        await until(lambda: not world.count("homing_connections"))
        assert _left_behind(world)["in flight"] > 0


# --- 11: streams that break ---------------------------------------------------------------------------


async def test_nothing_is_played_again_once_it_has_begun() -> None:
    """Both workers break every other stream, some before and some after the first token. Before: another is asked and
    the client sees nothing of it. After: one worker only, the part that came, one error event, and no end mark."""
    scripts: list[Script] = [STREAM, BREAKS_LATE, STREAM, BREAKS_EARLY] * 40
    async with _world(scripts, [STREAM, BREAKS_LATE] * 80) as (world, workers):
        answers = {}
        for number in range(80):
            client = await world.connect()
            messages = [{"role": "user", "content": f"text {number}"}]
            await client.send({"model": "m", "stream": True, "messages": messages})
            answers[number] = await client.answer()
            await client.close()
        asked = Counter(
            (played, json.loads(request.body)["messages"][0]["content"])
            for worker in workers
            for played, request in zip(map(_name, worker.scripts), worker.requests, strict=False)
        )

    texts = {number: f"text {number}" for number in answers}
    whole = {number for number, answer in answers.items() if answer.body.endswith(b"data: [DONE]\n\n")}
    broken = {number for number, answer in answers.items() if b'"upstream_failed"' in answer.body}
    assert all(answer.status == 200 and answer.complete for answer in answers.values())
    assert whole | broken == set(texts)
    assert not whole & broken
    assert all(answers[number].body.startswith(DELTA) and answers[number].body.count(DELTA) == 1 for number in broken)
    # Each stream that began was one client's, and that client had no other.
    assert {text for played, text in asked if played == "whole"} == {texts[number] for number in whole}
    assert {text for played, text in asked if played == "late"} == {texts[number] for number in broken}
    assert all(times == 1 for (played, _), times in asked.items() if played != "early")
    assert len(broken) >= 10
    assert sum(played == "early" for played, _ in asked) >= 5


@asynccontextmanager
async def _retrying(*ports: int) -> AsyncIterator[int]:
    """A proxy that asks the next worker whenever one breaks off, and goes on with what that says. Its port."""
    begun = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await reader.readexactly(length)
        begun += 1
        has_head = is_over = False
        attempt = begun
        while not is_over:
            source, sink = await asyncio.open_connection("127.0.0.1", ports[attempt % len(ports)])
            attempt += 1
            sink.write(head + body)
            try:
                answered = await source.readuntil(b"\r\n\r\n")
                if not has_head:
                    writer.write(answered)
                has_head = True
                while not is_over and (piece := await source.read(65536)):
                    writer.write(piece)
                    is_over = piece.endswith(b"0\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            sink.close()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_proxy_that_tries_again_whatever_was_said_would_be_seen() -> None:
    """The same workers behind one that retries streams as it retries requests: some clients get a beginning twice, in
    one answer that looks whole, and their prompts are computed twice.
    """
    scripts: list[Script] = [STREAM, BREAKS_LATE, STREAM, BREAKS_EARLY] * 40
    async with _world(scripts, [STREAM, BREAKS_LATE] * 80) as (_, workers):
        async with _retrying(*(worker.port for worker in workers)) as port:
            bodies = []
            for number in range(80):
                client = Client(*await asyncio.open_connection("127.0.0.1", port))
                await client.send({**ASK, "stream": True, "n": number})
                answer = await client.answer()
                assert answer.complete
                bodies.append(answer.body)
                await client.close()
        begun = Counter(
            json.loads(request.body)["n"]
            for worker in workers
            for played, request in zip(map(_name, worker.scripts), worker.requests, strict=False)
            if played != "early"
        )

    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
    twice = {number for number, body in enumerate(bodies) if body.count(DELTA) > STREAM.count(chunk(DELTA))}
    assert twice == {number for number, times in begun.items() if times > 1}
    assert len(twice) >= 10


def _name(script: Script) -> str:
    return {id(STREAM): "whole", id(BREAKS_LATE): "late", id(BREAKS_EARLY): "early"}[id(script)]


# --- 8: one header, written in several ways -----------------------------------------------------------


@pytest.mark.parametrize("name", ["x-session-id", "X-Session-ID", "X-SESSION-ID", "x-Session-Id"])
async def test_headers_name_the_session_however_they_are_written(name: str) -> None:
    """The client's spelling, as bytes on the wire."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        body = json.dumps(ASK).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\n{name}: me\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        client = Client(reader, writer)
        await until(lambda: len(it.brain.prepared) == 1)
        _, headers = it.brain.prepared[0]
        await client.close()
        await it.until_quiet()

    key = identify(headers, {}, tenant="t")
    assert key is not None
    assert key.session == "me"
