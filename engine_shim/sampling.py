"""Chooses tokens from logits: greedy, or temperature and top-p with a draw that only the request names.

The random number of a request's n-th token is a hash of its seed and n. It does not depend on which requests
share the batch, on the device, or on whether the request was preempted and run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from engine_shim.types import Chunk


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row of logits becomes a token. ``uniform`` in [0, 1) picks from the kept distribution."""

    temperature: float
    top_p: float
    uniform: float

    @classmethod
    def of(cls, chunk: Chunk) -> Draw:
        """The draw of a chunk; a request without a seed is seeded by its id."""
        sampling = chunk.request.sampling
        if sampling.temperature == 0.0:
            return cls(temperature=0.0, top_p=1.0, uniform=0.0)
        seed = f"id {chunk.request.id}" if sampling.seed is None else f"seed {sampling.seed}"
        return cls(sampling.temperature, sampling.top_p, uniform(seed, chunk.draws))


def uniform(seed: str, draws: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments alone."""
    digest = blake2b(f"{seed} draw {draws}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token for each row of ``logits`` ``[rows, vocab]``. Temperature 0 is greedy, ties go to the lowest id."""
    chosen = logits.argmax(dim=-1)
    rows = [row for row, draw in enumerate(draws) if draw.temperature > 0.0]
    if rows:
        chosen[rows] = _sample_top_p(logits[rows], [draws[row] for row in rows])
    tokens: list[int] = chosen.tolist()
    return tokens


def _sample_top_p(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities reach top-p, then invert their distribution."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    scaled = logits.double() / column([draw.temperature for draw in draws])
    likeliest, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    cumulative = likeliest.cumsum(dim=-1)
    kept = cumulative - likeliest < column([draw.top_p for draw in draws])
    kept[:, 0] = True
    mass = (likeliest * kept).sum(dim=-1, keepdim=True)
    target = column([draw.uniform for draw in draws]) * mass
    # Rounding may leave the target at the very end: the last kept token is the answer then.
    index = torch.minimum((cumulative <= target).sum(dim=-1, keepdim=True), kept.sum(dim=-1, keepdim=True) - 1)
    return order.gather(-1, index).squeeze(-1)
