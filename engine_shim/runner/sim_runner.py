"""A timing model in place of the forward pass: a fleet of ranks on a laptop. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine_shim.types import Batch, Chunk, Request


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step costs, in seconds: a sum of the parts that occur in it.

    ``attention_seconds_per_pair`` charges each pair of a prefilled token and a token before it.
    """

    prefill_tokens_per_second: float
    decode_step_seconds: float
    decode_sequence_seconds: float = 0.0
    attention_seconds_per_pair: float = 0.0

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_second <= 0:
            raise ValueError("prefill_tokens_per_second must be positive")

    def seconds(self, batch: Batch) -> float:
        """The modelled time of one step. A chunk of one token after the prompt is a decode, all others prefill."""
        decodes = sum(_is_decode(chunk) for chunk in batch.chunks)
        prefills = [chunk for chunk in batch.chunks if not _is_decode(chunk)]
        pairs = sum(chunk.count * chunk.start + chunk.count * (chunk.count + 1) // 2 for chunk in prefills)
        return (
            sum(chunk.count for chunk in prefills) / self.prefill_tokens_per_second
            + pairs * self.attention_seconds_per_pair
            + (self.decode_step_seconds if decodes else 0.0)
            + decodes * self.decode_sequence_seconds
        )


class SimRunner:
    """Sleeps a step's modelled time and answers with tokens that follow from the request alone.

    The first token is a hash of the prompt, each other one of the token before it and its position, so a preempted
    request continues as if nothing had happened. Tokens are taken from ``token_ids``.
    """

    def __init__(
        self, times: StepTimes, *, token_ids: Sequence[int], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        if not token_ids:
            raise ValueError("token_ids is empty: there is nothing to answer with")
        self.times = times
        self._token_ids = tuple(token_ids)
        self._sleep = sleep

    def run(self, batch: Batch) -> list[int]:
        """Sleep, then one token for each chunk that samples."""
        self._sleep(self.times.seconds(batch))
        return [self._token(chunk.request, chunk.start + chunk.count) for chunk in batch.chunks if chunk.samples]

    def _token(self, request: Request, position: int) -> int:
        """The token at ``position``, of which all before are known."""
        first = position == len(request.prompt)
        seed = repr(request.prompt) if first else f"{request.tokens[position - 1]} {position}"
        digest = blake2b(seed.encode(), digest_size=8).digest()
        return self._token_ids[int.from_bytes(digest, "big") % len(self._token_ids)]


def _is_decode(chunk: Chunk) -> bool:
    return chunk.count == 1 and chunk.start >= len(chunk.request.prompt)
