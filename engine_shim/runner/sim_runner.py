"""A timing model in place of the forward pass: a fleet of ranks on a laptop. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine_shim.types import Batch, Chunk, Request, Sampled


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


@dataclass(frozen=True, slots=True)
class AnswerLength:
    """How long answers are that nothing else ends: ``mean_tokens``, give or take half, then ``eos_token_id``.

    The length is a hash of the prompt's length and of the answer's first token, which is one of the whole prompt: equal
    requests end alike, and nothing has to be remembered.
    """

    mean_tokens: int
    eos_token_id: int

    def __post_init__(self) -> None:
        if self.mean_tokens < 1:
            raise ValueError("mean_tokens must be positive")

    def tokens(self, request: Request) -> int:
        """Tokens before the end, for a request that has its first."""
        prompt_tokens = len(request.prompt)
        half = self.mean_tokens // 2
        return self.mean_tokens - half + _hash(f"{prompt_tokens} {request.tokens[prompt_tokens]}") % (2 * half + 1)


class SimRunner:
    """Sleeps a step's modelled time and answers with tokens that follow from the request alone.

    The first token is a hash of the prompt, each other one of the token before it and its position, so a preempted
    request continues as if nothing had happened. Tokens are taken from ``token_ids``. Without ``answer_length`` an
    answer goes on until a limit of the request or of the engine ends it.
    """

    def __init__(
        self,
        times: StepTimes,
        *,
        token_ids: Sequence[int],
        answer_length: AnswerLength | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not token_ids:
            raise ValueError("token_ids is empty: there is nothing to answer with")
        self.times = times
        self._token_ids = tuple(token_ids)
        self._answer_length = answer_length
        self._sleep = sleep

    def run(self, batch: Batch) -> list[Sampled]:
        """Sleep, then one token for each chunk that samples."""
        self._sleep(self.times.seconds(batch))
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        return [Sampled((self._token(chunk.request, chunk.start + chunk.count),)) for chunk in sampling]

    def _token(self, request: Request, position: int) -> int:
        """The token at ``position``, of which all before are known."""
        output_tokens = position - len(request.prompt)
        length = None if request.sampling.ignore_eos else self._answer_length
        if length is not None and output_tokens and output_tokens == length.tokens(request):
            return length.eos_token_id
        seed = f"{request.tokens[position - 1]} {position}" if output_tokens else repr(request.prompt)
        return self._token_ids[_hash(seed) % len(self._token_ids)]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _is_decode(chunk: Chunk) -> bool:
    return chunk.count == 1 and chunk.start >= len(chunk.request.prompt)
