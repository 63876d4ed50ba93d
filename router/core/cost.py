"""The price of a rank for a request, in seconds.

    price = wait + work + decode + evict + move

- wait: prefill already queued there, and a little for what was sent there lately;
- work: prefill of what the rank does not hold;
- decode: how much the requests decoding there slow this one, and it them;
- evict: the recomputation this request's blocks will cause by pushing others out;
- move: what leaving home costs the turns that follow: so many times what home saves. A session is sticky while
  it is warm at home, and free once it is cold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.load import recent_seconds, wait_seconds
from router.core.pace import prefill_seconds
from router.core.types import Price, RankView, RouteRequest

#: Decode steps over which a request and its neighbours slow each other: a reply's length in steps.
_DECODE_STEPS = 300
#: Share of evicted tokens that somebody will want back, and the weight of that cost.
_EVICTED_RETURN_RATIO = 0.5
#: Recent work as wait: enough to break ties between idle ranks, too little to leave a cache for.
_RECENT_WEIGHT = 0.02


@dataclass(frozen=True, slots=True)
class CostParameters:
    """Constants of the price; ``move_weight`` multiplies the seconds that home saves."""

    move_weight: float = 16.0


def reusable_tokens(rank: RankView, request: RouteRequest) -> int:
    """The prefix the rank is believed to reuse, discounted by trust in its predictions."""
    return int(request.reusable_tokens.get(rank.slot, 0) * rank.trust.ratio)


def work_seconds(rank: RankView, request: RouteRequest) -> float:
    """Prefill of what the rank does not hold."""
    uncached = request.prompt_tokens - reusable_tokens(rank, request)
    return prefill_seconds(rank.pace, uncached_tokens=uncached, context_tokens=request.prompt_tokens)


def price(
    rank: RankView, request: RouteRequest, *, home: RankView | None, parameters: CostParameters, now: float
) -> Price:
    """Price one rank. ``home`` is the session's home if it can serve now."""
    (found,) = prices((rank,), request, home=home, parameters=parameters, now=now)
    return found


def prices(
    ranks: Sequence[RankView], request: RouteRequest, *, home: RankView | None, parameters: CostParameters, now: float
) -> list[Price]:
    """Price ranks, in their order: this loop is what a decision among many ranks costs."""
    prompt_tokens = request.prompt_tokens
    move_seconds = 0.0 if home is None else parameters.move_weight * _saved_at_home(home, request)
    home_slot = None if home is None else home.slot
    found: list[Price] = []
    for rank in ranks:
        load, pace = rank.load, rank.pace
        uncached_tokens = prompt_tokens - reusable_tokens(rank, request)
        found.append(
            Price(
                rank.slot,
                wait_seconds(load, now=now) + _RECENT_WEIGHT * recent_seconds(load, now=now),
                prefill_seconds(pace, uncached_tokens=uncached_tokens, context_tokens=prompt_tokens),
                _DECODE_STEPS
                * pace.factor
                * (pace.decode_request_seconds * load.inflight + pace.decode_token_seconds * load.inflight_tokens),
                _evict_seconds(rank, added_tokens=uncached_tokens + request.output_tokens),
                0.0 if rank.slot == home_slot else move_seconds,
            )
        )
    return found


def _evict_seconds(rank: RankView, *, added_tokens: int) -> float:
    if not rank.pool_tokens:
        return 0.0
    overflow = max(0, min(added_tokens, rank.resident_tokens() + added_tokens - rank.pool_tokens))
    return _EVICTED_RETURN_RATIO * rank.pace.factor * rank.pace.token_seconds * overflow


def _saved_at_home(home: RankView, request: RouteRequest) -> float:
    whole = prefill_seconds(home.pace, uncached_tokens=request.prompt_tokens, context_tokens=request.prompt_tokens)
    return max(0.0, whole - work_seconds(home, request))
