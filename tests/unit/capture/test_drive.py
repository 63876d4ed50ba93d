"""The scripted load, against a worker that goes away while it runs. No sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from router.capture.cli import main
from router.capture.drive import Script, drive
from router.capture.record import Tape
from router.core.types import Engine
from router.errors import WorkerError
from router.fleet.worker_api import WorkerInfo
from router.settings import WorkerSpec

URL = "http://worker"
INFO = WorkerInfo(
    name="w",
    url=URL,
    engine=Engine.VLLM,
    models=("m",),
    max_context_tokens=1024,
    dp_size=1,
    sources=(None,),
    block_tokens=16,
    pool_tokens=None,
    identity=None,
)
ANSWER = b'data: {"choices": [{"token_ids": [1]}]}\n\ndata: [DONE]\n\n'
#: No answers to what tokens a text has.
ODD = (b"[1]", b'"x"', b"{}", b'{"tokens": 5}', b'{"tokens": []}', b'{"tokens": ["a"]}', b"[" * 100_000, b"")
SMALL = Script(sessions=2, turns=1, system_tokens=8, turn_tokens=4, output_tokens=4)


class Worker:
    """Answers ``alive`` requests of any kind, is away for ``absent`` of them, and is there from then on."""

    def __init__(self, *, alive: int, absent: float) -> None:
        self.left, self.absent = alive, absent

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": list(range(50))})
        if self.left:
            self.left -= 1
        elif self.absent:
            self.absent -= 1
            raise httpx.ConnectError("refused")
        return httpx.Response(200, stream=httpx.ByteStream(ANSWER))


def driven(worker: Worker, folder: Path, script: Script) -> int:
    """Requests that are on the tape after the whole script."""

    async def run() -> int:
        async with httpx.AsyncClient(transport=httpx.MockTransport(worker)) as client:
            with Tape("t", folder) as tape:
                await drive(INFO, tape, client, script, say=print)
                return tape.requests

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.capture.absence._RETRY_SECONDS", 0.001)


def test_a_worker_that_is_started_anew_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script goes on where it was, and says that it waits."""
    whole = driven(Worker(alive=10**6, absent=0), tmp_path, SMALL)
    assert capsys.readouterr().out == ""

    assert driven(Worker(alive=3, absent=6), tmp_path, SMALL) == whole
    assert "http://worker does not answer; waiting for 300 s at most\n" in capsys.readouterr().out


@pytest.mark.parametrize("alive", [*range(1, 26, 3), 10**6])
def test_a_worker_that_does_not_come_back_ends_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, alive: int
) -> None:
    """Wherever in the script it went, while it empties its cache, too: one line, status 1."""

    async def describe(_client: httpx.AsyncClient, _spec: WorkerSpec) -> WorkerInfo:
        return INFO

    transport = httpx.MockTransport(Worker(alive=alive, absent=float("inf")))
    client = httpx.AsyncClient(transport=transport)
    monkeypatch.setattr("router.capture.cli.describe", describe)
    monkeypatch.setattr("router.capture.cli.httpx.AsyncClient", lambda **_: client)
    monkeypatch.setattr("router.capture.cli.following", following)
    options = ["--worker", URL, "--name", "t", "--folder", str(tmp_path), "--drive", "--patience-seconds", "0.02"]
    small = ["--sessions", "2", "--turns", "1", "--system-tokens", "8", "--turn-tokens", "4", "--output-tokens", "4"]
    status = main(["record-events", *options, *small])

    last = capsys.readouterr().err.splitlines()[-1:]
    is_dead = alive < 10**6
    assert (status, last) == (
        (1, ["homing record-events: http://worker has not answered for 0.02 s"]) if is_dead else (0, [])
    )


@asynccontextmanager
async def following(_info: WorkerInfo, tape: Tape) -> AsyncIterator[None]:
    """One event comes."""
    tape.frame(0, [b"", b"\0" * 8, b"x"])
    yield


@pytest.mark.parametrize("answer", [httpx.Response(404), *(httpx.Response(200, content=odd) for odd in ODD)])
def test_a_worker_without_a_tokenizer_is_no_worker_to_drive(tmp_path: Path, answer: httpx.Response) -> None:
    """Nor one that tells of none."""

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer)) as client:
            with Tape("t", tmp_path) as tape:
                await drive(INFO, tape, client, SMALL, say=print)

    with pytest.raises(WorkerError, match="no prompt can be made"):
        asyncio.run(run())
