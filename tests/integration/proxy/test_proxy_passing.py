"""What passes through unchanged, what is added, and how a rank is addressed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import pytest

from router.core.types import Engine
from router.settings import UpstreamSettings
from router.wire.usage import Usage
from tests.fakes.fault_worker import OK_BODY, FaultWorker, Move, Script, answer, chunk, event, stream_head
from tests.fakes.proxy_rig import CHAT, FakeLease, rig, target

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_request_reaches_the_worker_as_sent() -> None:
    """The body arrives byte for byte; end-to-end headers too, but none that are the connection's or secret."""
    body = b'{ "model":"m",\n "messages" : [{"role":"user","content":"\\u00e9 \xc3\xa9"}], "unknown": 1e2 }'
    sent = {
        "authorization": "Bearer secret",
        "cookie": "a=b",
        "x-api-key": "secret",
        "connection": "keep-alive, x-hop",
        "x-hop": "mine",
        "te": "trailers",
        "traceparent": "00-aa-bb-01",
        "tracestate": "v=1",
        "x-data-parallel-rank": "9",
        "x-custom": "kept",
        "x-request-id": "abc-1",
        "accept-encoding": "identity",
    }
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask(body, headers=sent, path=CHAT + "?api-version=1")
        (received,) = worker.requests
        assert received.body == body
        assert received.head.startswith(b"POST /v1/chat/completions?api-version=1 HTTP/1.1\r\n")
        for name in ("traceparent", "tracestate", "x-custom", "x-request-id", "accept-encoding"):
            assert received.header(name) == sent[name]
        for name in ("authorization", "cookie", "x-api-key", "connection", "x-hop", "te", "x-data-parallel-rank"):
            assert received.header(name) is None
        assert received.header("host") == f"127.0.0.1:{worker.port}"
        assert answer_.headers["x-request-id"] == "abc-1"


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("dp_size", [1, 4])
async def test_no_client_chooses_a_room_or_a_rank(engine: Engine, dp_size: int) -> None:
    """Not of a worker that does all of it either: the router's own rank stands, in the engine's way, or none."""
    evil = {
        "bootstrap_room": 7,
        "bootstrap_host": "evil",
        "bootstrap_port": 1,
        "kv_transfer_params": {"remote_port": 1},
    }
    ranks = {"routed_dp_rank": 3, "data_parallel_rank": 3, "disagg_prefill_dp_rank": 3}
    headers = {"x-data-parallel-rank": "3", "x-override-routed-dp-rank": "3", "x-override-bootstrap-room": "7"}
    async with FaultWorker() as worker, rig(target(worker.port, rank=1, dp_size=dp_size, engine=engine)) as it:
        await it.ask({**ASK, **evil, **ranks}, headers=headers)
        (received,) = worker.requests
        in_body = dp_size > 1 and engine is not Engine.VLLM
        in_head = dp_size > 1 and engine is not Engine.SGLANG
        expected = ASK | dict.fromkeys({**evil, **ranks}) | ({"routed_dp_rank": 1} if in_body else {})
        assert json.loads(received.body) == expected
        assert received.header("x-data-parallel-rank") == ("1" if in_head else None)
        assert b"x-override" not in received.head


async def test_credentials_go_on_only_when_told() -> None:
    """With the setting on, the worker sees the client's authorization."""
    settings = UpstreamSettings(forward_credentials=True)
    async with FaultWorker() as worker, rig(target(worker.port), upstream=settings) as it:
        await it.ask(ASK, headers={"authorization": "Bearer x"})
        assert worker.requests[0].header("authorization") == "Bearer x"


async def test_answer_says_where_it_came_from() -> None:
    """Decision headers are added, the worker's own ones of these names are not believed, the usage is read."""
    script = (answer(200, OK_BODY, headers={"X-Homing-Rank": "77", "Server": "Engine", "Keep-Alive": "timeout=5"}),)
    async with FaultWorker([script]) as worker, rig(target(worker.port, rank=2, dp_size=4)) as it:
        answer_ = await it.ask(ASK)
        assert answer_.body == OK_BODY
        assert {name: value for name, value in answer_.headers.items() if name.startswith("x-homing")} == {
            "x-homing-worker": "w0",
            "x-homing-rank": "2",
            "x-homing-reason": "cold",
            "x-homing-expected-cached-tokens": "0",
            "x-homing-attempts": "1",
        }
        assert answer_.headers["server"] == "Engine"
        assert "keep-alive" not in answer_.headers
        assert answer_.headers["content-length"] == str(len(OK_BODY))
        assert len(answer_.headers["x-request-id"]) >= 16
        assert it.brain.leases[0].closed[0][1] == Usage(prompt_tokens=40, completion_tokens=2, cached_tokens=32)
        assert it.brain.leases[0].first_bytes == 1


@pytest.mark.parametrize("given", ["x" * 129, "a b", "caf\u00e9"])
async def test_unacceptable_request_id_is_replaced(given: str) -> None:
    """An id that is too long or not visible ASCII never reaches worker or client."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        client = await it.connect()
        body = json.dumps(ASK).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nx-request-id: {given}\r\ncontent-length: {len(body)}\r\n\r\n"
        client.writer.write(head.encode("latin-1") + body)
        await client.send(ASK)  # h11 must believe that it asked; this request follows the first
        made = (await client.answer()).headers["x-request-id"]
        await client.close()
        assert made != given
        assert worker.requests[0].header("x-request-id") == made


@pytest.mark.parametrize(
    ("engine", "dp_size", "header", "field"),
    [
        (Engine.VLLM, 4, "3", None),
        (Engine.SGLANG, 4, None, 3),
        (Engine.SHIM, 4, "3", 3),
        (Engine.VLLM, 1, None, None),
        (Engine.SGLANG, 1, None, None),
        (Engine.SHIM, 1, None, None),
    ],
)
async def test_rank_is_named_as_the_engine_wants(
    engine: Engine, dp_size: int, header: str | None, field: int | None
) -> None:
    """vLLM reads a header, SGLang a body field, the shim both; a worker of one rank is told nothing."""
    async with FaultWorker() as worker, rig(target(worker.port, rank=3, dp_size=dp_size, engine=engine)) as it:
        await it.ask(ASK, headers={"X-Data-Parallel-Rank": "0"})
        (received,) = worker.requests
        assert received.header("x-data-parallel-rank") == header
        expected = ASK if field is None else {**ASK, "routed_dp_rank": field}
        assert json.loads(received.body) == expected


def _scripts(body: bytes, *, seed: int) -> list[Script]:
    """The same body with a length, in random chunks, and ended by the connection's close."""
    rng = random.Random(seed)
    chunked: list[bytes | float] = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]
    position = 0
    while position < len(body):
        size = rng.choice((1, 7, 100, 65_536, 200_000))
        chunked.append(chunk(body[position : position + size]))
        position += size
        if rng.random() < 0.2:
            chunked.append(0.001)
    chunked.append(chunk(b""))
    return [(answer(200, body),), tuple(chunked), (b"HTTP/1.1 200 OK\r\n\r\n", body, Move.CLOSE)]


@pytest.mark.parametrize("framing", ["length", "chunks", "close"])
@pytest.mark.parametrize("size", [0, 1, 5_000, 1_500_000])
async def test_every_byte_of_the_answer_passes(framing: str, size: int) -> None:
    """Random bytes arrive unchanged, however the worker frames them."""
    body = random.Random(size).randbytes(size)
    script = _scripts(body, seed=size)[("length", "chunks", "close").index(framing)]
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask(ASK)
        assert answer_.complete
        assert answer_.body == body
        assert it.brain.outcomes == ["ok"]


async def test_http_1_0_client_gets_the_end_of_the_connection() -> None:
    """A client that knows no chunks gets the body as it is, ended by the close."""
    script = (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"ab"), chunk(b"cd"), chunk(b""))
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        client = await it.connect()
        body = json.dumps(ASK).encode()
        client.writer.write(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
        head, _, rest = (await client.reader.read()).partition(b"\r\n\r\n")
        await client.close()
        assert rest == b"abcd"
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head


async def test_http_1_0_client_that_asks_to_stay_is_told_that_it_may() -> None:
    """Of itself that version closes after each answer: a client that is not told so would wait for the end of one."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        body = json.dumps(ASK).encode()
        asked = b"POST %b HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: %d\r\n\r\n%b"
        for _ in range(2):
            writer.write(asked % (CHAT.encode(), len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"\r\nconnection: keep-alive\r\n" in head
            assert await reader.readexactly(len(OK_BODY)) == OK_BODY
        writer.close()


async def test_stream_passes_and_its_usage_is_read() -> None:
    """A stream arrives unchanged, events split anywhere, and its last usage is the attempt's."""
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    sent = (
        event({"choices": [{"delta": {"content": 'say "usage"'}}], "usage": None})
        + event({"choices": [], "usage": usage})
        + b"data: [DONE]\n\n"
    )
    pieces = [sent[start : start + 11] for start in range(0, len(sent), 11)]
    script = (stream_head(), *(step for piece in pieces for step in (chunk(piece), 0.001)), chunk(b""))
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask({**ASK, "stream": True})
        assert answer_.body == sent
        assert it.brain.leases[0].closed[0][1] == Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=8)
        assert it.count("homing_first_token_seconds_count", model="m") == 1
        assert it.count("homing_inter_token_seconds_count", model="m") == 1


@pytest.mark.parametrize("asks", [True, False])
async def test_the_ids_of_an_answer_are_read_where_the_client_asked_for_them(*, asks: bool) -> None:
    """As they stream; how the text begins in any case."""
    events = [
        {"choices": [{"index": 0, "delta": {"content": word}, "token_ids": [number]}]}
        for number, word in enumerate(("so ", "it ", "is"), 7)
    ]
    stream = b"".join(map(event, events)) + b"data: [DONE]\n\n"
    script = (stream_head(), *map(chunk, (stream[:90], stream[90:], b"")))
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask({**ASK, "stream": True, "return_token_ids": asks})
        assert answer_.body == stream
        (lease,) = it.brain.leases
        assert (lease.ids, lease.heard_ids, lease.words) == ([7, 8, 9] if asks else [], 3 * asks, "so it is")


async def test_an_answer_that_the_router_fails_on_ends_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all of it has come by then: nobody would wait for more, and the client for ever."""

    def fail(lease: FakeLease, ids: Sequence[int]) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(FakeLease, "generated", fail)
    told = event({"choices": [{"index": 0, "delta": {"content": "so"}, "token_ids": [7]}]})
    async with FaultWorker([(stream_head() + chunk(told) + chunk(b""),)]) as worker, rig(target(worker.port)) as it:
        async with asyncio.timeout(5.0):
            answer_ = await it.ask({**ASK, "stream": True, "return_token_ids": True})
        assert b'"error"' in answer_.body
        assert it.brain.outcomes == ["fault"]


async def test_compressed_stream_is_not_looked_into() -> None:
    """A stream in a content coding passes as it comes, without waiting for what would end an event."""
    head = stream_head().replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    async with FaultWorker([(head, chunk(b"\x1f\x8b"), Move.STALL)]) as worker, rig(target(worker.port)) as it:
        client = await it.connect()
        await client.send({**ASK, "stream": True})
        await client.head()
        assert await client.piece() == b"\x1f\x8b"
        await client.close()


async def test_connections_to_workers_are_used_again() -> None:
    """Requests one after another share a connection, also after errors that were whole."""
    scripts: list[Script] = [(answer(200, b"{}"),), (answer(400, b"{}"),), (answer(500, b"{}"),), (answer(200, b"{}"),)]
    async with FaultWorker(scripts) as worker, rig(target(worker.port)) as it:
        statuses = [(await it.ask(ASK)).status for _ in range(4)]
        assert statuses == [200, 400, 500, 200]
        assert worker.connections == 1


@pytest.mark.parametrize("more", [answer(200, b"evil"), b"HTTP/1.1 200 OK\r\ncontent-le", b"H", b"evil"])
async def test_connection_that_said_more_than_asked_is_not_used_again(more: bytes) -> None:
    """Bytes after an answer's end, however few, could be taken for the next answer's, so the connection goes."""
    async with FaultWorker([(answer(200, b"{}") + more,)]) as worker, rig(target(worker.port)) as it:
        for _ in range(2):
            assert (await it.ask(ASK)).body == b"{}"
        assert worker.connections == 2


async def test_an_answer_without_content_has_no_length() -> None:
    """204 says that there is no body; a length beside it, which some workers add, is not passed on (RFC 9110 8.6)."""
    script: Script = (b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n",)
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask(ASK)
    assert (answer_.status, answer_.body) == (204, b"")
    assert "content-length" not in answer_.headers
