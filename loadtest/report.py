"""A run's log to its numbers: one frozen ``Report``, whose field names are the names in the JSON.

Counts of requests and errors leave the warm-up out; everything else is of the successful ones among them. Ratios
are 0 to 1, None where the
server does not tell what they need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor

from loadtest.answer import Outcome
from loadtest.replay import Exchange, RunLog

UNKNOWN = "unknown"
Setting = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a series, in seconds; all zero when it is empty."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """``cached`` is None when no answer reported cached tokens."""

    prompt: int
    completion: int
    cached: int | None
    prompt_per_second: float
    completion_per_second: float


@dataclass(frozen=True, slots=True)
class HitRatio:
    """Shares of the prompt tokens: served from cache, the most that any cache could serve, expected by the router."""

    measured: float | None
    ideal: float
    expected: float | None


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank did. ``name`` is from the answer headers: worker/rank, a lone worker's rank, or ``unknown``."""

    name: str
    requests: int
    request_share: float
    prompt_tokens: int
    uncached_tokens: int | None
    hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is said about a run. ``requests`` counts all that were sent after warm-up."""

    label: str
    settings: Mapping[str, Setting]
    stopped: str
    duration_seconds: float
    sessions: int
    requests: int
    warmup_requests: int
    cancelled: int
    errors: int
    errors_by_kind: Mapping[str, int]
    error_examples: Mapping[str, str]
    first_token_seconds: Spread
    inter_token_seconds: Spread
    request_seconds: Spread
    tokens: Tokens
    hit_ratio: HitRatio
    ranks: Sequence[RankShare]
    request_imbalance: float | None
    uncached_imbalance: float | None
    reasons: Mapping[str, int]
    request_digest: str


def summarise(log: RunLog, *, label: str = "", settings: Mapping[str, Setting] | None = None) -> Report:
    """The numbers of a run."""
    measured = [exchange for exchange in log.exchanges if not exchange.is_warmup]
    good = [exchange for exchange in measured if exchange.answer.outcome is Outcome.OK]
    bad = [e for e in measured if e.answer.outcome not in (Outcome.OK, Outcome.CANCELLED)]
    kinds = Counter(exchange.answer.outcome.value for exchange in bad)
    examples = {exchange.answer.outcome.value: exchange.answer.detail for exchange in reversed(bad)}
    ranks = _rank_shares(good)
    seconds = max(log.duration_seconds, 1e-9)
    prompt, completion = _sum_usage(good)
    reasons = [e.answer.placement.reason for e in good if e.answer.placement and e.answer.placement.reason]
    return Report(
        label=label,
        settings=settings or {},
        stopped=log.stopped.value,
        duration_seconds=log.duration_seconds,
        sessions=log.sessions_played,
        requests=len(measured),
        warmup_requests=len(log.exchanges) - len(measured),
        cancelled=sum(exchange.answer.outcome is Outcome.CANCELLED for exchange in measured),
        errors=len(bad),
        errors_by_kind=dict(sorted(kinds.items())),
        error_examples=dict(sorted(examples.items())),
        first_token_seconds=spread(
            e.answer.first_token_seconds for e in good if e.answer.first_token_seconds is not None
        ),
        inter_token_seconds=spread(gap for e in good for gap in e.answer.gap_seconds),
        request_seconds=spread(e.answer.total_seconds for e in good),
        tokens=Tokens(
            prompt=prompt,
            completion=completion,
            cached=_sum_cached(good, is_reported=_is_cached_reported(good)),
            prompt_per_second=prompt / seconds,
            completion_per_second=completion / seconds,
        ),
        hit_ratio=HitRatio(_measured(good), _ideal(good), _expected(good)),
        ranks=ranks,
        request_imbalance=imbalance([rank.requests for rank in ranks]),
        uncached_imbalance=imbalance([rank.uncached_tokens or 0 for rank in ranks]),
        reasons=dict(Counter(reasons).most_common()),
        request_digest=log.request_digest,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, with linear interpolation between neighbours (as numpy's default does)."""
    place = (len(ordered) - 1) * share
    low, high = ordered[floor(place)], ordered[ceil(place)]
    return low + (high - low) * (place - floor(place))


def spread(values: Iterable[float]) -> Spread:
    """Mean and percentiles of a series."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0, 0.0, 0.0, 0.0, 0.0)
    return Spread(
        len(ordered),
        sum(ordered) / len(ordered),
        percentile(ordered, 0.5),
        percentile(ordered, 0.9),
        percentile(ordered, 0.99),
    )


def imbalance(loads: Sequence[int]) -> float | None:
    """The largest over the mean; 1 is even. None for less than two ranks, or no load."""
    if len(loads) < 2 or not any(loads):
        return None
    return max(loads) * len(loads) / sum(loads)


def _sum_usage(good: Iterable[Exchange]) -> tuple[int, int]:
    usages = [e.answer.usage for e in good if e.answer.usage is not None]
    return sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)


def _is_cached_reported(good: Iterable[Exchange]) -> bool:
    """vLLM leaves the field out where nothing was cached, so one answer that has it speaks for all."""
    return any(e.answer.usage is not None and e.answer.usage.cached_tokens is not None for e in good)


def _sum_cached(good: Iterable[Exchange], *, is_reported: bool) -> int | None:
    if not is_reported:
        return None
    return sum(e.answer.usage.cached_tokens or 0 for e in good if e.answer.usage is not None)


def _measured(good: Sequence[Exchange]) -> float | None:
    cached = _sum_cached(good, is_reported=_is_cached_reported(good))
    prompt, _ = _sum_usage(good)
    return cached / prompt if cached is not None and prompt else None


def _ideal(good: Sequence[Exchange]) -> float:
    """Weighted with the engine's prompt tokens, as the measured ratio is; with bytes where it reports none."""
    weights = [e.answer.usage.prompt_tokens if e.answer.usage else 0 for e in good]
    if not any(weights):
        weights = [e.body_bytes for e in good]
    total = sum(weights)
    return sum(w * e.ideal_ratio for w, e in zip(weights, good, strict=True)) / total if total else 0.0


def _expected(good: Sequence[Exchange]) -> float | None:
    told = [
        (e.answer.placement.expected_cached_tokens, e.answer.usage.prompt_tokens)
        for e in good
        if e.answer.placement is not None
        and e.answer.placement.expected_cached_tokens is not None
        and e.answer.usage is not None
    ]
    prompt = sum(tokens for _, tokens in told)
    return sum(expected for expected, _ in told) / prompt if prompt else None


def _rank_shares(good: Sequence[Exchange]) -> list[RankShare]:
    is_reported = _is_cached_reported(good)
    by_rank: dict[str, list[Exchange]] = {}
    for exchange in good:
        placement = exchange.answer.placement
        by_rank.setdefault(placement.rank_name if placement else UNKNOWN, []).append(exchange)
    shares = []
    for name, exchanges in sorted(by_rank.items()):
        prompt, _ = _sum_usage(exchanges)
        cached = _sum_cached(exchanges, is_reported=is_reported)
        shares.append(
            RankShare(
                name=name,
                requests=len(exchanges),
                request_share=len(exchanges) / len(good),
                prompt_tokens=prompt,
                uncached_tokens=prompt - cached if cached is not None else None,
                hit_ratio=cached / prompt if cached is not None and prompt else None,
            )
        )
    return shares
