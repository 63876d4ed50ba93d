"""What is written down of a request that a recorder passes on, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx

from router.capture.record import Exchange, Tape
from router.fleet.worker_api import describe
from router.settings import WorkerSpec
from tests.fakes.control_worker import Answers, ControlWorker, as_json


async def test_a_request_is_sent_once_there_is_a_connection_for_it(tmp_path: Path) -> None:
    """Until then others overtake it, which its time must show."""
    answers: Answers = {"/v1/completions": as_json({"choices": [{"text": "x"}]})}
    async with (
        ControlWorker(answers) as worker,
        httpx.AsyncClient(limits=httpx.Limits(max_connections=1)) as client,
    ):
        info = await describe(client, WorkerSpec(url=worker.url))
        with Tape("times", tmp_path, clock=asyncio.get_running_loop().time) as tape:
            first, second = (Exchange(tape, info, "/v1/completions", {}, b'{"prompt": [1]}', tag=tag) for tag in "ab")
            pieces = first.run(client, lambda *_: None)
            await anext(pieces)  # it holds the only connection
            waiting = asyncio.ensure_future(second.run(client, lambda *_: None).__anext__())
            await asyncio.sleep(0.05)
            released_at = tape.clock()
            await pieces.aclose()
            await waiting
    assert first.sent_at < released_at <= second.sent_at
    records = [json.loads(line) for line in (tmp_path / "times.requests.jsonl").read_text().splitlines()]
    assert records[0]["sent_t"] == first.sent_at
