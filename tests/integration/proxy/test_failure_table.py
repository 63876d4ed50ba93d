"""The failure table: of whatever can go wrong, what the client gets, which ranks are tried, what is left of it.

A row's columns are status, code, attempts, the state of each worker's connection, and what is counted.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import pytest

from router.settings import QueueSettings, ServerSettings, UpstreamSettings
from tests.fakes.fault_worker import OK, OK_BODY, FaultWorker, Move, Script, answer, chunk, stream_head
from tests.fakes.proxy_rig import ASK, CHAT, DELTA, STREAM, RawAnswer, Rig, rig, target, until

ENDPOINTS = {
    CHAT: "chat_completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/readyz": "readyz",
    "/livez": "livez",
}
RESET: Script = (Move.RESET,)
CLOSE: Script = (Move.CLOSE,)
SILENT: Script = (Move.STALL,)
BUSY: Script = (answer(503, b'{"busy": 1}', headers={"Retry-After": "7"}),)
LIMITED: Script = (answer(429, b'{"limited": 1}', headers={"Retry-After": "3"}),)
LATE: Script = (answer(408, b"{}"),)
BROKEN: Script = (answer(500, b'{"broken": 1}'),)
BAD: Script = (answer(400, b'{"bad": 1}'),)
EVENTS = DELTA + DELTA


#: What a head that has no end is made of.
LINES = b"".join(b"x-line-%d: %b\r\n" % (number, b"y" * 1000) for number in range(100))
BEGUN = b"HTTP/1.1 200 OK\r\n"


def breaking(*tail: bytes | float | Move, head: bytes = stream_head()) -> Script:
    """A stream of two events, and what becomes of it."""
    return (head, chunk(DELTA), 0.02, chunk(DELTA), 0.02, *tail)


@dataclass(frozen=True)
class Row:
    """``attempts`` are outcomes in the order of the ranks. ``upstream``: whether the connection to each worker is
    ``kept`` for the next request, ``closed``, or the worker is ``untouched``. ``counted`` is besides the request and
    its attempts.
    """

    case: str
    workers: tuple[Script | None, ...]  # None: nobody listens there
    status: int
    code: str | None
    attempts: str
    upstream: str
    counted: Mapping[str, int] = field(default_factory=dict)
    ask: object = field(default_factory=lambda: ASK)
    path: str = CHAT
    method: str = "POST"
    sent: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    #: What has passed of a stream that ends in an error event; of an answer that is ``cut`` off all that comes.
    passed: bytes = b""
    cut: bool = False
    #: The client goes away: once the worker has its request, or what has ``passed`` has come.
    leaves: bool = False
    #: It was refused before it was whole, and is counted among what no endpoint has seen.
    unread: bool = False
    #: Another request has the one place there is.
    queue: QueueSettings | None = None


def errors(code: str) -> dict[str, int]:
    return {f"errors {code}": 1}


def refused(case: str, status: int, code: str, ask: object = ASK, **more: object) -> Row:
    """What never gets to a worker."""
    return Row(case, (OK,), status, code, "", "untouched", errors(code), ask=ask, **more)  # type: ignore[arg-type]


def retried(case: str, script: Script | None, outcome: str, upstream: str = "closed") -> Row:
    """What another rank makes good: the client sees nothing of it."""
    return Row(case, (script, OK), 200, None, f"{outcome} ok", f"{upstream} kept", body=OK_BODY)


def failed(case: str, script: Script | None, status: int, code: str, attempts: str, upstream: str) -> Row:
    """The same on all of as many ranks as are tried, and one more."""
    states = f"{upstream} " * len(attempts.split())
    workers = (script,) * len(attempts.split())
    return Row(case, workers, status, code, attempts, states, errors(code))


def verbatim(case: str, script: Script, status: int, **more: object) -> Row:
    """A worker's own answer in one attempt, as it is."""
    outcome = "ok" if status < 400 else "client_error"
    return Row(case, (script, OK), status, None, outcome, "kept untouched", **more)  # type: ignore[arg-type]


def broken_off(case: str, script: Script, outcome: str, code: str = "upstream_failed", **more: object) -> Row:
    """A stream that ends with one error event, and without its own end. Nobody else is asked."""
    given = {"ask": STREAM, "passed": EVENTS, **more}
    return Row(case, (script, OK), 200, code, outcome, "closed untouched", errors(code), **given)  # type: ignore[arg-type]


def cut_off(case: str, script: Script, passed: bytes) -> Row:
    """What is no stream has no room for a last word: it ends short of what was announced, so that all see it."""
    counted = errors("upstream_failed")
    return Row(case, (script, OK), 200, None, "reset", "closed untouched", counted, passed=passed, cut=True)


def left(case: str, script: Script, ask: object = STREAM, passed: bytes = b"") -> Row:
    """A client that goes away. 499 is in the counts only."""
    counted = {"client_disconnects": 1}
    return Row(case, (script,), 499, None, "client_gone", "closed", counted, ask=ask, passed=passed, leaves=True)


TABLE = (
    verbatim("nothing goes wrong", OK, 200, body=OK_BODY),
    # The request is at fault.
    refused("no JSON", 400, "invalid_json", b'{"model": "m", '),
    refused("no messages", 400, "missing_required_parameter", {"model": "m"}),
    refused("no model", 400, "missing_required_parameter", {"messages": [{}]}),
    refused("empty messages", 400, "empty_array", {"model": "m", "messages": []}),
    refused("unknown model", 404, "model_not_found", {**ASK, "model": "x"}),
    refused("unknown path", 404, "unknown_url", path="/v1/unknown"),
    refused("wrong method", 405, "method_not_allowed", b"", method="GET"),
    refused("too large", 413, "request_body_too_large", {**ASK, "pad": "x" * 70_000}, unread=True),
    verbatim("a temperature of 99 is the engine's to judge", OK, 200, ask={**ASK, "temperature": 99}),
    verbatim("so is the content type", OK, 200, sent={"content-type": "text/plain"}),
    verbatim("400 of a worker", BAD, 400, body=b'{"bad": 1}'),
    verbatim("404 of a worker", (answer(404, b"{}"),), 404, body=b"{}"),
    verbatim("422 of a worker", (answer(422, b"{}"),), 422, body=b"{}"),
    # A worker breaks before the first byte.
    retried("reset", RESET, "reset"),
    retried("closed", CLOSE, "reset"),
    retried("nobody listens", None, "connect", "untouched"),
    retried("half a head", (b"HTTP/1.1 200 OK\r\ncontent-", Move.CLOSE), "reset"),
    retried("head, then reset", (stream_head(), 0.02, Move.RESET), "reset"),
    retried("head, then silence", (stream_head(), Move.STALL), "timeout"),
    retried("silence", SILENT, "timeout"),
    retried("garbage", (b"220 mail.example ESMTP\r\n",), "protocol"),
    retried("two lengths", (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",), "protocol"),
    retried(
        "a coding that would get lost",
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",),
        "protocol",
    ),
    retried("no status", (b"HTTP/1.1 099 OK\r\ncontent-length: 5\r\n\r\nhello",), "protocol"),
    retried("another protocol", (b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",), "protocol"),
    retried("a head without end", (BEGUN, LINES, Move.STALL), "protocol"),
    retried("a header without end", (BEGUN + b"x: " + b"y" * 100_000, Move.STALL), "protocol"),
    retried("a reason without end", (b"HTTP/1.1 200 " + b"y" * 100_000, Move.STALL), "protocol"),
    retried("more headers than one can want", (BEGUN + b"a: b\r\n" * 300 + b"content-length: 0\r\n\r\n",), "protocol"),
    retried("interim answers without end", (b"HTTP/1.1 103 Wait\r\nlink: x\r\n\r\n" * 3000, Move.STALL), "protocol"),
    retried("a refusal's head, then silence", (answer(503, b"x" * 9)[:-9], Move.STALL), "timeout"),
    retried("500 cut short", (answer(500, b"x" * 9)[:-4], Move.CLOSE), "reset"),
    retried("endless 500", (answer(500, b"x" * 400_000),), "server_error"),
    failed("reset everywhere", RESET, 502, "upstream_failed", "reset reset", "closed"),
    failed("nobody listens anywhere", None, 502, "upstream_failed", "connect connect", "untouched"),
    failed("silence everywhere", SILENT, 504, "upstream_timeout", "timeout timeout", "closed"),
    Row("three attempts, no more", (RESET,) * 5, 502, "upstream_failed", "reset " * 3, "closed " * 3 + "untouched " * 2,
        errors("upstream_failed")),
    # A worker refuses.
    retried("500", BROKEN, "server_error", "kept"),
    retried("503", BUSY, "pushback", "kept"),
    retried("429", LIMITED, "pushback", "kept"),
    retried("408", LATE, "pushback", "kept"),
    Row("500 everywhere, each asked once", (BROKEN,) * 3, 500, None, "server_error " * 3, "kept " * 3,
        body=b'{"broken": 1}'),
    Row("503 everywhere", (BUSY,) * 2, 503, None, "pushback " * 2, "kept " * 2, body=b'{"busy": 1}',
        headers={"retry-after": "7"}),
    Row("503 everywhere, to who wants a stream", (BUSY,) * 2, 503, None, "pushback " * 2, "kept " * 2, ask=STREAM,
        headers={"content-type": "application/json", "retry-after": "7"}),
    Row("429 everywhere", (LIMITED,) * 2, 429, None, "pushback " * 2, "kept " * 2, body=b'{"limited": 1}',
        headers={"retry-after": "3"}),
    Row("408 everywhere", (LATE,) * 2, 408, None, "pushback " * 2, "kept " * 2, body=b"{}"),
    Row("three are full, the fourth is free", (BUSY,) * 3 + (OK,), 200, None, "pushback " * 3 + "ok", "kept " * 4),
    Row("full, then reset: when to come again is told", (LIMITED, RESET), 429, None, "pushback reset", "kept closed",
        headers={"retry-after": "3", "x-homing-worker": "w0", "x-homing-attempts": "1"}),
    Row("reset, then full", (RESET, LIMITED), 429, None, "reset pushback", "closed kept"),
    Row("full, then 500", (BUSY, BROKEN), 503, None, "pushback server_error", "kept kept",
        headers={"x-homing-worker": "w0", "x-homing-attempts": "1"}),
    # It breaks in the middle.
    broken_off("a stream is reset", breaking(Move.RESET), "reset"),
    broken_off("a stream is closed", breaking(Move.CLOSE), "reset"),
    broken_off("a stream falls silent", breaking(Move.STALL), "timeout"),
    broken_off("a bad chunk", breaking(b"zz\r\n"), "protocol"),
    broken_off("trailers without end", breaking(b"0\r\n" + LINES, Move.STALL), "protocol"),
    broken_off("a trailer without end", breaking(b"0\r\nx: " + b"y" * 100_000, Move.STALL), "protocol"),
    broken_off("a chunk's extension without end", breaking(b"1;" + b"y" * 100_000, Move.STALL), "protocol"),
    broken_off("half a chunk", breaking(b"5\r\nda", Move.CLOSE), "reset"),
    broken_off("half an event", breaking(chunk(b'data: {"choi'), Move.CLOSE), "reset"),
    broken_off("a stream of Anthropic's", breaking(Move.RESET), "reset", path="/v1/messages"),
    broken_off("a stream of Responses", breaking(Move.RESET), "reset", path="/v1/responses",
               ask={"model": "m", "input": "hi", "stream": True}),
    broken_off("the client's time is over", breaking(Move.STALL), "deadline", "deadline",
               sent={"x-request-timeout": "1.0"}),
    cut_off("a wrong length", (answer(200, b"x" * 100)[:-50], 0.02, Move.CLOSE), b"x" * 50),
    cut_off("no last chunk", (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"a:"), 0.02, Move.CLOSE),
            b"a:"),
    cut_off("half a last chunk", (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"a:"), 0.02,
            b"5\r\n", Move.RESET), b"a:"),
    # It looks broken, and is not.
    verbatim("no content", (b"HTTP/1.1 204 No Content\r\n\r\n",), 204, body=b""),
    verbatim("an interim answer first", (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", *OK), 200, body=OK_BODY),
    Row("no coding, until it closes", ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\nhi", Move.CLOSE),), 200,
        None, "ok", "closed", body=b"hi"),
    # The client leaves.
    left("while a whole answer is made", SILENT, ask=ASK),
    left("while a stream has not begun", SILENT),
    left("after a stream's head", (stream_head(), Move.STALL)),
    left("while a stream is silent", (stream_head(), chunk(DELTA), Move.STALL), passed=DELTA),
    # Nobody can take it.
    Row("no worker", (), 503, "no_worker_available", "", "", errors("no_worker_available"),
        headers={"retry-after": "1"}),
    Row("nor ready", (), 503, None, "", "", {}, ask=b"", method="GET", path="/readyz"),
    Row("but alive", (), 200, None, "", "", {}, ask=b"", method="GET", path="/livez"),
    Row("the client's time is over before an answer", (SILENT, OK), 504, "deadline", "deadline", "closed untouched",
        errors("deadline"), sent={"x-request-timeout": "0.7"}),
    Row("no place, and none to wait in", (SILENT,), 429, "queue_full", "", "kept", errors("queue_full"),
        queue=QueueSettings(max_inflight=1, max_queued=0), headers={"retry-after": "1"}),
    Row("waited for a place too long", (SILENT,), 429, "queue_timeout", "", "kept", errors("queue_timeout"),
        queue=QueueSettings(max_inflight=1, queue_seconds=0.05), headers={"retry-after": "1"}),
)  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.case)
async def test_failure_table(row: Row) -> None:
    """One request: what the client sees, and when it is over all attempts, connections and counts."""
    seconds = 0.4 if "timeout" in row.attempts else 30.0  # of silence
    async with AsyncExitStack() as stack, asyncio.timeout(20):
        workers = [await stack.enter_async_context(FaultWorker([script or OK])) for script in row.workers]
        for worker, script in zip(workers, row.workers, strict=True):
            if script is None:
                worker.stop_listening()
        it = await stack.enter_async_context(
            rig(
                *(target(worker.port) for worker in workers),
                server=ServerSettings(port=0, max_body_bytes=65_536),
                upstream=UpstreamSettings(first_byte_seconds=seconds, idle_seconds=seconds),
                queue=row.queue,
            )
        )
        other = await it.connect()
        stack.push_async_callback(other.close)
        if row.queue:
            await other.send(ASK)
            await until(lambda: len(workers[0].requests) == 1)
        before, under_way = _counts(it), it.count("homing_inflight_requests")

        await _ask(it, row, workers)

        await until(lambda: it.count("homing_inflight_requests") == under_way)
        with suppress(TimeoutError):
            await until(lambda: _states(workers) == row.upstream.split(), seconds=5.0)
        assert _states(workers) == row.upstream.split()
        assert [len(worker.requests) for worker in workers] == [
            int(state != "untouched") for state in row.upstream.split()
        ]
        endpoint = ENDPOINTS.get(row.path, "other")
        expected = {f"attempts w{slot} 0 {outcome}": 1 for slot, outcome in enumerate(row.attempts.split())}
        assert _counts(it) - before == Counter({f"requests {endpoint} {row.status}": 1, **expected, **row.counted})
        await other.close()
        await it.until_quiet()
        if not row.queue:
            assert it.brain.outcomes == row.attempts.split()


def _states(workers: list[FaultWorker]) -> list[str]:
    return ["untouched" if not worker.connections else "kept" if worker.open else "closed" for worker in workers]


def _counts(it: Rig) -> Counter[str]:
    """All counters that are not zero, each by its name and labels."""
    return Counter(
        {
            " ".join(
                (sample.name.removeprefix("homing_").removesuffix("_total"), *sample.labels.values())
            ): sample.value
            for metric in it.metrics.registry.collect()
            for sample in metric.samples
            if metric.type == "counter" and sample.name.endswith("_total") and sample.value
        }
    )


async def _ask(it: Rig, row: Row, workers: list[FaultWorker]) -> None:
    client = await it.connect()
    await client.send(row.ask, method=row.method, path=row.path, headers=row.sent)
    if row.leaves:
        await until(lambda: len(workers[0].requests) == 1)
        if row.passed:
            await client.head()
            assert await client.piece() == row.passed
        client.writer.transport.abort()
        await workers[0].until(open_connections=0)
        return
    answer_ = await client.answer()
    await client.close()
    _check(answer_, row)


def _check(answer_: RawAnswer, row: Row) -> None:
    """The answer is what the row says, tells no address, and says where it came from if it is a worker's."""
    assert answer_.status == row.status
    assert answer_.complete is not row.cut
    assert b"127.0.0.1" not in answer_.body
    if row.attempts and (row.code is None or row.passed):
        slot = len(row.attempts.split()) - 1
        given = {"x-homing-worker": f"w{slot}", "x-homing-attempts": f"{slot + 1}", **row.headers}
    else:
        given = row.headers
    assert {name: answer_.headers.get(name) for name in given} == given
    if row.body is not None:
        assert answer_.body == row.body
    if row.passed:
        assert answer_.body.startswith(row.passed)
        last = answer_.body.removeprefix(row.passed)
        if row.cut:
            assert not last
        else:
            assert last.count(b"\n\n") == 1
            assert json.loads(last.split(b"data: ")[1])["error"]["code"] == row.code
    elif row.code is not None:
        assert answer_.error["code"] == row.code
        assert set(answer_.error) == {"message", "type", "param", "code"}
