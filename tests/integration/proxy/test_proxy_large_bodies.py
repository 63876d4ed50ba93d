"""Bodies that take long to decode are read beside the loop, and are otherwise requests like any others."""

from __future__ import annotations

import json
import threading

import pytest

from router.wire import openai
from router.wire.openai import Endpoint, InferenceRequest, parse_request
from tests.fakes.fault_worker import FaultWorker
from tests.fakes.proxy_rig import rig, target


@pytest.mark.parametrize(
    ("messages", "beside"), [([{"role": "user", "content": "x"}] * 50_000, True), ([{"role": "user"}], False)]
)
async def test_a_large_body_is_read_beside_the_loop(
    messages: list[object], beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives byte for byte."""
    threads: list[threading.Thread] = []

    def spied(endpoint: Endpoint, body: bytes) -> InferenceRequest:
        threads.append(threading.current_thread())
        return parse_request(endpoint, body)

    monkeypatch.setattr(openai, "parse_request", spied)
    body = json.dumps({"model": "m", "messages": messages}).encode()
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        answer = await it.ask(body)
        assert answer.status == 200
        assert worker.requests[0].body == body
    assert [thread is not threading.current_thread() for thread in threads] == [beside]


async def test_a_large_body_that_is_no_json_is_refused() -> None:
    """As a small one is."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        answer = await it.ask(b'{"model": "m", "messages": [' + b"{}," * 500_000)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_json")
        assert worker.requests == []
