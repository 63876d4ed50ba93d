"""The end of the router's own day."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tests.fakes.fault_worker import OK, FaultWorker, Move, Script, chunk, stream_head
from tests.fakes.proxy_rig import ASK, DELTA, STREAM, raw, rig, target, until


async def test_drain_lets_streams_end() -> None:
    """Draining refuses new connections and lets what is being served end; then nothing is open."""
    goes_on = asyncio.Event()
    script = (stream_head(), chunk(DELTA), goes_on, chunk(b"data: [DONE]\n\n"), chunk(b""))
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        client, idle = await it.connect(), await it.connect()
        await client.send(STREAM)
        await client.head()
        draining = asyncio.create_task(it.plane.drain(20))
        assert await idle.reader.read() == b""
        with pytest.raises(OSError, match=r"."):
            await it.connect()
        goes_on.set()
        pieces = [await client.piece(), await client.piece(), await client.piece()]
        assert pieces == [DELTA, b"data: [DONE]\n\n", None]
        await draining
        assert it.plane.open_connections == (0, 0)
        await client.close()
        await idle.close()


async def test_what_was_sent_before_the_drain_is_answered() -> None:
    """An idle client's request that the router has not read yet; a stray line end keeps nobody."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        clients = [await asyncio.open_connection("127.0.0.1", it.port) for _ in range(2)]
        await until(lambda: it.count("homing_connections") == 2)
        clients[0][1].write(raw())
        clients[1][1].write(b"\r\n")
        draining = asyncio.create_task(it.plane.drain(20))
        async with asyncio.timeout(10):
            answered = await clients[0][0].read()
            assert await clients[1][0].read() == b""
            await draining
        assert answered.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answered
        for _, writer in clients:
            writer.close()


async def test_who_has_connected_before_the_drain_is_let_in() -> None:
    """In the eyes of the system, not of the router yet: one that has asked, and one that asks a little later."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        connected = [socket.create_connection(("127.0.0.1", it.port)) for _ in range(2)]
        connected[0].sendall(raw())
        draining = asyncio.create_task(it.plane.drain(20))
        clients = [await asyncio.open_connection(sock=each) for each in connected]
        clients[1][1].write(raw())
        async with asyncio.timeout(10):
            for reader, writer in clients:
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
                writer.close()
            await draining


async def test_while_unready_answers_are_the_last_on_their_connections() -> None:
    """Of who was there before and of who comes: all are served and know where they stand before the listener closes."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        idle, busy = await it.connect(), await it.connect()
        await busy.send(ASK)
        it.plane.retire()
        late = await it.connect()
        for client in (idle, late):
            await client.send(ASK)
        for client in (busy, idle, late):
            answer_ = await client.answer()
            assert (answer_.status, answer_.headers["connection"]) == (200, "close")
            assert await client.reader.read() == b""
            await client.close()


async def test_an_answer_that_has_not_begun_says_that_it_is_the_last() -> None:
    """Of a request that is with its worker when the router goes: a client that keeps connections asks nothing more."""
    answers = asyncio.Event()
    async with FaultWorker([(answers, *OK)]) as worker, rig(target(worker.port)) as it:
        client = await it.connect()
        await client.send(ASK)
        await until(lambda: len(worker.requests) == 1)
        draining = asyncio.create_task(it.plane.drain(20))
        await asyncio.sleep(0)  # it has begun
        answers.set()
        answer_ = await client.answer()
        assert (answer_.status, answer_.headers["connection"]) == (200, "close")
        assert await client.reader.read() == b""
        await draining
        await client.close()


async def test_drain_serves_what_is_being_sent() -> None:
    """A request whose body is on its way when the router goes is served; one that never ends is told why not."""
    whole = raw()
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        clients = [await asyncio.open_connection("127.0.0.1", it.port) for _ in range(2)]
        for _, writer in clients:
            writer.write(whole[:-5])
        await until(lambda: [client.queued_bytes > 0 for client in it.plane.clients] == [True, True])
        draining = asyncio.create_task(it.plane.drain(30))
        await asyncio.sleep(0.1)
        clients[0][1].write(whole[-5:])
        async with asyncio.timeout(20):
            assert (await clients[0][0].read()).startswith(b"HTTP/1.1 200 ")
            assert not draining.done()
            draining.cancel()
            draining = asyncio.create_task(it.plane.drain(0.1))  # its time is over
            said = await clients[1][0].read()
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b'"shutting_down"' in said
        await draining
        for _, writer in clients:
            writer.close()


async def test_drain_ends_what_takes_too_long() -> None:
    """When the time is over a stream ends with an error event, and a request without an answer gets 503."""
    scripts: list[Script] = [(stream_head(), chunk(DELTA), Move.STALL), (Move.STALL,)]
    async with FaultWorker(scripts) as worker, rig(target(worker.port)) as it:
        stream, whole = await it.connect(), await it.connect()
        await stream.send(STREAM)
        await stream.head()
        await whole.send(ASK)
        await until(lambda: len(worker.requests) == 2)
        await it.plane.drain(0.1)
        assert await stream.piece() == DELTA
        last = await stream.piece()
        assert last is not None
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert await stream.piece() is None
        answer_ = await whole.answer()
        assert (answer_.status, answer_.error["code"]) == (503, "shutting_down")
        assert it.plane.open_connections == (0, 0)
        assert it.count("homing_requests_total", endpoint="chat_completions", status="499") == 0
        assert it.brain.outcomes == ["shutdown", "shutdown"]
        await stream.close()
        await whole.close()
