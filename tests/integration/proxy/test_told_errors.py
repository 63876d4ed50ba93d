"""Errors that a worker tells in an answer whose head was good: passed on as they came, and accounted as failures."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.fault_worker import FaultWorker, Script, answer, chunk, event, stream_head
from tests.fakes.proxy_rig import rig, target

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
DELTA = event({"choices": [{"delta": {"content": "a"}}]})
DONE = b"data: [DONE]\n\n"


def named(name: str, **data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ((DELTA, event({"error": {"message": "m", "type": "InternalServerError", "code": 500}}), DONE), "server_error"),
        ((DELTA, event({"error": {"message": "m"}}) + DONE), "server_error"),
        ((DELTA, event({"error": {"message": "m", "code": 400}}), DONE), "client_error"),
        ((event({"error": {"message": "m", "code": 400}}), DONE), "client_error"),
        ((DELTA, event({"error": {"message": "m", "code": 503}}), DONE), "pushback"),
        ((DELTA, event({"object": "error", "message": "m", "code": 500}), DONE), "server_error"),
        ((DELTA, event({"error": "out of memory"})[:-2]), "server_error"),
        ((named("message_start"), named("error", error={"type": "api_error", "message": "m"})), "server_error"),
        ((named("error", error={"type": "invalid_request_error", "message": "m"}),), "client_error"),
        ((named("message_start"), named("error", error={"type": "overloaded_error", "message": "m"})), "pushback"),
        ((DELTA, event({"error": {"message": "m", "type": ["invalid_request_error"]}}), DONE), "server_error"),
        ((named("response.created", response={"error": None}), named("error", message="m")), "server_error"),
        (
            (
                named("response.created", response={"error": None}),
                named("response.failed", response={"error": {"code": "server_error"}}),
            ),
            "server_error",
        ),
        ((DELTA, event({"choices": [{"delta": {"content": '{"error": {"code": 500}}'}}]}), DONE), "ok"),
        ((DELTA, event({"choices": [{"delta": {"content": "error"}}], "error": None}), DONE), "ok"),
        ((DELTA, b'data: {"error": {"message"\n\n', DONE), "ok"),
    ],
)
async def test_a_stream_that_tells_an_error_has_failed(said: tuple[bytes, ...], outcome: str) -> None:
    """The client has the stream as it is; the rank's account says how it ended."""
    script: Script = (stream_head(), *(step for piece in said for step in (chunk(piece), 0.01)), b"0\r\n\r\n")
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask({**ASK, "stream": True})
        assert it.brain.outcomes == [outcome]
    assert answer_.complete
    assert answer_.status == 200
    assert answer_.body == b"".join(said)


@pytest.mark.parametrize(
    ("document", "outcome"),
    [
        ({"error": {"message": "m", "code": 500}}, "server_error"),
        ({"error": {"message": "m", "code": 400}}, "client_error"),
        ({"object": "error", "message": "m", "code": 400}, "client_error"),
        ({"choices": [{"message": {"content": '"error"'}}], "error": None}, "ok"),
        (["error"], "ok"),
    ],
)
async def test_a_whole_answer_that_is_an_error_has_failed(document: object, outcome: str) -> None:
    script: Script = (answer(200, json.dumps(document).encode()),)
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        answer_ = await it.ask(ASK)
        assert it.brain.outcomes == [outcome]
    assert answer_.status == 200
    assert json.loads(answer_.body) == document


REFUSED = event({"error": {"message": "m", "code": 400}})
DOCUMENT = {"error": {"message": "m", "code": 400}}


@pytest.mark.parametrize(
    ("script", "first_bytes"),
    [
        ((stream_head(), chunk(REFUSED), 0.01, chunk(DONE), b"0\r\n\r\n"), 0),
        ((answer(200, json.dumps(DOCUMENT).encode()),), 0),
        ((answer(200, json.dumps({"error": None}).encode()),), 1),
        ((stream_head(), chunk(DELTA), 0.01, chunk(REFUSED + DONE), b"0\r\n\r\n"), 1),
    ],
)
async def test_an_answer_that_begins_with_an_error_is_no_first_token(script: Script, first_bytes: int) -> None:
    """A prompt that is refused in an instant tells nothing of how fast prompts are computed."""
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        await it.ask({**ASK, "stream": True})
        assert [lease.first_bytes for lease in it.brain.leases] == [first_bytes]


async def test_a_client_that_leaves_when_it_is_told_of_an_error_does_not_hide_it() -> None:
    """The worker takes its time to end a stream that has failed; clients raise the error at once."""
    script: Script = (stream_head(), chunk(DELTA), 0.01, chunk(event({"error": {"message": "m"}})), asyncio.Event())
    async with FaultWorker([script]) as worker, rig(target(worker.port)) as it:
        client = await it.connect()
        await client.send({**ASK, "stream": True})
        await client.head()
        while b"error" not in (await client.piece() or b"error"):
            pass
        await client.close()
        await it.until_quiet()
        assert it.brain.outcomes == ["server_error"]
