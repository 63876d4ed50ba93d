"""The self-check against a worker that answers as it is told: every result has its sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from router.core.types import Engine, Handover, Part, WorkerRole
from router.fleet.parity import Checker, Parity, Standing
from router.fleet.worker_api import WorkerInfo
from router.wire.kv_events import EventSource

TOKENS = list(range(70))
SOURCE = EventSource(rank=0, endpoint="tcp://127.0.0.1:1")


def info(*, source: EventSource | None = SOURCE, engine: Engine = Engine.VLLM, dp_size: int = 1) -> WorkerInfo:
    return WorkerInfo(
        name="w",
        url="http://w",
        engine=engine,
        models=("m",),
        max_context_tokens=None,
        dp_size=dp_size,
        sources=(source,) * dp_size,
        block_tokens=16,
        pool_tokens=None,
        identity=None,
    )


async def check(
    answers: Callable[[int], httpx.Response],
    *,
    encode: Callable[[str, bytes], Sequence[int] | None] = lambda _model, _body: TOKENS,
    promised: int = 64,
    worker: WorkerInfo | None = None,
    rank: int = 0,
) -> tuple[Parity, list[httpx.Request]]:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answers(len(seen))

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        checker = Checker(client, encode, lambda _slot, _tokens: promised, wait_seconds=0.0)
        return await checker.check(worker or info(), rank, 0, nonce="n"), seen


def usage(prompt_tokens: int, details: dict[str, Any] | None) -> httpx.Response:
    return httpx.Response(200, json={"usage": {"prompt_tokens": prompt_tokens, "prompt_tokens_details": details}})


def cached(first: int, second: int) -> Callable[[int], httpx.Response]:
    return lambda number: usage(70, {"cached_tokens": first if number == 1 else second})


async def test_agreement_passes() -> None:
    """The same prompt twice: counted alike, promised by events, reused as promised."""
    found, seen = await check(cached(0, 64))

    assert found == Parity(Standing.PASSED)
    assert [json.loads(request.content)["max_tokens"] for request in seen] == [1, 1]
    assert seen[0].content == seen[1].content


@pytest.mark.parametrize(
    ("answers", "promised", "sentence"),
    [
        (lambda _: usage(75, {"cached_tokens": 0}), 64, "counts 75 tokens in the probe chat and the router 70"),
        (lambda _: usage(70, None), 64, "--enable-prompt-tokens-details"),
        (cached(0, 0), 64, "reused nothing"),
        (cached(0, 64), 0, "no cache event brought the blocks"),
        (cached(0, 48), 64, "reused 48 tokens of a prompt sent twice, where its events promise 64"),
    ],
)
async def test_a_failure_says_what_is_wrong(
    answers: Callable[[int], httpx.Response], promised: int, sentence: str
) -> None:
    """Template, reporting, prefix cache, events, rules: each has a sentence with its remedy or its numbers."""
    found, _ = await check(answers, promised=promised)

    assert found.standing is Standing.FAILED
    assert sentence in found.sentence


async def test_a_rank_without_events_is_not_bothered() -> None:
    """Its answer is known."""
    found, seen = await check(cached(0, 64), worker=info(source=None))

    assert (found.standing, seen) == (Standing.FAILED, [])
    assert "--kv-events-config" in found.sentence


@pytest.mark.parametrize("status", [404, 503])
async def test_a_worker_that_does_not_answer_is_not_checked(status: int) -> None:
    """No chat endpoint, or no room: nothing is held against it."""
    found, _ = await check(lambda _: httpx.Response(status))

    assert found.standing is Standing.UNCHECKED


async def test_half_of_a_pair_is_not_asked() -> None:
    """SGLang's prefill and decode workers refuse what is sent to one of them."""
    half = replace(info(engine=Engine.SGLANG), part=Part(WorkerRole.DECODE, Handover.BOOTSTRAP, False))
    found, seen = await check(cached(0, 64), worker=half)

    assert (found.standing, seen) == (Standing.UNCHECKED, [])
    assert "in pairs" in found.sentence


async def test_without_a_tokenizer_nothing_can_be_compared() -> None:
    """And nothing is sent."""
    found, seen = await check(cached(0, 64), encode=lambda _model, _body: None)

    assert (found.standing, seen) == (Standing.UNCHECKED, [])


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG])
async def test_each_engine_is_told_the_rank_in_its_own_way(engine: Engine) -> None:
    """vLLM by a header, SGLang by a field."""
    _, seen = await check(cached(0, 64), worker=info(engine=engine, dp_size=2), rank=1)

    by_header = [request.headers.get("x-data-parallel-rank") for request in seen]
    by_field = [json.loads(request.content).get("routed_dp_rank") for request in seen]
    assert (by_header, by_field) == ((["1"] * 2, [None] * 2) if engine is Engine.VLLM else ([None] * 2, [1] * 2))
