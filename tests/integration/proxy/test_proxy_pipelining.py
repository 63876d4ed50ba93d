"""Clients that send more before they have read: in order, within bounds, and missed when they leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from router.settings import ServerSettings
from tests.fakes.fault_worker import OK, OK_BODY, FaultWorker, Move, Script, answer, chunk, stream_head
from tests.fakes.proxy_rig import ASK, DELTA, STREAM, raw, rig, target, until


async def heard(reader: asyncio.StreamReader, enough: Callable[[bytes], bool]) -> bytes:
    """What comes, until it is enough."""
    said = b""
    async with asyncio.timeout(20):
        while not enough(said):
            piece = await reader.read(65536)
            assert piece, said
            said += piece
    return said


def is_answered(times: int) -> Callable[[bytes], bool]:
    """So many good answers have come, the last one whole."""
    return lambda said: said.count(b"HTTP/1.1 200 ") >= times and said.endswith(OK_BODY)


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Twenty requests sent at once come back in their order, though the first takes longest."""
    scripts: list[Script] = [(0.05, answer(200, b"0"))]
    scripts += [(answer(200, b"%d" % number),) for number in range(1, 20)]
    async with FaultWorker(scripts) as worker, rig(target(worker.port)) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(raw() * 20)
        bodies = []
        for _ in range(20):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            bodies.append(await reader.readexactly(length))
        writer.close()
        assert bodies == [b"%d" % number for number in range(20)]
        assert worker.connections == 1


async def test_pipelined_bodies_are_not_piled_up() -> None:
    """Behind the request being served a megabyte is read ahead, whatever a client has to say; all is answered."""
    body = {**ASK, "padding": "x" * 4_000_000}
    answers = asyncio.Event()
    async with FaultWorker([(answers, *OK)]) as worker, rig(target(worker.port)) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(raw() + 4 * raw(body) + raw())
        await until(lambda: len(worker.requests) == 1)
        await asyncio.sleep(0.2)
        (client,) = it.plane.clients
        assert client.queued_bytes < 2_000_000
        answers.set()
        await heard(reader, is_answered(6))
        assert [len(request.body) > 4_000_000 for request in worker.requests] == [False, True, True, True, True, False]
        writer.close()


async def test_pipelined_requests_are_not_piled_up() -> None:
    """However small: beyond a few the client is not read until one has been answered."""
    async with FaultWorker([(Move.STALL,)]) as worker, rig(target(worker.port)) as it:
        _, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(20 * raw())
        await until(lambda: len(worker.requests) == 1)
        flood = 40_000_000
        writer.write(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n" * (flood // 35))
        sizes = [flood]
        while len(sizes) < 8 or len(set(sizes[-8:])) > 1:  # until it stays as it is
            await asyncio.sleep(0.05)
            sizes.append(writer.transport.get_write_buffer_size())
        assert sizes[-1] > 0
        writer.transport.abort()
        # Its goodbye waits behind what the kernel cannot take: it is heard no earlier than with its next answer.
        for client in it.plane.clients:
            client.abort()


@pytest.mark.parametrize("is_rude", [False, True], ids=["closed", "reset"])
async def test_a_client_that_leaves_behind_a_full_pipeline_is_missed_at_once(*, is_rude: bool) -> None:
    """As much waits as may, so nothing is read of it; its stream's worker is told all the same, though it is silent."""
    async with FaultWorker([(stream_head(), chunk(DELTA), Move.STALL)]) as worker, rig(target(worker.port)) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(raw(STREAM) + 9 * raw())
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)
        if is_rude:
            writer.transport.abort()
        else:
            writer.close()
        async with asyncio.timeout(5):  # 0.1 s on an idle machine
            await worker.until(open_connections=0)
        await it.until_quiet()
        assert it.brain.outcomes == ["client_gone"]


async def test_a_client_that_pipelines_and_never_reads_is_given_up() -> None:
    """Its answers fill what the kernel takes; after the time for a body it is closed."""
    server = ServerSettings(port=0, body_timeout_seconds=0.3)
    async with rig(server=server) as it:
        _, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(400):
            writer.write(200 * b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
            await asyncio.sleep(0.002)
            if not it.plane.clients:
                break
        await until(lambda: it.count("homing_connections") == 0)
        writer.close()


async def test_no_more_at_once_than_may() -> None:
    """Of a flood in one piece so many are answered, then the client is told and closed."""
    async with rig() as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(1000 * b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
        async with asyncio.timeout(20):
            said = await reader.read()
        assert said.count(b"HTTP/1.1 200 ") % 256 == 0  # as the kernel cuts it, mostly in one piece
        assert b"HTTP/1.1 200 " in said
        assert said.count(b"HTTP/1.1 429 ") == 1
        assert b'"too_many_pipelined"' in said
        writer.close()


async def test_who_waits_to_be_asked_for_a_body_is_not_late() -> None:
    """Behind an answer that takes its time the body is not asked for; its own time begins when it is."""
    server = ServerSettings(port=0, body_timeout_seconds=0.2)
    async with FaultWorker([(0.5, *OK), OK]) as worker, rig(target(worker.port), server=server) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        second = raw(extra="expect: 100-continue\r\n")
        head, _, body = second.partition(b"\r\n\r\n")
        writer.write(raw() + head + b"\r\n\r\n")
        async with asyncio.timeout(20):
            said = await reader.readuntil(b"100 Continue\r\n\r\n")
        writer.write(body)
        said += await heard(reader, is_answered(1))
        assert said.index(b"HTTP/1.1 200 ") < said.index(b"100 Continue")  # never inside another's answer
        writer.close()


async def test_a_client_that_pipelines_slowly_is_not_late() -> None:
    """Each request has its own time, though another's end comes with its beginning, and reading had stopped."""
    server = ServerSettings(port=0, header_timeout_seconds=0.7, body_timeout_seconds=0.7)
    whole = raw({**ASK, "padding": "x" * 4_000_000})
    async with FaultWorker([(1.0, *OK), OK]) as worker, rig(target(worker.port), server=server) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        for piece in (whole[:-9], whole[-9:] + whole[:-9], whole[-9:] + whole[:20], whole[20:-9], whole[-9:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.4)
        said = await heard(reader, is_answered(3))
        assert b"408" not in said
        writer.close()


async def test_many_offers_to_upgrade_are_declined() -> None:
    """However many a client sends at once."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        offers, count = b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 200, 0
        while count < 2000:
            writer.write(offers)
            count += 200
            await heard(reader, lambda said: said.count(b"HTTP/1.1 200 ") >= 200)
        writer.close()


async def test_good_requests_before_a_bad_one_are_answered() -> None:
    """A malformed request ends the connection, after the answers that were due."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(raw() + b"POST / HTTP/1.1\r\nhost : a\r\n\r\n" + raw())
        text = await reader.read()
        writer.close()
        assert text.count(b"HTTP/1.1 ") == 2
        assert text.index(b"HTTP/1.1 200") < text.index(b"HTTP/1.1 400")
        assert OK_BODY in text
        assert len(worker.requests) == 1
