"""What becomes of a request when workers fail: the table of answers, attempts and outcomes."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import dataclass, field
from types import FunctionType

import pytest

from router.proxy.upstream import UpstreamPool
from router.settings import UpstreamSettings
from tests.fakes.fault_worker import OK, FaultWorker, Move, Script, answer, chunk, event, stream_head
from tests.fakes.proxy_rig import RawAnswer, rig, target

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BUSY: Script = (answer(503, b'{"busy": 1}', headers={"Retry-After": "7"}),)
LIMITED: Script = (answer(429, b'{"limited": 1}', headers={"Retry-After": "3"}),)
BROKEN: Script = (answer(500, b'{"broken": 1}'),)
DELTA = event({"choices": [{"delta": {"content": "a"}}]})


@dataclass(frozen=True)
class Case:
    """Scripts of workers 0, 1, 2, and what the client and the brain see."""

    name: str
    scripts: tuple[Script, ...]
    status: int
    outcomes: tuple[str, ...]
    code: str | None = None
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    #: Whose answer is passed on; None: the last one's.
    worker: str | None = None


CASES = (
    Case("healthy", (OK,), 200, ("ok",)),
    Case("reset before the head", ((Move.RESET,), OK), 200, ("reset", "ok")),
    Case("closed before the head", ((Move.CLOSE,), OK), 200, ("reset", "ok")),
    Case("half a head, then closed", ((b"HTTP/1.1 200 OK\r\ncontent-", Move.CLOSE), OK), 200, ("reset", "ok")),
    Case("head, then reset", ((stream_head(), 0.02, Move.RESET), OK), 200, ("reset", "ok")),
    Case("head, then silence", ((stream_head(), Move.STALL), OK), 200, ("timeout", "ok")),
    Case("silence", ((Move.STALL,), OK), 200, ("timeout", "ok")),
    Case("garbage", ((b"220 mail.example ESMTP\r\n",), OK), 200, ("protocol", "ok")),
    Case(
        "two lengths",
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",), OK),
        200,
        ("protocol", "ok"),
    ),
    Case("500, then another rank", (BROKEN, OK), 200, ("server_error", "ok")),
    Case("503, then another rank", (BUSY, OK), 200, ("pushback", "ok")),
    Case("429, then another rank", (LIMITED, OK), 200, ("pushback", "ok")),
    Case("503 everywhere", (BUSY, BUSY), 503, ("pushback",) * 2, body=b'{"busy": 1}', headers={"retry-after": "7"}),
    Case("429 everywhere", (LIMITED, LIMITED), 429, ("pushback",) * 2, headers={"retry-after": "3"}),
    Case("500 everywhere, each tried once", (BROKEN,) * 3, 500, ("server_error",) * 3, body=b'{"broken": 1}'),
    Case("no more than three attempts", ((Move.RESET,),) * 5, 502, ("reset",) * 3, code="upstream_failed"),
    Case("reset everywhere", ((Move.RESET,),) * 2, 502, ("reset",) * 2, code="upstream_failed"),
    Case("silence everywhere", ((Move.STALL,),) * 2, 504, ("timeout",) * 2, code="upstream_timeout"),
    Case("three are full, the fourth is free", (BUSY,) * 3 + (OK,), 200, ("pushback",) * 3 + ("ok",)),
    Case("full, then reset: when to return is told", (LIMITED, (Move.RESET,)), 429, ("pushback", "reset"), worker="w0"),
    Case("reset, then full", ((Move.RESET,), LIMITED), 429, ("reset", "pushback")),
    Case("full, then 500", (BUSY, BROKEN), 503, ("pushback", "server_error"), worker="w0"),
    Case("408, then another rank", ((answer(408, b"{}"),), OK), 200, ("pushback", "ok")),
    Case(
        "a coding that would get lost",
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",), OK),
        200,
        ("protocol", "ok"),
    ),
    Case("no status", ((b"HTTP/1.1 099 OK\r\ncontent-length: 5\r\n\r\nhello",), OK), 200, ("protocol", "ok")),
    Case(
        "another protocol",
        ((b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",), OK),
        200,
        ("protocol", "ok"),
    ),
    Case(
        "no coding, until it closes",
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\nhello", Move.CLOSE),),
        200,
        ("ok",),
        body=b"hello",
    ),
    Case("400 is the client's", ((answer(400, b'{"bad": 1}'),), OK), 400, ("client_error",), body=b'{"bad": 1}'),
    Case("404 is the client's", ((answer(404, b"{}"),), OK), 404, ("client_error",)),
    Case("422 is the client's", ((answer(422, b"{}"),), OK), 422, ("client_error",)),
    Case("no content", ((b"HTTP/1.1 204 No Content\r\n\r\n",),), 204, ("ok",), body=b""),
    Case("an interim answer first", ((b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", *OK),), 200, ("ok",)),
    Case("500 cut short, then another rank", ((answer(500, b"x" * 9)[:-4], Move.CLOSE), OK), 200, ("reset", "ok")),
    Case("endless 500, then another rank", ((answer(500, b"x" * 400_000),), OK), 200, ("server_error", "ok")),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_failure_before_the_first_byte(case: Case) -> None:
    """Another rank is asked while the client has seen nothing; each attempt's lease is closed with its outcome."""
    answer_, outcomes, requests = await _play(case)
    assert answer_.status == case.status
    assert answer_.complete
    assert outcomes == list(case.outcomes)
    assert requests == [1] * len(case.outcomes) + [0] * (len(case.scripts) - len(case.outcomes))
    if case.code is not None:
        assert answer_.error["code"] == case.code
        assert set(answer_.error) == {"message", "type", "param", "code"}
        assert "127.0.0.1" not in str(answer_.error["message"])
    else:
        assert answer_.headers["x-homing-worker"] == (case.worker or f"w{len(case.outcomes) - 1}")
        number = int(answer_.headers["x-homing-worker"].removeprefix("w"))
        assert answer_.headers["x-homing-attempts"] == str(number + 1)
    if case.body is not None:
        assert answer_.body == case.body
    for name, value in case.headers.items():
        assert answer_.headers[name] == value


async def _play(case: Case) -> tuple[RawAnswer, list[str], list[int]]:
    workers = [FaultWorker([script]) for script in case.scripts]
    settings = UpstreamSettings(first_byte_seconds=0.15, idle_seconds=0.15)
    async with asyncio.timeout(10):
        for worker in workers:
            await worker.__aenter__()
        try:
            async with rig(*(target(worker.port) for worker in workers), upstream=settings) as it:
                answer_ = await it.ask(ASK)
                await it.until_quiet()
                assert it.count("homing_requests_total", endpoint="chat_completions", status=str(answer_.status)) == 1
                outcomes = it.brain.outcomes
        finally:
            for worker in workers:
                await worker.__aexit__(None, None, None)
    return answer_, outcomes, [len(worker.requests) for worker in workers]


@pytest.mark.parametrize(
    ("answers", "stream", "outcomes"),
    [(True, False, ["ok"]), (False, False, ["timeout", "ok"]), (None, False, ["timeout", "ok"]),
     (True, True, ["timeout", "ok"])],
    ids=["probes answered", "probes fail", "not probed", "a stream"],
)  # fmt: skip
async def test_a_whole_answer_may_take_as_long_as_its_worker_answers_probes(
    answers: bool | None, stream: bool, outcomes: list[str]
) -> None:
    """What is not streamed is no silence while the worker lives; without probes, and for streams, a limit holds."""
    settings = UpstreamSettings(first_byte_seconds=0.1)
    async with (
        FaultWorker([(0.5, *OK)]) as slow,
        FaultWorker([OK]) as other,
        rig(target(slow.port), target(other.port), upstream=settings) as it,
    ):
        it.brain.answers = answers
        assert (await it.ask({**ASK, "stream": stream})).status == 200
        await it.until_quiet()
        assert it.brain.outcomes == outcomes


async def test_nobody_listens() -> None:
    """A refused connection is an attempt like another: the next rank is asked."""
    async with FaultWorker() as dead, FaultWorker() as alive:
        dead.stop_listening()
        async with rig(target(dead.port), target(alive.port)) as it:
            assert (await it.ask(ASK)).status == 200
            assert it.brain.outcomes == ["connect", "ok"]


async def test_nobody_listens_anywhere() -> None:
    """502 with a code; where the workers are is nobody's business."""
    async with FaultWorker() as one, FaultWorker() as two:
        for worker in (one, two):
            worker.stop_listening()
        async with rig(target(one.port), target(two.port)) as it:
            answer_ = await it.ask(ASK)
            assert (answer_.status, answer_.error["code"]) == (502, "upstream_failed")
            assert it.brain.outcomes == ["connect"] * 2
    assert b"127.0.0.1" not in answer_.body
    assert not any(str(worker.port).encode() in answer_.body for worker in (one, two))


async def test_an_event_too_long_to_hold_breaks_off() -> None:
    """Its begin has passed: a blank line ends it before the error, which is an event of its own."""
    begin = b"data: " + b"x" * 70_000
    async with FaultWorker([(stream_head(), chunk(begin), 0.05, Move.RESET)]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask({**ASK, "stream": True})
    assert answer_.complete
    assert answer_.body.startswith(begin + b"\n\ndata: {")
    assert json.loads(answer_.body[len(begin) + 8 :])["error"]["code"] == "upstream_failed"


async def test_a_dead_process_of_many_ranks_costs_one_attempt() -> None:
    """All its ranks are at one address: after the first refused connection none of them is tried."""
    async with FaultWorker() as dead, FaultWorker() as alive:
        dead.stop_listening()
        ranks = [target(dead.port, rank=rank, dp_size=8) for rank in range(8)]
        async with rig(*ranks, target(alive.port)) as it:
            assert (await it.ask(ASK)).status == 200
            assert it.brain.outcomes == ["connect", "ok"]


@pytest.mark.skipif(not isinstance(UpstreamPool.take, FunctionType), reason="a compiled class cannot be patched")
async def test_no_worker_is_blamed_where_the_router_has_no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of file descriptors every rank would look dead: one attempt, and an answer that says to come back."""

    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with FaultWorker() as one, FaultWorker() as two, rig(target(one.port), target(two.port)) as it:
        client = await it.connect()
        monkeypatch.setattr(UpstreamPool, "_open_socket", refuse)
        await client.send(ASK)
        answer_ = await client.answer()
        assert (answer_.status, answer_.error["code"]) == (503, "no_socket")
        assert answer_.headers["retry-after"] == "1"
        assert it.brain.outcomes == ["no_socket"]
        await client.close()


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b"event: message_stop\ndata: {}\n\n"),
        ("/v1/responses", b"event: response.completed\ndata: {}\n\n"),
        ("/v1/responses", b"event: response.incomplete\ndata: {}\n\n"),
        ("/v1/messages", b"event: error\ndata: {}\n\n"),
    ],
)
async def test_a_break_after_the_last_event_is_no_error(path: str, last: bytes) -> None:
    """All has been said: the stream ends as if the worker had ended it."""
    body = {**ASK, "stream": True, "input": "hi", "max_tokens": 5}
    script = (stream_head(), chunk(DELTA + last), 0.02, Move.RESET)
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask(body, path=path)
        assert it.brain.outcomes == ["ok"]
    assert answer_.complete
    assert answer_.body == DELTA + last


async def test_a_stream_that_misses_its_length_is_cut_off() -> None:
    """Whatever it said: what the client gets next on this connection would be taken for the missing bytes."""
    said = DELTA + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % (len(said) + 200)
    async with FaultWorker([(head, said, 0.02, Move.RESET)]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask({**ASK, "stream": True})
        assert it.brain.outcomes == ["reset"]
    assert not answer_.complete
    assert answer_.body == said


OWN_ERROR = event({"error": {"message": "out of memory"}})


@pytest.mark.parametrize(
    ("said", "is_whole"),
    [
        ((DELTA + b"data: [DONE]\n\n",), True),
        ((DELTA, b"data: [DONE]\n\n", b"\n"), True),
        ((DELTA, b"data: [DONE]\n\n", b": bye"), True),
        ((DELTA, b"data: [DONE]\n"), True),
        ((DELTA, b"data: [DONE]"), True),
        ((DELTA.replace(b"\n", b"\r\n"), b"data: [DONE]\r\n", b"\r\n"), True),
        ((DELTA, OWN_ERROR), True),
        ((DELTA,), False),
        ((DELTA, b'data: {"half'), False),
    ],
)
async def test_a_stream_that_ends_with_its_connection_must_say_that_it_is_done(
    said: tuple[bytes, ...], *, is_whole: bool
) -> None:
    """Without length and chunks a worker that dies looks like one that is done, but for its last event."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    script = (head, *(step for piece in said for step in (piece, 0.02)), Move.CLOSE)
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask({**ASK, "stream": True})
        assert it.brain.outcomes == ["ok" if is_whole else "reset"]
    assert answer_.complete
    if is_whole:
        assert answer_.body == b"".join(said)
    else:
        assert answer_.body.startswith(DELTA + b'data: {"error": ')
        assert b'"upstream_failed"' in answer_.body


async def test_events_that_end_their_lines_as_http_does_are_counted() -> None:
    """The number of the error's event continues theirs, and the time between them is known."""
    begun = b'event: response.output_text.delta\r\ndata: {"delta": "a"}\r\n\r\n'
    script = (stream_head(), chunk(begun), 0.02, chunk(begun[:-3]), 0.02, chunk(begun[-3:]), 0.02, Move.RESET)
    body = {"model": "m", "input": "hi", "stream": True}
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask(body, path="/v1/responses")
    assert json.loads(answer_.body.split(b"data: ")[-1])["sequence_number"] == 2


async def test_no_rank_at_all() -> None:
    """Without any rank the answer is 503 with Retry-After, and not ready."""
    async with rig() as it:
        answer_ = await it.ask(ASK)
        assert (answer_.status, answer_.error["code"]) == (503, "no_worker_available")
        assert answer_.headers["retry-after"] == "1"
        assert (await it.ask(b"", method="GET", path="/readyz")).status == 503
        assert (await it.ask(b"", method="GET", path="/livez")).status == 200


@pytest.mark.parametrize(
    ("tail", "outcome"),
    [((Move.RESET,), "reset"), ((Move.CLOSE,), "reset"), ((Move.STALL,), "timeout"), ((b"zz\r\n",), "protocol"),
     ((b"5\r\nda", Move.CLOSE), "reset"), ((chunk(b'data: {"choi'), Move.CLOSE), "reset")],
    ids=["reset", "closed", "silent", "bad chunk", "half a chunk", "half an event"],
)  # fmt: skip
async def test_stream_breaks_after_the_first_byte(tail: Script, outcome: str) -> None:
    """The client gets the whole events that came, one error event and no [DONE]; nobody else is asked."""
    script = (stream_head(), chunk(DELTA), 0.02, chunk(DELTA), 0.02, *tail)
    async with FaultWorker([script]) as worker, FaultWorker() as other:
        settings = UpstreamSettings(idle_seconds=0.2)
        async with rig(target(worker.port), target(other.port), upstream=settings) as it:
            answer_ = await it.ask({**ASK, "stream": True})
            assert answer_.status == 200
            assert answer_.complete
            events = answer_.body.split(b"\n\n")
            assert events[:2] == [DELTA.strip()] * 2
            assert events[3:] == [b""]
            assert json.loads(events[2].removeprefix(b"data: "))["error"]["code"] == "upstream_failed"
            assert it.brain.outcomes == [outcome]
            assert it.count("homing_errors_total", code="upstream_failed") == 1
            assert not other.requests


@pytest.mark.parametrize(
    "script",
    [
        (answer(200, b"x" * 100)[:-50], 0.02, Move.CLOSE),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b'{"a":'), 0.02, Move.CLOSE),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b'{"a":'), 0.02, b"5\r\n1", Move.RESET),
    ],
    ids=["wrong length", "no last chunk", "half a chunk"],
)
async def test_whole_answer_breaks_after_the_first_byte(script: Script) -> None:
    """An answer that is not a stream is cut off, so that no client takes a part for the whole."""
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask(ASK)
        assert answer_.status == 200
        assert not answer_.complete
        assert it.brain.outcomes == ["reset"]


async def test_kept_connection_closed_by_the_worker() -> None:
    """A request that meets a closing kept connection is sent again on a new one: one attempt, nothing seen."""
    async with FaultWorker([OK, (Move.RESET,), OK]) as worker, rig(target(worker.port)) as it:
        for _ in range(2):
            answer_ = await it.ask(ASK)
            assert answer_.status == 200
            assert answer_.headers["x-homing-attempts"] == "1"
        assert it.brain.outcomes == ["ok", "ok"]
        assert worker.connections == 2


async def test_kept_connection_that_has_begun_to_answer_is_not_tried_again() -> None:
    """Once a kept connection has brought a byte of an answer, its end is a failed attempt."""
    async with FaultWorker([OK, (b"HTTP/1.1 2", 0.02, Move.RESET), OK]) as worker, rig(target(worker.port)) as it:
        assert (await it.ask(ASK)).status == 200
        assert (await it.ask(ASK)).status == 502
        assert it.brain.outcomes == ["ok", "reset"]


async def test_kept_connection_that_was_silent_for_long_is_not_tried_again() -> None:
    """A worker that breaks off after a while has had the request: that is a failed attempt, and counts."""
    async with FaultWorker([OK, (1.1, Move.RESET), OK]) as worker, rig(target(worker.port)) as it:
        assert (await it.ask(ASK)).status == 200
        assert (await it.ask(ASK)).status == 502
        assert it.brain.outcomes == ["ok", "reset"]
        assert worker.connections == 1


async def test_kept_connections_rest_shorter_than_the_worker_keeps_them() -> None:
    """An idle connection to a worker is closed by the router when its time is over."""
    settings = UpstreamSettings(keepalive_seconds=0.1)
    async with FaultWorker() as worker, rig(target(worker.port), upstream=settings) as it:
        assert (await it.ask(ASK)).status == 200
        assert it.plane.open_connections[1] == 1
        async with asyncio.timeout(2):
            await worker.until(open_connections=0)
        assert it.plane.open_connections[1] == 0


async def test_bug_in_the_brain() -> None:
    """An unexpected error is a 500 that tells nothing of the inside, and the connection lives on."""
    async with rig() as it:
        client = await it.connect()
        await client.send({**ASK, "model": "bug"})
        answer_ = await client.answer()
        assert (answer_.status, answer_.error["code"]) == (500, "internal_error")
        assert "ZeroDivision" not in answer_.body.decode()
        await client.send({**ASK, "model": "other"})
        assert (await client.answer()).error["code"] == "model_not_found"
        await client.close()
