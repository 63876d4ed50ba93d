"""Asking workers for token ids: what is asked, and how little a worker that fails delays."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable

import httpx
import pytest
from prometheus_client import CollectorRegistry

from router.core.types import Engine, RankId, RankStatus
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.proxy import worker_tokens
from router.proxy.brain import RouterBrain
from router.proxy.worker_tokens import RETRY_SECONDS, USUAL_BYTES, WorkerTokenizer
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.openai import Endpoint, InferenceRequest, parse_request

#: The longest prompt that a rank takes.
MOST = 1000

Handler = Callable[[httpx.Request], httpx.Response]


class Worker:
    """A worker behind no socket; ``asked`` are the bodies of its calls."""

    def __init__(self, answer: Handler) -> None:
        self.now = 0.0
        self.asked: list[dict[str, object]] = []
        self.paths: list[str] = []

        def handle(request: httpx.Request) -> httpx.Response:
            self.asked.append(json.loads(request.content))
            self.paths.append(str(request.url))
            return answer(request)

        self.tokenizer = WorkerTokenizer(
            httpx.AsyncClient(transport=httpx.MockTransport(handle)),
            url_of=lambda model: "http://w:1/base" if model == "m" else None,
            clock=lambda: self.now,
            timeout_seconds=30.0,
        )


def chat(**fields: object) -> InferenceRequest:
    body = {"model": "alias", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_request(Endpoint.CHAT, json.dumps(body).encode())


def answers(status: int, body: object) -> Handler:
    return lambda _: httpx.Response(status, json=body)


async def test_what_decides_a_prompt_is_asked_and_nothing_else() -> None:
    """A chat by its messages, tools and arguments, under the worker's own name of the model; a text by itself."""
    worker = Worker(answers(200, {"count": 3, "tokens": [1, 2, 3], "max_model_len": 9}))
    tools = [{"type": "function", "function": {"name": "f"}}]

    ids = await worker.tokenizer.tokens(chat(tools=tools, temperature=0.5, user="alice"), model="m", most_tokens=MOST)
    assert ids == array("I", [1, 2, 3])
    text = parse_request(Endpoint.COMPLETIONS, b'{"model": "alias", "prompt": ["abc"]}')
    await worker.tokenizer.tokens(text, model="m", most_tokens=MOST)

    assert worker.asked == [
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools},
        {"model": "m", "prompt": "abc"},
    ]
    assert set(worker.paths) == {"http://w:1/base/tokenize"}


@pytest.mark.parametrize(
    "answer",
    [
        answers(500, {}),
        answers(404, {"detail": "Not Found"}),
        answers(200, {"ids": [1]}),
        answers(200, {"tokens": [-1]}),
        answers(401, {"error": {}}),
        answers(302, {}),
        lambda _: httpx.Response(200, content=b"no json"),
        lambda _: httpx.Response(200, content=b'{"tokens": [1], "more": ' + b"[" * 50_000),
    ],
)
async def test_a_worker_that_cannot_is_left_in_peace_for_a_while(answer: Handler) -> None:
    """One call, then none until the time is over."""
    worker = Worker(answer)
    for _ in range(5):
        assert await worker.tokenizer.tokens(chat(), model="m", most_tokens=MOST) is None
    assert len(worker.asked) == 1
    worker.now = RETRY_SECONDS
    await worker.tokenizer.tokens(chat(), model="m", most_tokens=MOST)
    assert len(worker.asked) == 2


@pytest.mark.parametrize(
    "answer",
    [
        answers(400, {"error": {}}),
        answers(413, {}),
        answers(200, {"tokens": []}),
        answers(200, {"tokens": list(range(100_000, 100_000 + 20 * MOST))}),
    ],
)
async def test_what_is_about_one_request_silences_nobody(answer: Handler) -> None:
    """A refusal, an empty prompt, more than fits: the next is asked again."""
    worker = Worker(answer)
    for _ in range(3):
        assert await worker.tokenizer.tokens(chat(), model="m", most_tokens=MOST) is None
    assert len(worker.asked) == 3


async def test_a_model_nobody_serves_is_not_asked_about() -> None:
    """Nor is a prompt that is none."""
    worker = Worker(answers(200, {"tokens": [1]}))
    assert await worker.tokenizer.tokens(chat(), model="other", most_tokens=MOST) is None
    ids = parse_request(Endpoint.COMPLETIONS, b'{"model": "m", "prompt": ["a", "b"]}')
    assert await worker.tokenizer.tokens(ids, model="m", most_tokens=MOST) is None
    assert worker.asked == []


async def test_what_can_hardly_fit_is_not_asked_about() -> None:
    """Nor what cannot be written again: the worker's time goes by the longest prompt, not by the body."""
    worker = Worker(answers(200, {"tokens": [1]}))
    long = parse_request(Endpoint.COMPLETIONS, b'{"model": "m", "prompt": "' + b"x" * (USUAL_BYTES * MOST) + b'"}')
    assert await worker.tokenizer.tokens(long, model="m", most_tokens=MOST) is None
    assert worker.asked == []
    assert await worker.tokenizer.tokens(long, model="m", most_tokens=2 * MOST) is not None


async def test_calls_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond are answered at once, with nothing."""
    monkeypatch.setattr(worker_tokens, "MAX_CALLS", 2)
    gate = asyncio.Event()
    calls = 0

    async def slow(_: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        await gate.wait()
        return httpx.Response(200, json={"tokens": [7]})

    tokenizer = WorkerTokenizer(
        httpx.AsyncClient(transport=httpx.MockTransport(slow)),
        url_of=lambda _: "http://w",
        clock=lambda: 0.0,
        timeout_seconds=30.0,
    )
    waiting = [asyncio.ensure_future(tokenizer.tokens(chat(), model="m", most_tokens=MOST)) for _ in range(2)]
    await asyncio.sleep(0)
    assert await tokenizer.tokens(chat(), model="m", most_tokens=MOST) is None
    gate.set()
    assert await asyncio.gather(*waiting) == [array("I", [7])] * 2
    assert calls == 2


async def test_prompts_that_a_worker_tokenized_are_keyed_exactly_and_counted_apart() -> None:
    """The brain's keys are those of the worker's ids."""
    metrics = Metrics(CollectorRegistry())
    fleet = Fleet(RoutingSettings(), metrics, clock=lambda: 0.0)
    target = Target("w", 1, 0, 1, Engine.VLLM)
    fleet.set_status(
        fleet.add_rank(RankId("w", 0), target=target, models=frozenset({"m"}), block_tokens=2, pool_tokens=None),
        RankStatus.READY,
    )
    brain = RouterBrain(fleet, settings=RoutingSettings(), metrics=metrics)
    brain.ask_workers(Worker(answers(200, {"tokens": [5, 6, 7]})).tokenizer)
    request = parse_request(Endpoint.CHAT, b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')

    prepared = await brain.prepare(request, {}, tenant="t")
    assert list(prepared.keys(2)) == block_keys([5, 6, 7], block_tokens=2, parent=namespace_seed("", ""))
    assert metrics.registry.get_sample_value("homing_prompts_total", {"keyed": "worker"}) == 1
    assert fleet.url_of("m") == "http://w:1"
