"""Does a worker see what the router sees? A self-check when it registers, before drift shows in traffic.

A small chat is sent twice to each rank. From the first, a cache event must come that puts the prompt's blocks where the
router's own tokens look for them: that holds only if tokenizer, template and block size agree. The second must reuse
exactly as much as the index then promises. Two prompts of one token's answer: no burden to a busy worker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from router.core.types import Engine
from router.errors import WorkerError
from router.fleet.asking import ask, read_number, read_object
from router.fleet.probes import sentence
from router.fleet.worker_api import WorkerInfo

#: The prompt's token ids as the router has them, of a chat request's body; None without tokenizer or template.
Encode = Callable[[str, bytes], Sequence[int] | None]
#: What the index promises of a prompt on a slot.
Promised = Callable[[int, Sequence[int]], int]

_PROBE = "This is a self-check of the router in front of you; the number makes it a prompt of its own: {nonce}. "
_PROBE_BLOCKS = 3
_EVENT_SECONDS = 3.0
_POLL_SECONDS = 0.05


class Standing(StrEnum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    UNCHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Parity:
    """One rank's result; ``sentence`` says what is wrong, or why nothing could be said."""

    standing: Standing
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Checker:
    """What a check needs of the router. ``wait_seconds`` is how late a first event may be."""

    client: httpx.AsyncClient
    encode: Encode
    promised: Promised
    wait_seconds: float = _EVENT_SECONDS

    async def check(self, info: WorkerInfo, rank: int, slot: int, *, nonce: str) -> Parity:
        """Check one rank. Whatever the worker answers, this says something, and raises nothing."""
        try:
            return await self._check(info, rank, slot, nonce=nonce)
        except Exception as error:  # noqa: BLE001 - the boundary: a check that fails must not cost the worker
            return Parity(Standing.UNCHECKED, f"the router failed at the check: {error!r:.200}")

    async def _check(self, info: WorkerInfo, rank: int, slot: int, *, nonce: str) -> Parity:
        if not info.part.is_self_sufficient:
            return Parity(Standing.UNCHECKED, "the worker answers in pairs only, prefill and decode together")
        model = info.models[0]
        body = _chat(model, nonce, tokens=_PROBE_BLOCKS * (info.block_tokens or 64))
        tokens = self.encode(model, json.dumps(body).encode())
        if tokens is None:
            return Parity(
                Standing.UNCHECKED,
                "the router has no tokenizer or chat template of the model: its chats are keyed by their text",
            )
        if info.sources[rank] is None:
            return Parity(Standing.FAILED, "the rank publishes no cache events: start it with --kv-events-config")
        try:
            first = await self._ask(info, rank, body)
            if (wrong := _differs(first, tokens)) is not None:
                return wrong
            promised = await self._until_promised(slot, tokens)
            second = await self._ask(info, rank, body)
        except WorkerError as error:
            return Parity(Standing.UNCHECKED, f"the worker did not answer the probe chat: {error}")
        return _judge(second.get("prompt_tokens_details"), promised=promised)

    async def _ask(self, info: WorkerInfo, rank: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The ``usage`` of the answer. Raises ``WorkerError``."""
        headers = {}
        if info.dp_size > 1 and info.engine is Engine.SGLANG:
            body = {**body, "routed_dp_rank": rank}
        elif info.dp_size > 1:
            headers["x-data-parallel-rank"] = str(rank)
        url = info.url + "/v1/chat/completions"
        try:
            answer = await ask(self.client, url, method="POST", body=body, headers=headers)
        except httpx.HTTPError as error:
            raise WorkerError(sentence(url, error)) from error
        if not answer.is_ok:
            raise WorkerError(f"{url} answered {answer.status}")
        try:
            usage = read_object(answer.body).get("usage")
        except ValueError as error:
            raise WorkerError(f"{url} {error}") from error
        if not isinstance(usage, dict):
            raise WorkerError(f"{url} answered without usage")
        return usage

    async def _until_promised(self, slot: int, tokens: Sequence[int]) -> int:
        """What the index promises once the first prompt's events are in; 0 if they do not come."""
        waited = 0.0
        while not (promised := self.promised(slot, tokens)) and waited < self.wait_seconds:
            await asyncio.sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
        return promised


def _chat(model: str, nonce: str, *, tokens: int) -> dict[str, Any]:
    """A chat of at least so many tokens: the nonce comes first, so that nobody else's prompt shares its head."""
    text = f"{nonce} " + _PROBE.format(nonce=nonce)
    content = text + "again " * max(0, tokens - len(text) // 8)
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "temperature": 0,
    }


def _differs(usage: Mapping[str, Any], tokens: Sequence[int]) -> Parity | None:
    counted = read_number(usage.get("prompt_tokens"))
    if counted == len(tokens):
        return None
    if counted is None:
        return Parity(Standing.UNCHECKED, "the worker does not say how many tokens the probe chat has")
    return Parity(
        Standing.FAILED,
        f"the worker counts {counted} tokens in the probe chat and the router {len(tokens)}: "
        "its tokenizer or chat template is another one; give the model's own with --model-tokenizer NAME=PATH",
    )


def _judge(details: object, *, promised: int) -> Parity:
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    if cached is None:
        return Parity(
            Standing.FAILED,
            "the worker does not report cached tokens: start vLLM with --enable-prompt-tokens-details, "
            "SGLang with --enable-cache-report",
        )
    if cached != 0 and (cached := read_number(cached)) is None:
        return Parity(Standing.FAILED, "the worker reports cached tokens, but not as a number")
    if promised == cached and promised:
        return Parity(Standing.PASSED)
    if not cached:
        return Parity(Standing.FAILED, "the same prompt sent twice reused nothing: is its prefix cache switched off?")
    if not promised:
        return Parity(
            Standing.FAILED,
            f"the worker reused {cached} tokens of a prompt sent twice, but no cache event brought the blocks that the "
            "router's tokens make: its events do not arrive, or its tokenizer, template or block size is another one",
        )
    return Parity(
        Standing.FAILED,
        f"the worker reused {cached} tokens of a prompt sent twice, where its events promise {promised}",
    )
