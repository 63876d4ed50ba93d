"""A small scripted load for recording: conversations with a common head, and the moments that mislead a router.

Twins sent at once, answers cut off, another last message to the same history, salts and extra keys, fillers that evict,
caches emptied while idle and while busy. Prompts are token ids, so that nothing depends on a template.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from router.capture.absence import Absence
from router.capture.record import Exchange, Tape
from router.core.types import Engine
from router.errors import WorkerError
from router.fleet.asking import ask, read_object
from router.fleet.probes import sentence
from router.fleet.worker_api import WorkerInfo

_WORDS = (
    "return self import value class index default string number method result object module argument function error "
    "message encoding buffer line start count data name type path file list open find test update rename write read"
)


@dataclass(frozen=True, slots=True)
class Script:
    """How much of everything. Lengths are in tokens. A worker that is away for longer than the patience is dead."""

    sessions: int = 6
    turns: int = 5
    concurrency: int = 3
    system_tokens: int = 200
    turn_tokens: int = 40
    output_tokens: int = 40
    aborts: float = 0.1
    salts: float = 0.15
    seed: int = 1
    patience_seconds: float = 300.0


async def drive(
    info: WorkerInfo, tape: Tape, client: httpx.AsyncClient, script: Script, *, say: Callable[[str], None]
) -> None:
    """Run the whole script against a worker, recording; ``say`` what it waits for. Raises ``WorkerError`` if the worker
    cannot tokenize, and a group of these if it goes away and does not come back.
    """
    driver = _Driver(info, tape, client, script, await _vocabulary(info, client), say)
    await driver.conversations("talk")
    await driver.twins()
    await driver.fillers()
    await driver.reset()
    await driver.conversations("again")


class _Driver:
    def __init__(
        self,
        info: WorkerInfo,
        tape: Tape,
        client: httpx.AsyncClient,
        script: Script,
        words: list[int],
        say: Callable[[str], None],
    ) -> None:
        self._info = info
        self._tape = tape
        self._client = client
        self._script = script
        self._words = words
        self._absence = Absence(info.url, client, patience_seconds=script.patience_seconds, say=say)
        self._rng = random.Random(script.seed)
        self._limit = asyncio.Semaphore(script.concurrency)
        self._context_tokens = info.max_context_tokens or 1024

    def _draw(self, tokens: int) -> list[int]:
        return self._rng.choices(self._words, k=tokens)

    async def conversations(self, name: str) -> None:
        """Sessions side by side; one in three has a head of its own, the others share theirs."""
        script, head = self._script, self._draw(self._script.system_tokens)
        self._tape.note("phase", name=name)
        await _all(
            self._conversation(f"{name} {number}", number, head if number % 3 else self._draw(script.system_tokens))
            for number in range(script.sessions)
        )

    async def _conversation(self, tag: str, number: int, history: list[int]) -> None:
        script, rng = self._script, self._rng
        fields = self._namespace(number) if rng.random() < script.salts else {}
        rank = number % self._info.dp_size
        for turn in range(script.turns):
            history = history + self._draw(rng.randint(script.turn_tokens // 2, script.turn_tokens * 2))
            if len(history) + script.output_tokens >= self._context_tokens:
                return
            kind = "abort" if rng.random() < script.aborts else "turn"
            async with self._limit:
                output = await self.ask(
                    f"{tag} {kind} {turn}", history, rank=rank, fields=fields, is_cut=kind == "abort"
                )
            if turn == script.turns // 2:  # the same history, but for its last words
                async with self._limit:
                    other = history[: -script.turn_tokens // 2] + self._draw(script.turn_tokens // 2)
                    await self.ask(f"{tag} other {turn}", other, rank=rank, fields=fields)
            history = history + output
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.1)))

    def _namespace(self, number: int) -> Mapping[str, object]:
        name = "extra_key" if self._info.engine is Engine.SGLANG and number % 2 else "cache_salt"
        return {name: f"tenant-{number % 2}"}

    async def twins(self) -> None:
        """Identical prompts at once, then the same again."""
        self._tape.note("phase", name="twins")
        for burst in (2, 5):
            prompt = self._draw(self._script.system_tokens)
            await _all(self.ask(f"twin {burst}", prompt, rank=0) for _ in range(burst))
            await self.ask(f"twin {burst} after", [*prompt, *self._draw(3)], rank=0)

    async def fillers(self) -> None:
        """Long prompts that nobody asks again: they evict."""
        self._tape.note("phase", name="fillers")
        for number in range(4):
            tokens = self._context_tokens // 2 - self._script.output_tokens
            await self.ask(f"filler {number}", self._draw(tokens), rank=number % self._info.dp_size)

    async def reset(self) -> None:
        """Empty the cache: once idle, once while a long answer is under way (which engines refuse)."""
        self._tape.note("phase", name="reset")
        path = "/flush_cache" if self._info.engine is Engine.SGLANG else "/reset_prefix_cache"
        prompt = self._draw(self._script.system_tokens)
        for tag in ("before reset", "after reset"):
            await self.ask(tag, prompt, rank=0)
            if tag == "before reset":
                await asyncio.sleep(0.2)
                await self._post(path)
        long = asyncio.ensure_future(self.ask("long", prompt, rank=0, output_tokens=self._script.output_tokens * 4))
        await asyncio.sleep(0.1)
        await self._post(path)
        await long

    async def _post(self, path: str) -> None:
        exchange = Exchange(self._tape, self._info, path, {}, b"")
        with contextlib.suppress(httpx.HTTPError):  # the next request waits for it
            async for _ in exchange.run(self._client, lambda *_: None):
                pass

    async def ask(
        self,
        tag: str,
        prompt: list[int],
        *,
        rank: int,
        fields: Mapping[str, object] = {},
        output_tokens: int = 0,
        is_cut: bool = False,
    ) -> list[int]:
        """One request; the ids of its answer. While the worker is away, wait for it."""
        path, body, headers = self._request(
            prompt, rank=rank, output_tokens=output_tokens or self._script.output_tokens
        )
        exchange = Exchange(self._tape, self._info, path, headers, json.dumps({**body, **fields}).encode(), tag=tag)
        pieces = exchange.run(self._client, lambda *_: None)
        try:
            async with contextlib.aclosing(pieces):
                count = 0
                async for _ in pieces:
                    count += 1
                    if is_cut and count > self._script.output_tokens // 4:
                        break
        except httpx.HTTPError:
            await self._absence.until_back()
        return exchange.output

    def _request(
        self, prompt: list[int], *, rank: int, output_tokens: int
    ) -> tuple[str, dict[str, Any], dict[str, str]]:
        headers = {"content-type": "application/json"}
        if self._info.engine is Engine.SGLANG:
            sampling = {"max_new_tokens": output_tokens, "temperature": 1.0, "ignore_eos": True}
            body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
            return "/generate", body | ({"routed_dp_rank": rank} if self._info.dp_size > 1 else {}), headers
        if self._info.dp_size > 1:
            headers["x-data-parallel-rank"] = str(rank)
        body = {
            "model": self._info.models[0],
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
        }
        return "/v1/completions", body, headers


async def _all(waiting: Iterable[Coroutine[Any, Any, object]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for each in waiting:
            tasks.create_task(each)


async def _vocabulary(info: WorkerInfo, client: httpx.AsyncClient) -> list[int]:
    body = {"model": info.models[0], "prompt": _WORDS}
    try:
        answer = await ask(client, info.url + "/tokenize", method="POST", body=body)
    except httpx.HTTPError as error:
        raise WorkerError(f"no prompt can be made: {sentence(info.url + '/tokenize', error)}") from error
    try:
        tokens = read_object(answer.body).get("tokens") if answer.is_ok else None
    except ValueError:
        tokens = None
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise WorkerError(f"no prompt can be made: {info.url}/tokenize answered {answer.status}, without tokens")
    return tokens
