"""Clients that leave, hang, send too much, too slowly, or all at once."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from router.settings import QueueSettings, ServerSettings, UpstreamSettings
from tests.fakes.fault_worker import OK, OK_BODY, FaultWorker, Move, Script, answer, chunk, stream_head
from tests.fakes.proxy_rig import ASK, CHAT, STREAM, raw, rig, target, until


async def test_client_leaves_while_its_prompt_is_prepared() -> None:
    """A request whose client has gone before a rank was chosen opens no lease."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        it.brain.preparing = asyncio.Event()
        client = await it.connect()
        await client.send(ASK)
        await until(lambda: len(it.brain.prepared) == 1)
        await client.close()
        await it.until_quiet()
        assert not it.brain.leases
        assert not worker.requests


@pytest.mark.parametrize(
    ("last", "outcome", "status"),
    [
        (b"data: [DONE]\n\n", "ok", "200"),
        (b'event: message_stop\ndata: {"type": "message_stop"}\n\n', "ok", "200"),
        (b'data: {"error": {"message": "m"}}\n\n', "server_error", "200"),
        (b"data: {}\n\n", "client_gone", "499"),
    ],
)
async def test_client_leaves_with_the_last_event(last: bytes, outcome: str, status: str) -> None:
    """As the official ones do, which do not wait for the end of a body in which all has been said."""
    script: Script = (stream_head(), chunk(b"data: {}\n\n"), 0.01, chunk(last), asyncio.Event())
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        client = await it.connect()
        await client.send(STREAM)
        await client.head()
        said = b""
        while not said.endswith(b"data: {}\n\n" + last):
            said += await client.piece() or b""
        await client.close()
        await it.until_quiet()
        assert it.brain.outcomes == [outcome]
        assert it.count("homing_requests_total", endpoint="chat_completions", status=status) == 1
        await worker.until(open_connections=0)


async def test_client_that_reads_nothing_stalls_its_worker() -> None:
    """64 MB for a client that does not read: less than 1 MB is held, the rest waits in the worker."""
    piece = b"data: " + b"x" * 65_000 + b"\n\n"
    script = (stream_head(), *(chunk(piece) for _ in range(1000)), chunk(b""))
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        peer.setblocking(False)
        await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", it.port))
        await asyncio.get_running_loop().sock_sendall(peer, raw(STREAM))
        sent = -1
        while sent != worker.sent_bytes:
            sent = worker.sent_bytes
            await asyncio.sleep(0.2)
        (held,) = (client.unsent_bytes for client in it.plane.clients)
        assert held < 1_000_000
        assert worker.sent_bytes < 32_000_000
        peer.close()
        await it.until_quiet()
        assert it.brain.outcomes == ["client_gone"]


async def test_client_that_never_reads_again_is_given_up() -> None:
    """After the idle time the connection is closed on both sides."""
    piece = b"data: " + b"x" * 65_000 + b"\n\n"
    script = (stream_head(), *(chunk(piece) for _ in range(400)), chunk(b""))
    settings = UpstreamSettings(idle_seconds=1.0)
    async with FaultWorker([script]) as worker, rig(target(worker.port), upstream=settings) as it:
        client = await it.connect()
        await client.send(STREAM)
        client.writer.transport.pause_reading()
        async with asyncio.timeout(20):
            await it.until_quiet()
            await worker.until(open_connections=0)
        assert it.brain.outcomes == ["client_gone"]
        await client.close()


async def test_slow_client_gets_every_byte() -> None:
    """A client that pauses between reads stalls the worker and misses nothing."""
    body = b"".join(b"data: %d %b\n\n" % (number, b"y" * 50_000) for number in range(80))
    script = (stream_head(), *(chunk(body[at : at + 40_000]) for at in range(0, len(body), 40_000)), chunk(b""))
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        client = await it.connect()
        await client.send(STREAM)
        await client.head()
        received = bytearray()
        while (piece := await client.piece()) is not None:
            received += piece
            if len(received) % 3 == 0:
                await asyncio.sleep(0.002)
        await client.close()
        assert bytes(received) == body


async def test_a_refused_client_that_goes_on_sending_hears_why() -> None:
    """Closing under what it still sends would reset the connection, and the answer with it."""
    server = ServerSettings(port=0, max_body_bytes=1024)
    async with rig(server=server) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 4000000\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0.01)
            writer.write(b"x" * 200_000)
        async with asyncio.timeout(20):
            said = await reader.read()
        assert said.startswith(b"HTTP/1.1 413 ")
        assert said.endswith(b"}")
        writer.close()


@pytest.mark.parametrize("url", [b"http://", b"http://[", b"https://a:99999/x"])
@pytest.mark.parametrize("rest", [b"host: a\r\n\r\n", b""], ids=["whole", "stalled"])
async def test_a_target_that_is_no_url(url: bytes, rest: bytes) -> None:
    """Refused as any bad request; one whose head never ends is timed out as any other."""
    server = ServerSettings(port=0, header_timeout_seconds=0.2)
    async with rig(server=server) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(b"GET " + url + b" HTTP/1.1\r\n" + rest)
        async with asyncio.timeout(20):
            said = await reader.read()
        assert said.startswith(b"HTTP/1.1 %d " % (400 if rest else 408))
        writer.close()


@pytest.mark.parametrize("sent", [b"x-request-id: mine\r\n", b""])
async def test_refusals_have_an_id(sent: bytes) -> None:
    """Also those of requests that were never whole; the client's own where it came."""
    server = ServerSettings(port=0, body_timeout_seconds=0.1)
    async with rig(server=server) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + sent + b"content-length: 9\r\n\r\n")
        async with asyncio.timeout(20):
            said = await reader.read()
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"\r\nx-request-id: " + (b"mine\r\n" if sent else b"req-") in said
        writer.close()


async def test_a_body_takes_its_time_as_long_as_it_comes() -> None:
    """Twice the time for bodies, 64 KiB within each; what stops is refused."""
    server = ServerSettings(port=0, body_timeout_seconds=0.6)
    piece = b"x" * 64 * 1024
    whole = b'{"model": "m", "prompt": "%b"}' % (4 * piece)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(whole)
    async with FaultWorker() as worker, rig(target(worker.port), server=server) as it:
        for pieces, status in ((5, 200), (4, 408)):
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(head)
            for number in range(pieces):
                await asyncio.sleep(0.3)
                writer.write(whole[number * len(piece) : (number + 1) * len(piece)])
            async with asyncio.timeout(20):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 %d " % status)
            writer.close()


@pytest.mark.parametrize("max_inflight", [0, 8])
async def test_a_priority_that_is_none_is_refused(max_inflight: int) -> None:
    """Whether or not anybody has to wait."""
    queue = QueueSettings(max_inflight=max_inflight)
    async with FaultWorker() as worker, rig(target(worker.port), queue=queue) as it:
        client = await it.connect()
        for priority, status in (("low", 200), ("HIGH", 200), ("urgent", 400)):
            await client.send(ASK, headers={"x-request-priority": priority})
            assert (await client.answer()).status == status
        await client.close()


async def test_expect_continue() -> None:
    """A client that waits before its body is told to go on, once."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        head, _, body = raw(extra="expect: 100-continue\r\n").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        assert worker.requests[0].header("expect") is None


LIMITS = ServerSettings(
    port=0,
    max_body_bytes=2048,
    max_header_bytes=2048,
    max_headers=16,
    header_timeout_seconds=0.2,
    body_timeout_seconds=0.2,
    keepalive_seconds=0.4,
)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (raw({**ASK, "pad": "x" * 3000}), 413),
        (b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 4096\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n"
         b"401\r\n" + b"x" * 1025 + b"\r\n", 413),
        (raw(extra=f"x: {'y' * 3000}\r\n"), 431),
        (raw(extra="x: y\r\n" * 20), 431),
        (b"GET /" + b"x" * 3000, 408),
        (b"GET /livez HTTP/1.1\r\nhost: a\r\nx", 408),
        (raw()[:-3], 408),
    ],
    ids=["length", "announced", "chunks", "long header", "many headers", "endless target", "slow head", "slow body"],
)  # fmt: skip
async def test_limits_of_size_and_time(sent: bytes, status: int) -> None:
    """What is too large or too slow is refused with its status, and the connection closed."""
    async with rig(server=LIMITS) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(sent)
        async with asyncio.timeout(20):
            text = await reader.read()
        writer.close()
        assert text.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in text
        assert b'"code": "' in text


@pytest.mark.parametrize(
    ("sent", "status", "type_"),
    [
        (b"content-length: 4096\r\n\r\n", 413, "request_too_large"),
        (b"content-length: 2\r\ncontent-length: 3\r\n\r\n", 400, "invalid_request_error"),
        (b"x: " + b"y" * 3000 + b"\r\n\r\n", 431, "invalid_request_error"),
        (b"content-length: 9\r\n\r\n{", 408, "invalid_request_error"),
    ],
    ids=["too large", "two lengths", "head too large", "slow"],
)
@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/messages?beta=true", b"http://a/v1/messages"])
async def test_refusals_have_the_shape_of_the_api_asked_for(path: bytes, sent: bytes, status: int, type_: str) -> None:
    """A request for Anthropic's API that is refused before it is read whole is told so in Anthropic's shape."""
    async with rig(server=LIMITS) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(b"POST %b HTTP/1.1\r\nhost: a\r\n%b" % (path, sent))
        async with asyncio.timeout(20):
            text = await reader.read()
        writer.close()
        assert text.startswith(b"HTTP/1.1 %d " % status)
        body = json.loads(text.partition(b"\r\n\r\n")[2])
        assert (body["type"], body["error"]["type"]) == ("error", type_)


async def test_idle_connections_are_closed() -> None:
    """A connection that asks nothing is closed without a word."""
    async with rig(server=LIMITS) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("POST", "/v1/../v1/chat/completions", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models", 200, None),
        ("GET", "http://router/v1/models?x=1", 200, None),
        ("GET", "/health", 200, None),
        ("GET", "/livez", 200, None),
        ("GET", "/readyz", 200, None),
        ("OPTIONS", CHAT, 204, None),
        ("OPTIONS", "*", 204, None),
    ],
)
async def test_paths_and_methods(method: str, path: str, status: int, code: str | None) -> None:
    """The router's own paths are answered; unknown ones are 404 and wrong methods 405 with Allow, never proxied."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask(b"", method=method, path=path)
        assert answer_.status == status
        if code is not None:
            assert answer_.error["code"] == code
        if status in (204, 405):
            assert "OPTIONS" in answer_.headers["allow"]
        assert "x-request-id" in answer_.headers
        assert not worker.requests


async def test_head_is_get_without_a_body() -> None:
    """HEAD gets the length GET would have, and nothing after the head."""
    async with rig() as it:
        client = await it.connect()
        await client.send(method="HEAD", path="/v1/models")
        answer_ = await client.answer()
        assert (answer_.status, answer_.body) == (200, b"")
        assert answer_.headers["content-length"] == str(len(it.brain.model_list()))
        await client.send(method="GET", path="/v1/models")
        assert (await client.answer()).body == it.brain.model_list()
        await client.close()


async def test_many_clients_at_once_with_faults_leave_nothing_behind() -> None:
    """600 requests over faulty workers, a part of the clients leaving early: each answer whole and its own."""
    faulty: list[Script] = [
        OK,
        (Move.RESET,),
        (answer(503, b"{}"),),
        (0.01, *OK),
        (answer(200, OK_BODY)[:40], Move.RESET),
    ]
    bad, good = FaultWorker(faulty * 60), FaultWorker([OK, (0.005, *OK)] * 400)
    async with bad, good, rig(target(bad.port), target(good.port)) as it:

        async def one(number: int) -> None:
            client = await it.connect()
            await client.send(ASK, headers={"x-request-id": f"id-{number}"})
            if number % 20:
                answer_ = await client.answer()
                assert (answer_.status, answer_.body) == (200, OK_BODY)
                assert answer_.headers["x-request-id"] == f"id-{number}"
            await client.close()

        for start in range(0, 600, 50):
            await asyncio.gather(*(one(number) for number in range(start, start + 50)))
        await it.until_quiet()
        attempts = sum(
            sample.value
            for metric in it.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "homing_attempts_total"
        )
        assert attempts == len(it.brain.leases)
