"""Chooses tokens from logits: greedy, or at random with a draw that only the request names.

The random number of a request's n-th token is a hash of its seed and n. It does not depend on which requests
share the batch, on the device, or on whether the request was preempted and run again.

**Drafts.** Tokens that somebody proposes run through the model together with the last known one. At each place the
token is chosen as it would be without drafts, by the same number; drafts hold as long as they are what was chosen. A
draft with probability p so holds with probability p, which is the rejection rule for drafts that are proposed outright,
and the answer is the one that comes without drafts, at any temperature.

The order in which a request's wishes are applied is vLLM's: the grammar; here the logprobs that are told are read; then
bias, stop tokens held back, penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine_shim.placing import to_device, to_host
from engine_shim.types import Chunk, ConstraintError, Request, Sampled, TokenLogprob

#: What clients are told of a token that a grammar forbids; JSON has no infinity (OpenAI and vLLM say the same).
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row of logits becomes a token. ``uniform`` in [0, 1) picks from the kept distribution."""

    temperature: float
    top_p: float
    uniform: float
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, chunk: Chunk, *, place: int = 0) -> Draw:
        """The draw of a chunk, or ``place`` drafts behind it; a request without a seed is seeded by its id."""
        sampling = chunk.request.sampling
        if sampling.temperature == 0.0:
            return cls(temperature=0.0, top_p=1.0, uniform=0.0)
        seed = f"id {chunk.request.id}" if sampling.seed is None else f"seed {sampling.seed}"
        number = uniform(seed, chunk.draws + place)
        return cls(sampling.temperature, sampling.top_p, number, sampling.top_k, sampling.min_p)


def uniform(seed: str, draws: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments alone."""
    digest = blake2b(f"{seed} draw {draws}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """A token for each row of ``logits`` ``[rows, vocab]``. Temperature 0 is greedy, ties go to the lowest id."""
    chosen = logits.argmax(dim=-1)
    rows = [row for row, draw in enumerate(draws) if draw.temperature > 0.0]
    if rows:
        places = to_device(rows, logits.device)
        chosen[places] = _draw(logits[places], [draws[row] for row in rows])
    return chosen


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Keep the likeliest tokens that min-p, top-k and top-p leave, then invert their distribution."""

    def column(values: list[float]) -> Tensor:
        return to_device(values, logits.device, dtype=torch.float64)[:, None]

    scaled = logits.double() / column([draw.temperature for draw in draws])
    likeliest, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    if any(draw.min_p for draw in draws):
        likeliest = likeliest.where(likeliest >= likeliest[:, :1] * column([draw.min_p for draw in draws]), 0.0)
    if any(draw.top_k for draw in draws):
        ranks = torch.arange(likeliest.shape[1], device=logits.device)
        likeliest = likeliest.where(ranks < column([draw.top_k or likeliest.shape[1] for draw in draws]), 0.0)
    cumulative = likeliest.cumsum(dim=-1)
    # Of what is left top-p keeps the fewest that reach its share.
    kept = cumulative - likeliest < cumulative[:, -1:] * column([draw.top_p for draw in draws])
    kept &= likeliest > 0.0
    kept[:, 0] = True
    mass = (likeliest * kept).sum(dim=-1, keepdim=True)
    target = column([draw.uniform for draw in draws]) * mass
    # Rounding may leave the target at the very end: the last kept token is the answer then.
    index = torch.minimum((cumulative <= target).sum(dim=-1, keepdim=True), kept.sum(dim=-1, keepdim=True) - 1)
    return order.gather(-1, index).squeeze(-1)


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Of one chunk's rows: the chosen tokens' own ``[rows]``, and the likeliest with their ids, ``[rows, count]``."""

    own: Tensor
    values: Tensor
    ids: Tensor


class Choice:
    """The tokens of one step, on the device: ``tokens`` ``[rows]``, of each chunk its own and one for each draft.

    The copy to the host is under way from the beginning; ``sampled`` waits for it. ``logprobs`` and ``stuck`` (whose
    grammar cannot go on) go by the number of the chunk.
    """

    def __init__(
        self,
        tokens: Tensor,
        drafts: Sequence[tuple[int, ...]],
        *,
        logprobs: Mapping[int, _Logprobs] | None = None,
        stuck: frozenset[int] = frozenset(),
    ) -> None:
        self.tokens = tokens
        self._drafts = drafts
        self._stuck = stuck
        self._tokens = to_host(tokens)
        self._logprobs = {
            place: _Logprobs(to_host(each.own), to_host(each.values), to_host(each.ids))
            for place, each in (logprobs or {}).items()
        }
        self._copied = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def sampled(self) -> list[Sampled]:
        """What each chunk came to, in order."""
        if self._copied is not None:
            self._copied.synchronize()
        chosen: list[int] = self._tokens.tolist()
        if len(chosen) == len(self._drafts) and not (self._logprobs or self._stuck):
            return [Sampled((token,)) for token in chosen]
        results, row = [], 0
        for place, tried in enumerate(self._drafts):
            tokens = held(chosen[row : row + 1 + len(tried)], tried)
            row += 1 + len(tried)
            logprobs = _told(self._logprobs[place], len(tokens)) if place in self._logprobs else ()
            results.append(
                Sampled((), drafted=len(tried)) if place in self._stuck else Sampled(tokens, logprobs, len(tried))
            )
        return results


@dataclass(slots=True)
class _History:
    """How often a request's tokens have come, ``[vocab]`` each; ``known`` tokens have been counted."""

    prompt: Tensor
    output: Tensor
    known: int


@dataclass(slots=True)
class Sampler:
    """Chooses the tokens of a batch as its requests wish. ``stop_token_ids`` are those of the model.

    Remembers the counts of requests that ask for penalties, as long as they live.
    """

    stop_token_ids: frozenset[int] = frozenset()
    _histories: WeakKeyDictionary[Request, _History] = field(default_factory=WeakKeyDictionary)

    def __call__(self, logits: Tensor, chunks: Sequence[Chunk], drafts: Sequence[tuple[int, ...]]) -> Choice:
        """What each chunk comes to, without waiting for the device.

        A chunk's rows of ``logits``, which are overwritten, are one more than its drafts.
        """
        if not any(drafts) and all(_is_plain(chunk.request) for chunk in chunks):
            return Choice(logits.argmax(dim=-1), drafts)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        draws: list[Draw] = []
        told: dict[Request, Tensor] = {}
        stuck = _constrain(logits, chunks, drafts)
        for chunk, tried in zip(chunks, drafts, strict=True):
            rows = logits[len(draws) : len(draws) + 1 + len(tried)]
            if chunk.request.sampling.logprobs is not None:
                told[chunk.request] = rows.log_softmax(dim=-1)
            self._adjust(rows, chunk, tried)
            draws += [Draw.of(chunk, place=place) for place in range(1 + len(tried))]
        chosen = sample(logits, draws)
        logprobs: dict[int, _Logprobs] = {}
        row = 0
        for place, (chunk, tried) in enumerate(zip(chunks, drafts, strict=True)):
            if chunk.request in told:
                tokens = chosen[row : row + 1 + len(tried)]
                logprobs[place] = _logprobs(told[chunk.request], tokens, chunk.request.sampling.logprobs or 0)
            row += 1 + len(tried)
        return Choice(
            chosen,
            drafts,
            logprobs=logprobs,
            stuck=frozenset(place for place, chunk in enumerate(chunks) if chunk.request in stuck),
        )

    def _adjust(self, rows: Tensor, chunk: Chunk, tried: tuple[int, ...]) -> None:
        """Apply what a request wants of its logits; most want nothing, and it costs nothing."""
        sampling = chunk.request.sampling
        if sampling.logit_bias:
            ids, biases = zip(*sampling.logit_bias, strict=True)
            rows[:, to_device(ids, rows.device)] += to_device(biases, rows.device, dtype=rows.dtype)
        early = sampling.min_tokens - chunk.draws
        if early > 0:
            stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.stop_token_ids)
            rows[:early].index_fill_(1, to_device(sorted(stops), rows.device, dtype=torch.int64), -torch.inf)
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
            self._penalise(rows, chunk.request, tried)

    def _penalise(self, rows: Tensor, request: Request, tried: tuple[int, ...]) -> None:
        sampling = request.sampling
        history = self._history(request, rows)
        counts = history.output.expand(len(rows), -1)
        if tried:  # behind a draft, that is part of the output
            counts = counts.clone()
            for place, token in enumerate(tried, start=1):
                counts[place:, token] += 1
        seen = (counts > 0) | (history.prompt > 0)
        stretched = torch.where(rows > 0, rows / sampling.repetition_penalty, rows * sampling.repetition_penalty)
        rows.copy_(stretched.where(seen, rows))
        rows -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)

    def _history(self, request: Request, rows: Tensor) -> _History:
        history = self._histories.get(request)
        if history is None:
            zeros = rows.new_zeros(rows.shape[1])
            history = _History(_count(zeros.clone(), request.prompt), zeros, len(request.prompt))
            self._histories[request] = history
        _count(history.output, request.tokens[history.known :])
        history.known = len(request.tokens)
        return history


def _is_plain(request: Request) -> bool:
    """The likeliest token is wanted, and nothing else."""
    wanted = request.sampling
    return (
        wanted.temperature == 0.0
        and request.constraint is None
        and wanted.logprobs is None
        and not wanted.logit_bias
        and not wanted.min_tokens
        and not wanted.presence_penalty
        and not wanted.frequency_penalty
        and wanted.repetition_penalty == 1.0
    )


def held(chosen: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
    """The drafts up to the first that is not what was ``chosen`` in its place, then the token chosen there."""
    count = next((place for place, draft in enumerate(drafts) if draft != chosen[place]), len(drafts))
    return tuple(chosen[: count + 1])


def _count(counts: Tensor, tokens: Sequence[int]) -> Tensor:
    ids = to_device(tokens, counts.device, dtype=torch.int64)
    return counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))


def _constrain(logits: Tensor, chunks: Sequence[Chunk], drafts: Sequence[tuple[int, ...]]) -> set[Request]:
    """Rule out what grammars forbid, for all rows at once; returns the requests whose grammar cannot go on."""
    stuck: set[Request] = set()
    rows: list[int] = []
    masks: list[bytes] = []
    row = 0
    for chunk, tried in zip(chunks, drafts, strict=True):
        request, here = chunk.request, range(row, row + 1 + len(tried))
        row = here.stop
        if request.constraint is None:
            continue
        try:
            masks += request.constraint.masks(request.output, tried)
        except ConstraintError:
            stuck.add(request)
        else:
            rows += here
    if rows:
        packed = np.frombuffer(b"".join(masks), dtype=np.uint8).reshape(len(masks), -1)
        bits = torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little")).bool()
        forbidden = torch.ones(len(rows), logits.shape[1], dtype=torch.bool)  # also what lies beyond a mask
        width = min(logits.shape[1], bits.shape[1])
        forbidden[:, :width] = ~bits[:, :width]
        places = to_device(rows, logits.device)
        logits[places] = logits[places].masked_fill(to_device(forbidden, logits.device), -torch.inf)
    return stuck


def _logprobs(rows: Tensor, tokens: Tensor, likeliest: int) -> _Logprobs:
    rows = rows.clamp(min=_LEAST_LOGPROB)
    return _Logprobs(rows.gather(1, tokens[:, None]).squeeze(1), *rows.topk(min(likeliest, rows.shape[1]), dim=-1))


def _told(logprobs: _Logprobs, tokens: int) -> tuple[TokenLogprob, ...]:
    """Of the first so many tokens."""
    own, values, ids = (part[:tokens].tolist() for part in (logprobs.own, logprobs.values, logprobs.ids))
    return tuple(
        TokenLogprob(logprob, tuple(zip(top_ids, top_values, strict=True)))
        for logprob, top_ids, top_values in zip(own, ids, values, strict=True)
    )
