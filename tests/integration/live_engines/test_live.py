"""The router before a real engine: what it expects to be cached is what the engine reports.

Off by default. Start vLLM or SGLang as ``docs/engines.md`` says, then:

    HOMING_LIVE_ENGINE=http://127.0.0.1:8000 HOMING_LIVE_TOKENIZER=/models/my-model \\
        pytest tests/integration/live_engines
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.control.test_router_process import router, until, workers

ENGINE = os.environ.get("HOMING_LIVE_ENGINE", "")
TOKENIZER = os.environ.get("HOMING_LIVE_TOKENIZER", "")
pytestmark = pytest.mark.skipif(not (ENGINE and TOKENIZER), reason="set HOMING_LIVE_ENGINE and HOMING_LIVE_TOKENIZER")

SESSIONS, TURNS = 4, 6
#: A model of random weights answers with text that tokenizes to other ids than it made. Only events tell which of its
#: blocks the next turn has in common, and SGLang sends those of a finished answer a moment later.
THINK_SECONDS = 0.3
SYSTEM = (
    "You are a careful coding agent. Read files before you change them, keep each change small, run the tests after "
    "every edit and explain the result in one short paragraph. Never import a module that is not installed. "
) * 3
ASKS = (
    "open the file number {0} and find the function that returns the default value",
    "now add an argument called limit to the class {0} and update the tests",
    "the test for session {0} fails with a type error in the second line, please fix it",
)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, httpx.Client, httpx.Client]]:
    """The model's name, and a router before the engine that has passed its self-check."""
    model = httpx.get(ENGINE + "/v1/models").json()["data"][0]["id"]
    with router("--worker", ENGINE, "--model-tokenizer", f"{model}={TOKENIZER}") as (_, data, admin):
        until(lambda: data.get("/readyz").status_code == 200)
        until(lambda: bool(workers(admin)[0]["parity"]), seconds=30)
        yield model, data, admin


def test_the_self_check_passes(served: tuple[str, httpx.Client, httpx.Client]) -> None:
    """Tokenizer, template, block size and event stream agree on every rank."""
    _, _, admin = served
    until(lambda: len(workers(admin)[0]["parity"]) == len(workers(admin)[0]["ranks"]), seconds=60)
    assert [(rank["standing"], rank["sentence"]) for rank in workers(admin)[0]["parity"]] == [
        ("passed", None) for _ in workers(admin)[0]["ranks"]
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_many_turns_are_predicted(served: tuple[str, httpx.Client, httpx.Client], *, is_streamed: bool) -> None:
    """At least 95 of 100 turns of sessions side by side reuse exactly what their response header promised."""
    model, data, _ = served

    def session(number: int) -> list[tuple[int, int]]:
        rng = random.Random(number)
        messages = [{"role": "system", "content": f"{is_streamed} {SYSTEM}"}]
        pairs = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": ASKS[turn % 3].format(rng.randrange(1000))})
            body = {"model": model, "messages": messages, "max_tokens": 40, "stream": is_streamed}
            expected, actual, content = chat(data, body, f"live-{is_streamed}-{number}")
            messages.append({"role": "assistant", "content": content})
            pairs.append((expected, actual))
            time.sleep(THINK_SECONDS)
        return pairs

    with ThreadPoolExecutor(SESSIONS) as pool:
        pairs = [pair for found in pool.map(session, range(SESSIONS)) for pair in found]
    exact = sum(expected == actual for expected, actual in pairs)
    assert any(actual for _, actual in pairs), pairs
    assert exact >= 0.95 * len(pairs), pairs


def chat(data: httpx.Client, body: dict[str, Any], session: str) -> tuple[int, int, str]:
    """Tokens promised, tokens reused, and the answer's text."""
    if body["stream"]:
        body = body | {"stream_options": {"include_usage": True}}
    answer = data.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    expected = int(answer.headers["x-homing-expected-cached-tokens"])
    if body["stream"]:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        parts = [json.loads(line) for line in lines]
        content = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])
        usage = next(part["usage"] for part in reversed(parts) if part.get("usage"))
    else:
        content = answer.json()["choices"][0]["message"]["content"]
        usage = answer.json()["usage"]
    return expected, (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0, content
