"""Other routers' policies, written from their published descriptions, over the same information.

They have the router's own signature (``core/policy``); ``Asked`` adds what their own books would tell them.
Counts of load are what the router has in flight; prefixes are what events and dispatches say, but for SMG, whose tree
never forgets.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from random import Random

import msgspec

from router.core.cost import CostParameters, reusable_tokens, work_seconds
from router.core.load import wait_seconds
from router.core.policy import Policy, candidates, make_policy
from router.core.ring import Ring
from router.core.types import Decision, FleetView, RankView, Reason, RouteRequest

_BLOCK_TOKENS = 64
#: Scores closer than this are equal.
_TIE = 1e-9


class Asked(RouteRequest, frozen=True):
    """A request with what never-evicted trees know: tokens ever sent to each slot, and who got the match last."""

    sent_tokens: Mapping[int, int] = msgspec.field(default_factory=dict)
    last_slot: int | None = None


def comparator(name: str, parameters: CostParameters) -> Policy:
    """A policy by name. Raises ``KeyError`` for a name that is none."""
    if name in ("round_robin", "least_loaded"):
        return make_policy(name, parameters)
    if name in ("affinity", "price"):
        return make_policy("affinity", parameters)
    makers: dict[str, Callable[[], Policy]] = {
        "random": lambda: _random,
        "session_hash": BoundedHash,
        "sticky": lambda: _sticky,
        "longest_prefix": lambda: _longest_prefix,
        "smg": lambda: _smg,
        "dynamo": lambda: _cheapest(_dynamo_cost),
        "llmd": lambda: _llmd,
        "llmd_filter": lambda: _llmd_filter,
        "mooncake": lambda: _cheapest(_mooncake_cost),
    }
    return makers[name]()


POLICIES = (
    "affinity",
    "price",
    "random",
    "round_robin",
    "least_loaded",
    "session_hash",
    "sticky",
    "longest_prefix",
    "smg",
    "dynamo",
    "llmd",
    "llmd_filter",
    "mooncake",
)


def _random(view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
    return _pick(candidates(view, request), request, rng, lambda rank: 0.0)


class BoundedHash:
    """Consistent hashing of sessions with bounded loads: the first rank on the ring below 1.25 of the mean."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._ring = Ring(())

    def __call__(self, view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
        ranks = {str(rank.id): rank for rank in candidates(view, request)}
        if not ranks:
            return None
        if self._names != ranks.keys():
            self._names, self._ring = frozenset(ranks), Ring(ranks)
        bound = 1.25 * (1 + sum(rank.load.inflight for rank in ranks.values())) / len(ranks)
        walk = self._ring.walk("\x00".join(request.session or ("", str(rng.random()))))
        chosen = next((ranks[name] for name in walk if ranks[name].load.inflight + 1 <= bound), None)
        if chosen is None:
            chosen = min(ranks.values(), key=lambda rank: rank.load.inflight)
        return _decided(chosen, request, Reason.HASH)


def _sticky(view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
    """Home for ever; a new session starts where the fewest prompt tokens are in flight."""
    ranks = candidates(view, request)
    home = [rank for rank in ranks if rank.slot == request.home]
    return _pick(home or ranks, request, rng, lambda rank: rank.load.inflight_tokens)


def _longest_prefix(view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
    """The longest match; among equals the one with the fewest requests."""
    return _pick(
        candidates(view, request),
        request,
        rng,
        lambda rank: -reusable_tokens(rank, request) + min(0.5, rank.load.inflight * 1e-4),
    )


def _smg(view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
    """SMG's ``cache_aware``: threshold .3, imbalance 64 and 1.5, spill gate at the matched worker, expected wait."""
    ranks = candidates(view, request)
    if not ranks:
        return None
    loads = [rank.load.inflight for rank in ranks]
    if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
        return _pick(ranks, request, rng, lambda rank: rank.load.inflight)
    sent, last = (request.sent_tokens, request.last_slot) if isinstance(request, Asked) else ({}, None)
    matched = next((rank for rank in ranks if rank.slot == last), None)
    if matched is not None and max(sent.values(), default=0) > 0.3 * request.prompt_tokens:
        mean = statistics.fmean(loads)
        slack = max(4.0, min(64.0, 2.0 * statistics.pstdev(loads)))
        if not (matched.load.inflight > mean + slack and matched.load.inflight > 1.5 * mean):
            return _decided(matched, request, Reason.PREFIX)
        return _pick(ranks, request, rng, lambda rank: rank.load.inflight)
    return _pick(ranks, request, rng, lambda rank: wait_seconds(rank.load, rank.pace, now=now))


def _dynamo_cost(rank: RankView, request: RouteRequest, now: float) -> float:
    """Prefill blocks, active and own, less the overlap, plus active blocks."""
    uncached = request.prompt_tokens - reusable_tokens(rank, request)
    return (rank.load.waiting_tokens + uncached + rank.load.inflight_tokens) / _BLOCK_TOKENS


def _mooncake_cost(rank: RankView, request: RouteRequest, now: float) -> float:
    """The expected time to the first token."""
    return wait_seconds(rank.load, rank.pace, now=now) + work_seconds(rank, request)


def _cheapest(cost: Callable[[RankView, RouteRequest, float], float]) -> Policy:
    def policy(view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
        return _pick(candidates(view, request), request, rng, lambda rank: cost(rank, request, now))

    return policy


def _llmd(view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
    """llm-d's weighted scorers: 3 prefix, 2 queue (min to max of requests waiting), 2 memory not in flight."""
    return _llmd_among(candidates(view, request), request, rng)


def _llmd_filter(view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
    """llm-d's affinity filter first: only ranks that match 80 %, unless that costs 18 s more until the first token."""
    ranks = candidates(view, request)
    warm = [rank for rank in ranks if reusable_tokens(rank, request) >= 0.8 * request.prompt_tokens]
    if warm:
        fastest = min(_mooncake_cost(rank, request, now) for rank in ranks)
        if min(_mooncake_cost(rank, request, now) for rank in warm) - fastest <= 18.0:
            ranks = warm
    return _llmd_among(ranks, request, rng)


def _llmd_among(ranks: list[RankView], request: RouteRequest, rng: Random) -> Decision | None:
    waiting = [rank.load.waiting for rank in ranks]
    low, high = min(waiting, default=0), max(waiting, default=0)

    def penalty(rank: RankView) -> float:
        queue = 1.0 if high == low else (high - rank.load.waiting) / (high - low)
        memory = 1.0 - min(1.0, rank.load.inflight_tokens / rank.pool_tokens) if rank.pool_tokens else 1.0
        return -(3.0 * reusable_tokens(rank, request) / request.prompt_tokens + 2.0 * queue + 2.0 * memory)

    return _pick(ranks, request, rng, penalty)


def _pick(
    ranks: list[RankView], request: RouteRequest, rng: Random, cost: Callable[[RankView], float]
) -> Decision | None:
    """The cheapest; ties at random."""
    if not ranks:
        return None
    costs = [cost(rank) for rank in ranks]
    lowest = min(costs)
    chosen = rng.choice([rank for rank, one in zip(ranks, costs, strict=True) if one <= lowest + _TIE])
    return _decided(chosen, request, Reason.PREFIX if reusable_tokens(chosen, request) else Reason.LOAD)


def _decided(chosen: RankView, request: RouteRequest, reason: Reason) -> Decision:
    return Decision(
        slot=chosen.slot,
        id=chosen.id,
        reason=reason,
        expected_cached_tokens=reusable_tokens(chosen, request),
        best_cached_tokens=max(request.reusable_tokens.values(), default=0),
        expected_prefill_seconds=work_seconds(chosen, request),
    )
