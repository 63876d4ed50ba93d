"""Workers that fail, in more than one request or one way: what the failure table has no row for."""

from __future__ import annotations

import asyncio
import errno
import json
from types import FunctionType

import pytest

from router.proxy import upstream
from router.proxy.upstream import UpstreamPool
from router.settings import UpstreamSettings
from tests.fakes.fault_worker import OK, FaultWorker, Move, Script, answer, chunk, event, stream_head
from tests.fakes.proxy_rig import rig, target

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
DELTA = event({"choices": [{"delta": {"content": "a"}}]})


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
    late: Script = (0.5, *OK) if outcomes == ["ok"] else (Move.STALL,)
    async with (
        FaultWorker([late]) as slow,
        FaultWorker([OK]) as other,
        rig(target(slow.port), target(other.port), upstream=settings) as it,
    ):
        it.brain.answers = answers
        assert (await it.ask({**ASK, "stream": stream})).status == 200
        await it.until_quiet()
        assert it.brain.outcomes == outcomes


@pytest.mark.parametrize("status", [200, 503])
async def test_behind_the_head_of_a_whole_answer_comes_its_body(status: int) -> None:
    """Whatever probes say: a worker that has begun such an answer has all of it, and a silence is one."""
    settings = UpstreamSettings(first_byte_seconds=60.0, idle_seconds=0.2)
    begun: Script = (0.3, answer(status, b"x" * 9)[:-9], Move.STALL)
    async with (
        FaultWorker([begun]) as stuck,
        FaultWorker([OK]) as other,
        rig(target(stuck.port), target(other.port), upstream=settings) as it,
        asyncio.timeout(20),
    ):
        it.brain.answers = True
        assert (await it.ask(ASK)).status == 200
        assert it.brain.outcomes == ["timeout", "ok"]


async def test_a_streams_head_is_no_first_byte() -> None:
    """Engines send it before they have begun: what follows is awaited as long as if it had not come."""
    settings = UpstreamSettings(first_byte_seconds=60.0, idle_seconds=0.1)
    script: Script = (stream_head(), 0.5, chunk(DELTA + b"data: [DONE]\n\n"), chunk(b""))
    async with FaultWorker([script]) as worker, rig(target(worker.port), upstream=settings) as it:
        assert (await it.ask({**ASK, "stream": True})).body == DELTA + b"data: [DONE]\n\n"
        assert it.brain.outcomes == ["ok"]


TRICKLE: Script = (b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", *(b"x", 0.05) * 60)


@pytest.mark.parametrize(
    ("script", "status"), [((Move.STALL,), 504), (TRICKLE, 200), ((0.1, Move.RESET), 200)], ids=["silent", "slow", "no"]
)
async def test_a_whole_answer_has_a_longest_time(script: Script, status: int) -> None:
    """A worker that answers probes and nothing else, or a byte now and then, is left when it is over, and no other is
    asked; what fails before is tried again.
    """
    settings = UpstreamSettings(answer_seconds=30.0 if Move.RESET in script else 0.5)
    async with (
        FaultWorker([script]) as slow,
        FaultWorker([OK]) as other,
        rig(target(slow.port), target(other.port), upstream=settings) as it,
        asyncio.timeout(20),
    ):
        it.brain.answers = True
        answer_ = await it.ask(ASK)
        assert answer_.status == status
        assert answer_.complete is (script is not TRICKLE)
        await it.until_quiet()
        assert it.brain.outcomes == (["reset", "ok"] if Move.RESET in script else ["timeout"])


async def test_a_stream_has_no_longest_time() -> None:
    """It goes on for as long as something comes."""
    settings = UpstreamSettings(answer_seconds=0.2)
    script: Script = (stream_head(), *(chunk(DELTA), 0.05) * 8, chunk(b"data: [DONE]\n\n"), chunk(b""))
    async with FaultWorker([script]) as worker, rig(target(worker.port), upstream=settings) as it:
        assert (await it.ask({**ASK, "stream": True})).body.count(b"data:") == 9
        assert it.brain.outcomes == ["ok"]


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
        async with asyncio.timeout(20):
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
        assert it.brain.outcomes == ["server_error" if OWN_ERROR in said else "ok" if is_whole else "reset"]
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


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept connection counts as closed before a request reached it for longer than a machine stands still."""
    monkeypatch.setattr(upstream, "_STALE_SECONDS", 30.0)


@pytest.mark.usefixtures("stale")
async def test_kept_connection_closed_by_the_worker() -> None:
    """A request that meets a closing kept connection is sent again on a new one: one attempt, nothing seen."""
    async with FaultWorker([OK, (Move.RESET,), OK]) as worker, rig(target(worker.port)) as it:
        for _ in range(2):
            answer_ = await it.ask(ASK)
            assert answer_.status == 200
            assert answer_.headers["x-homing-attempts"] == "1"
        assert it.brain.outcomes == ["ok", "ok"]
        assert worker.connections == 2


@pytest.mark.usefixtures("stale")
async def test_kept_connections_are_asked_again_once() -> None:
    """A request that workers die of at once looks like one on closed connections: it is sent once more, not at each."""
    dies: Script = (Move.RESET,)
    full: Script = (answer(503, b"{}"),)
    async with (
        FaultWorker([full, dies, dies]) as first,
        FaultWorker([OK, dies, dies]) as second,
        rig(target(first.port), target(second.port)) as it,
    ):
        assert (await it.ask(ASK)).status == 200
        assert (await it.ask(ASK)).status == 502
        assert it.brain.outcomes == ["pushback", "ok", "reset", "reset"]
        assert (len(first.requests), len(second.requests)) == (1 + 2, 1 + 1)


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
        clock = asyncio.get_running_loop().time
        began = clock()
        assert (await it.ask(ASK)).status == 200
        async with asyncio.timeout(20):
            await worker.until(open_connections=0)
        assert clock() - began >= 0.1
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


def told(code: object) -> Script:
    """A stream that has a good head and begins with an error, as engines send them that fail once they compute."""
    said = event({"error": {"message": "out of memory", "type": "InternalServerError", "code": code}})
    return (stream_head(), chunk(said), 0.02, chunk(b"data: [DONE]\n\n") + chunk(b""))


STREAM: Script = (stream_head(), chunk(DELTA), chunk(b"data: [DONE]\n\n") + chunk(b""))


@pytest.mark.parametrize(
    ("code", "outcome"), [(500, "server_error"), (None, "server_error"), ("oom", "server_error"), (503, "pushback")]
)
async def test_a_stream_that_begins_with_an_error_is_tried_elsewhere(code: object, outcome: str) -> None:
    """The head of a stream is sent before anything is computed: no client has seen anything of it yet."""
    async with (
        FaultWorker([told(code)]) as first,
        FaultWorker([STREAM]) as second,
        rig(target(first.port), target(second.port)) as it,
    ):
        answer_ = await it.ask({**ASK, "stream": True})
        assert (answer_.status, answer_.body) == (200, DELTA + b"data: [DONE]\n\n")
        assert answer_.headers["x-homing-attempts"] == "2"
        assert it.brain.outcomes == [outcome, "ok"]


async def test_an_error_at_the_beginning_of_every_stream() -> None:
    """Without another rank the client gets it with the status that it names."""
    async with FaultWorker([told(503)]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask({**ASK, "stream": True})
        assert (answer_.status, answer_.headers["content-type"]) == (503, "application/json")
        assert answer_.error["message"] == "out of memory"
        assert it.brain.outcomes == ["pushback"]


async def test_an_error_that_is_the_clients_own_is_passed_on_as_it_comes() -> None:
    """Another rank would say the same."""
    async with (
        FaultWorker([told(400)]) as first,
        FaultWorker([OK]) as second,
        rig(target(first.port), target(second.port)) as it,
    ):
        answer_ = await it.ask({**ASK, "stream": True})
        assert (answer_.status, answer_.body.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert not second.requests


async def test_a_stream_without_a_word() -> None:
    """Is passed on as it is."""
    async with FaultWorker([(stream_head() + chunk(b""),)]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask({**ASK, "stream": True})
        assert (answer_.status, answer_.body) == (200, b"")
        assert answer_.complete
