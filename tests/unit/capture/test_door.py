"""The recorder's door, before a worker that goes away. No sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.capture.passthrough import Door, Message
from router.capture.record import Tape
from router.errors import WorkerError
from tests.unit.capture.test_drive import INFO, URL

ANSWER = b'data: {"choices": [{"token_ids": [1]}]}\n\ndata: [DONE]\n\n'


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.capture.absence._RETRY_SECONDS", 0.001)


class Asked:
    """What came of a request at the door."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.said: list[str] = []
        self.given_up: WorkerError | None = None
        self.records: list[dict[str, Any]] = []

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        return not self.sent[-1].get("more_body", False)


async def asked(
    answer: Callable[[httpx.Request], httpx.Response], folder: Path, *, method: str = "POST", patience: float = 5.0
) -> Asked:
    it, questions = Asked(), iter([{"type": "http.request", "body": b'{"stream": true}'}])
    scope = {"type": "http", "method": method, "path": "/v1/completions", "query_string": b"", "headers": []}

    async def receive() -> Message:
        if (question := next(questions, None)) is not None:
            return question
        await asyncio.Event().wait()
        return {}

    async def send(message: Message) -> None:
        it.sent.append(message)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        with Tape("t", folder) as tape:
            door = Door(INFO, tape, client, patience_seconds=patience, say=it.said.append)
            await door(scope, receive, send)
            it.given_up = door.given_up.result() if door.given_up.done() else None
    tape_file = folder / "t.requests.jsonl"
    it.records = [json.loads(line) for line in tape_file.read_text().splitlines()] if tape_file.exists() else []
    return it


def absent_for(times: float) -> Callable[[httpx.Request], httpx.Response]:
    """Away for so many requests of any kind, then there."""
    left = times

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal left
        if left:
            left -= 1
            raise httpx.ConnectError("refused")
        return httpx.Response(200, stream=httpx.ByteStream(ANSWER))

    return answer


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_worker_that_is_away_is_waited_for(method: str, tmp_path: Path) -> None:
    """The client sees nothing of it; the operator is told once. An attempt that failed is marked as that."""
    it = await asked(absent_for(4), tmp_path, method=method)
    assert (it.status, it.body, it.is_whole) == (200, ANSWER, True)
    assert it.said == ["http://worker does not answer; waiting for 5 s at most"]
    assert it.given_up is None
    assert [record["failed"] for record in it.records] == ([True, False] if method == "POST" else [])


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_one_that_stays_away_ends_the_recording(method: str, tmp_path: Path) -> None:
    it = await asked(absent_for(float("inf")), tmp_path, method=method, patience=0.02)
    assert (it.status, json.loads(it.body)["error"]["message"]) == (502, "http://worker has not answered for 0.02 s")
    assert str(it.given_up) == "http://worker has not answered for 0.02 s"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (httpx.RemoteProtocolError("x"), f"{URL} broke the connection: RemoteProtocolError"),
        (httpx.ReadTimeout("x"), f"{URL} did not answer in time"),
    ],
)
async def test_what_breaks_before_its_answer_is_told(
    method: str, error: httpx.HTTPError, sentence: str, tmp_path: Path
) -> None:
    """It had the request, and may have acted on it: it is not sent again."""

    def answer(_: httpx.Request) -> httpx.Response:
        raise error

    it = await asked(answer, tmp_path, method=method)
    assert (it.status, json.loads(it.body)["error"]["message"], it.said) == (502, sentence, [sentence])


async def test_an_answer_that_breaks_off_breaks_off(tmp_path: Path) -> None:
    """What came is passed on, its end is not feigned."""

    class Broken(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield ANSWER[:10]
            raise httpx.ReadError("reset")

    it = await asked(lambda _: httpx.Response(200, stream=Broken()), tmp_path)
    assert (it.status, it.body, it.is_whole) == (200, ANSWER[:10], False)
    assert it.said == ["http://worker broke an answer off"]
