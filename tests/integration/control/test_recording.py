"""``homing record-events`` before a worker whose events do not come, or whose door is taken: one line, and no files."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.capture import record
from router.capture.cli import main
from tests.fakes.control_worker import Answers, ControlWorker, as_json


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens who says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def recorded(answers: Answers, folder: Path, *options: str) -> int:
    """The exit status."""

    async def record_one() -> int:
        async with ControlWorker(answers) as worker:
            told = ["record-events", "--worker", worker.url, "--name", "t", "--folder", str(folder), *options]
            return await asyncio.to_thread(main, told)

    return asyncio.run(record_one())


@pytest.mark.parametrize("is_told", [True, False])
def test_nobody_publishes(
    taken: int, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the operator's word or the worker's own: a capture without events is none."""
    monkeypatch.setattr(record, "_CONNECT_SECONDS", 0.3)
    endpoint = f"tcp://127.0.0.1:{taken}"
    entry: dict[str, Any] = {"publisher": "zmq", "endpoint": endpoint, "topic": ""}
    answers: Answers = {} if is_told else {"/kv_event_sources": as_json({"0": entry})}
    status = recorded(answers, tmp_path, "--port", "0", *(["--kv-events", endpoint] if is_told else []))
    assert status == 1
    assert capsys.readouterr() == ("", f"homing record-events: nobody publishes cache events at {endpoint}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_tells_of_no_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recorded({}, tmp_path, "--port", "0") == 1
    assert "tells of no cache events: start it with --kv-events-config" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "no..host"])
def test_a_door_that_cannot_be_opened(
    taken: int, host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anybody is told to send requests there, or the worker is asked."""
    told = ["record-events", "--worker", "http://127.0.0.1:1", "--name", "t", "--folder", str(tmp_path)]
    assert main([*told, "--host", host, "--port", str(taken)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"homing record-events: cannot listen on {host}:{taken}: ")
    assert err.count("\n") == 1
