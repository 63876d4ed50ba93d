"""The decision: ``policy(view, request, rng, now) -> Decision | None``. None: no rank can serve it.

Policies are pure but for the little they remember by themselves (whose turn it is, a ring). The same seed and the
same inputs give the same decisions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from router.core.cost import CostParameters, prices, reusable_tokens, work_seconds
from router.core.load import recent_seconds, wait_seconds
from router.core.ring import Ring
from router.core.types import Decision, FleetView, Price, RankStatus, RankView, Reason, RouteRequest

if TYPE_CHECKING:
    from random import Random

Policy = Callable[[FleetView, RouteRequest, "Random", float], Decision | None]

#: Prices closer than this are equal: the draw decides.
_TIE_SECONDS = 1e-6
#: Cold ranks up to so much dearer than the cheapest are near enough for routers to agree by hashing: what each router
#: alone has learnt of paces and recent work differs by as much.
_AGREE_RATIO = 1.25
_AGREE_SECONDS = 0.1


def candidates(view: FleetView, request: RouteRequest) -> list[RankView]:
    """Ranks that may take the request: ready, serving the model, open to it. A draining rank keeps its own."""
    model, home, exclude, allowed = request.model, request.home, request.exclude, request.allowed
    ready, draining = RankStatus.READY, RankStatus.DRAINING  # asked for once: an enum's members are slow to find
    return [
        rank
        for rank in view.ranks
        if model in rank.models
        and (rank.status is ready or (rank.status is draining and rank.slot == home))
        and rank.slot not in exclude
        and (allowed is None or rank.slot in allowed)
    ]


class RoundRobin:
    """Each rank in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def __copy__(self) -> RoundRobin:
        twin = RoundRobin()
        twin._turn = self._turn
        return twin

    def __call__(self, view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
        ranks = candidates(view, request)
        if not ranks:
            return None
        chosen = ranks[self._turn % len(ranks)]
        self._turn += 1
        return _decision(chosen, ranks, request, reason=Reason.TURN)


def least_loaded(view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
    """The rank with the least prefill waiting, then the fewest requests, then the least recent work."""
    ranks = candidates(view, request)
    if not ranks:
        return None

    def key(rank: RankView) -> tuple[float, int, float]:
        load, pace = rank.load, rank.pace
        recent = pace.factor * recent_seconds(load, now=now)
        return (round(wait_seconds(load, pace, now=now), 3), load.inflight, round(recent, 3))

    least = min(map(key, ranks))
    chosen = rng.choice([rank for rank in ranks if key(rank) == least])
    return _decision(chosen, ranks, request, reason=Reason.LOAD)


class Places:
    """Where sessions belong by consistent hashing over a model's ranks: every router finds the same, asking nobody.

    Rings are kept, the last used: one takes milliseconds to make, and there is one for each set of ranks.
    """

    MOST_RINGS = 16

    def __init__(self) -> None:
        self._rings: OrderedDict[frozenset[str], Ring] = OrderedDict()

    def __len__(self) -> int:
        """Rings that are kept."""
        return len(self._rings)

    def first(self, view: FleetView, ranks: Sequence[RankView], request: RouteRequest) -> RankView:
        """The one of ``ranks`` that comes first from the session's place on the ring. The request has a session."""
        assert request.session is not None
        serving = {str(rank.id): rank for rank in view.ranks if request.model in rank.models}
        ring = self._ring(frozenset(serving))
        eligible = {rank.slot for rank in ranks}
        walk = ring.walk("\x00".join(request.session))
        return next(serving[name] for name in walk if serving[name].slot in eligible)

    def _ring(self, names: frozenset[str]) -> Ring:
        ring = self._rings.pop(names, None)
        if ring is None:
            ring = Ring(names)
            if len(self._rings) >= self.MOST_RINGS:
                self._rings.popitem(last=False)
        self._rings[names] = ring
        return ring


class SessionHash:
    """The session's place on a consistent-hash ring, whatever is cached or busy; without a session, by load."""

    def __init__(self) -> None:
        self._places = Places()

    def __copy__(self) -> SessionHash:
        return SessionHash()

    def __call__(self, view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
        ranks = candidates(view, request)
        if not ranks:
            return None
        if request.session is None:
            return least_loaded(view, request, rng, now)
        chosen = self._places.first(view, ranks, request)
        return _decision(chosen, ranks, request, reason=Reason.HASH)


class Affinity:
    """The cheapest rank in seconds (``core/cost``).

    Equals are drawn by lot; or, where other routers decide too (``agree``), a new session goes to the first of the
    cold ranks by its place on the ring, those a little dearer than the cheapest included, since no two routers see
    quite the same prices.
    """

    def __init__(self, parameters: CostParameters, *, agree: bool = False) -> None:
        self._parameters = parameters
        self._agree = agree
        self._places = Places() if agree else None

    def __copy__(self) -> Affinity:
        return Affinity(self._parameters, agree=self._agree)

    def __call__(self, view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
        ranks = candidates(view, request)
        if not ranks:
            return None
        if len(ranks) == 1:  # nothing to weigh
            return _decision(ranks[0], ranks, request, reason=Reason.ONLY)
        home = next((rank for rank in ranks if rank.slot == request.home), None)
        priced = prices(ranks, request, home=home, parameters=self._parameters, now=now)
        totals = [entry.total_seconds for entry in priced]
        chosen = cheapest_rank(ranks, totals, view, request, rng, home=request.home, places=self._places)
        return _decision(chosen, ranks, request, reason=self.reason(chosen, home, request), prices=priced)

    @staticmethod
    def reason(chosen: RankView, home: RankView | None, request: RouteRequest) -> Reason:
        """What a choice by price means for the session."""
        if home is not None and chosen.slot == home.slot:
            return Reason.HOME
        if home is not None and reusable_tokens(home, request) > reusable_tokens(chosen, request):
            return Reason.SPILL
        return Reason.PREFIX if reusable_tokens(chosen, request) else Reason.COLD


def cheapest_rank(
    ranks: Sequence[RankView],
    seconds: Sequence[float],
    view: FleetView,
    request: RouteRequest,
    rng: Random,
    *,
    home: int | None,
    places: Places | None,
    lowest_seconds: float | None = None,
) -> RankView:
    """The rank of the least ``seconds``, of equals the ``home``, else one by lot. With ``places`` a session that has
    its home on none of them goes to the first of those that are near the lowest by its place: of these, or of all that
    the choice is part of (``lowest_seconds``).
    """
    lowest = min(seconds)
    equal = [rank for rank, total in zip(ranks, seconds, strict=True) if total <= lowest + _TIE_SECONDS]
    at_home = None if home is None else next((rank for rank in ranks if rank.slot == home), None)
    if at_home in equal:
        return at_home
    if places is None or request.session is None or at_home is not None:
        return rng.choice(equal)
    most = (lowest if lowest_seconds is None else lowest_seconds) * _AGREE_RATIO + _AGREE_SECONDS
    near = [rank for rank, total in zip(ranks, seconds, strict=True) if total <= most]
    if not near or any(reusable_tokens(rank, request) for rank in near):
        near = equal  # a head is worth more than agreement
    return places.first(view, near, request)


def make_policy(name: str, parameters: CostParameters, *, agree: bool = False) -> Policy:
    """A policy by its setting's name. Raises ``KeyError`` for a name that is none.

    ``agree``: other routers decide over the same ranks, and should send a new session to the same one.
    """
    makers: dict[str, Callable[[], Policy]] = {
        "affinity": lambda: Affinity(parameters, agree=agree),
        "round_robin": RoundRobin,
        "least_loaded": lambda: least_loaded,
        "session_hash": SessionHash,
    }
    return makers[name]()


def _decision(
    chosen: RankView,
    ranks: Sequence[RankView],
    request: RouteRequest,
    *,
    reason: Reason,
    prices: Sequence[Price] = (),
) -> Decision:
    if request.exclude:
        reason = Reason.RETRY
    elif len(ranks) == 1:
        reason = Reason.ONLY
    best_cached_tokens = 0
    for rank in ranks:
        best_cached_tokens = max(best_cached_tokens, request.reusable_tokens.get(rank.slot, 0))
    return Decision(
        slot=chosen.slot,
        id=chosen.id,
        reason=reason,
        expected_cached_tokens=request.reusable_tokens.get(chosen.slot, 0),
        best_cached_tokens=best_cached_tokens,
        expected_prefill_seconds=work_seconds(chosen, request),
        prices=prices,
    )
