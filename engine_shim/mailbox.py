"""Where the new tokens of an HTTP request wait to be read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from engine_shim.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Delta:
    """What came for one prompt of an HTTP request since the mailbox was last emptied."""

    index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()


class Mailbox:
    """Where an HTTP request's new tokens wait for it. Lives in the event loop.

    Steps that come faster than the reader are merged, so a slow reader costs memory for tokens, not for messages.
    """

    def __init__(self, prompts: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(prompts)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(prompts)]
        self._finishes: list[FinishReason | None] = [None] * prompts
        self._news: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._closed = False

    def put(
        self,
        index: int,
        tokens: Sequence[int],
        finish: FinishReason | None,
        *,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """Add what one step made for one prompt."""
        self._tokens[index] += tokens
        self._logprobs[index] += logprobs
        if finish is not None:
            self._finishes[index] = finish
        self._news[index] = None
        self._wake.set()

    def close(self) -> None:
        """Nobody reads any more; a pending ``take`` returns nothing."""
        self._closed = True
        self._wake.set()

    async def take(self) -> list[Delta]:
        """Wait for news and return it, one delta per prompt that has some; empty once closed."""
        if not self._news and not self._closed:
            self._wake.clear()
            await self._wake.wait()
        if self._closed:
            return []
        deltas = []
        for index in self._news:
            tokens, logprobs = self._tokens[index], self._logprobs[index]
            deltas.append(Delta(index, tuple(tokens), self._finishes[index], tuple(logprobs)))
            tokens.clear()
            logprobs.clear()
        self._news.clear()
        return deltas
