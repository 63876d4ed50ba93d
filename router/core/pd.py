"""Prefill and decode on different ranks, chosen together by the price of ``core/cost``.

A request can be served by one rank alone, which is a unified one or a decode rank that computes the prompt itself (the
*bypass* of the prefill leg), or by a pair of a prefill rank p and a decode rank d that speak the same contract::

    alone = wait + work + decode + evict + move + stall
    pair  = max(wait_p + work_p, wait_d) + transfer + decode_d + evict_p + evict_d + move_p + move_d

- stall: a prompt computed on a rank keeps each answer being made there waiting as long; a pair spares them that. On a
  decode rank one answer is counted at least, since more are on their way to it;
- transfer: a second leg, and fetching what the decode rank does not hold: what it holds is not sent;
- move_p: as in ``core/cost``, where the session's home is the prefill rank that computed its last prompt;
- move_d: the same for the decode rank, whose home saves the transfer of what is there. Alone it saves the prefill.

So there is no threshold for the bypass: it is taken where it costs less. Of the two waits of a pair the longer counts,
since they pass at the same time. The cheapest pair is found exactly, in O(n log n) for n ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from router.core.cost import CostParameters, prices, reusable_tokens, work_seconds
from router.core.load import wait_seconds
from router.core.policy import Affinity, Places, Policy, cheapest_rank, make_policy
from router.core.types import (
    Decision,
    FleetView,
    Handover,
    Price,
    RankPace,
    RankView,
    Reason,
    RouteRequest,
    WorkerRole,
)
from router.core.ways import Ways, has_partner, is_split, prompt_alone

if TYPE_CHECKING:
    from random import Random

#: What a second leg costs however little is handed over: a request more, and the meeting of the two ranks.
HANDOVER_SECONDS = 0.005
#: Rooms are this wide, as SGLang has them.
_ROOM_BITS = 63


def room(rng: Random, *, rank: int, dp_size: int) -> int:
    """A fresh bootstrap room: 63 random bits, congruent to the prefill rank, from which SGLang derives that rank."""
    drawn = rng.getrandbits(_ROOM_BITS)
    found = drawn - drawn % dp_size + rank
    return found if found < 1 << _ROOM_BITS else found - dp_size


#: ``policy.cheapest_rank`` for one request: ranks, their seconds, the home, and the lowest that the choice is part of.
Pick = Callable[[Sequence[RankView], Sequence[float], "int | None", "float | None"], RankView]


class Pair(NamedTuple):
    """Two legs, and the price of the cheapest pair: this one, unless routers agree on one that is a little dearer."""

    prefill: Leg
    decode: Leg
    seconds: float


class PairAffinity:
    """The cheapest rank or pair of ranks in seconds. A session stays where it is; equals are drawn by lot, or, where
    other routers decide too (``agree``), each leg of a new session's is the first by its place on the ring, as in
    ``policy.Affinity``.
    """

    def __init__(self, parameters: CostParameters, *, agree: bool = False) -> None:
        self._parameters = parameters
        self._agree = agree
        self._places = Places() if agree else None

    def __copy__(self) -> PairAffinity:
        return PairAffinity(self._parameters, agree=self._agree)

    def __call__(self, view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
        ways = Ways.of(view, request)

        def pick(
            ranks: Sequence[RankView], seconds: Sequence[float], home: int | None, lowest_seconds: float | None
        ) -> RankView:
            return cheapest_rank(
                ranks, seconds, view, request, rng, home=home, places=self._places, lowest_seconds=lowest_seconds
            )

        alone = alone_prices(ways.alone, request, parameters=self._parameters, now=now)
        prefill = prefill_prices(ways.prefill, request, parameters=self._parameters, now=now)
        decode = decode_prices(ways.decode, request, parameters=self._parameters, now=now)
        pair = cheapest_pair(ways, prefill, decode, request, pick=pick)
        lowest = min((price.total_seconds for price in alone), default=None)
        if pair is not None and (lowest is None or pair.seconds < lowest):
            decision = _paired(pair, ways, request)
            shown = [*_others(alone, decode), *prefill, *decode]
        elif lowest is not None:
            chosen = pick(ways.alone, [price.total_seconds for price in alone], request.home, None)
            decision = _by_itself(chosen, ways, request, view)
            shown = [*_others(decode, alone), *prefill, *alone]
        else:
            return None
        return msgspec.structs.replace(decision, prices=shown, pair_seconds=pair and pair.seconds, alone_seconds=lowest)


class PairOneByOne:
    """A policy without prices, asked twice: for the rank that answers, and for the one that computes its prompt."""

    def __init__(self, answers: Policy, prompts: Policy) -> None:
        self._answers = answers
        self._prompts = prompts

    def __copy__(self) -> PairOneByOne:
        return PairOneByOne(copy(self._answers), copy(self._prompts))

    def __call__(self, view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
        ways = Ways.of(view, request)
        unified = [rank for rank in ways.alone if rank.part.role is WorkerRole.UNIFIED]
        answering = [*unified, *ways.decode] or ways.alone
        answer = self._answers(FleetView(tuple(answering), view.version), request, rng, now)
        if answer is None:
            return None
        chosen = next(rank for rank in answering if rank.slot == answer.slot)
        partners = [rank for rank in ways.prefill if rank.part.handover is chosen.part.handover]
        if chosen.part.role is WorkerRole.UNIFIED or not partners:
            decision = _by_itself(chosen, ways, request, view)
            return decision if decision.reason is Reason.DEGRADED else answer
        prompt = self._prompts(FleetView(tuple(partners), view.version), prompt_alone(request), rng, now)
        assert prompt is not None, "there are partners"
        prefill = next(rank for rank in partners if rank.slot == prompt.slot)
        (prefill_price,) = prefill_prices([prefill], request, parameters=CostParameters(), now=now)
        (decode_price,) = decode_prices([chosen], request, parameters=CostParameters(), now=now)
        legs = Leg.of(prefill, prefill_price), Leg.of(chosen, decode_price)
        pair = Pair(*legs, _together(*legs))
        return msgspec.structs.replace(_paired(pair, ways, request), reason=answer.reason)


class ByRole:
    """A policy over fleets with and without roles: requests that cannot be split, and models that are not, go whole."""

    def __init__(self, whole: Policy, split: Policy) -> None:
        self._whole = whole
        self._split = split

    def __copy__(self) -> ByRole:
        return ByRole(copy(self._whole), copy(self._split))

    def __call__(self, view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
        return (self._split if is_split(view, request) else self._whole)(view, request, rng, now)


def make_role_policy(name: str, parameters: CostParameters, *, agree: bool = False) -> ByRole:
    """As ``make_policy``, for fleets whose ranks may have roles."""
    split = (
        PairAffinity(parameters, agree=agree)
        if name == "affinity"
        else PairOneByOne(make_policy(name, parameters), make_policy(name, parameters))
    )
    return ByRole(make_policy(name, parameters, agree=agree), split)


# --- prices ---------------------------------------------------------------------------------------


def alone_prices(
    ranks: Sequence[RankView], request: RouteRequest, *, parameters: CostParameters, now: float
) -> list[Price]:
    """What a rank costs that does all of it. The stall is part of ``decode_seconds``."""
    found = prices(ranks, request, home=_home(ranks, request.home), parameters=parameters, now=now)
    return [
        Price(slot, wait, work, decode + work * _stalled_answers(rank), evict, move)
        for rank, (slot, wait, work, decode, evict, move, _) in zip(ranks, found, strict=True)
    ]


def prefill_prices(
    ranks: Sequence[RankView], request: RouteRequest, *, parameters: CostParameters, now: float
) -> list[Price]:
    """What the prompt costs on a prefill rank. Nothing decodes there."""
    prompt = prompt_alone(request)
    found = prices(ranks, prompt, home=_home(ranks, prompt.home), parameters=parameters, now=now)
    return [Price(slot, wait, work, 0.0, evict, move) for slot, wait, work, _, evict, move, _ in found]


def decode_prices(
    ranks: Sequence[RankView], request: RouteRequest, *, parameters: CostParameters, now: float
) -> list[Price]:
    """What the answer costs on a decode rank that is handed the prompt."""
    found = prices(ranks, request, home=None, parameters=parameters, now=now)
    home = _home(ranks, request.home)
    move_seconds = 0.0
    if home is not None:
        saved_tokens = reusable_tokens(home, request)
        move_seconds = parameters.move_weight * request.return_ratio * saved_tokens * home.pace.transfer_token_seconds
    return [
        Price(
            price.slot,
            wait_seconds(rank.load, rank.pace, now=now),
            0.0,
            price.decode_seconds,
            price.evict_seconds,
            0.0 if rank is home else move_seconds,
            transfer_seconds(rank.pace, tokens=_missing_tokens(rank, request)),
        )
        for rank, price in zip(ranks, found, strict=True)
    ]


def transfer_seconds(pace: RankPace, *, tokens: int) -> float:
    """What a decode rank waits for, once the prompt is computed: a second leg, and the fetching of ``tokens``."""
    return HANDOVER_SECONDS + tokens * pace.transfer_token_seconds


def _missing_tokens(rank: RankView, request: RouteRequest) -> int:
    return request.prompt_tokens - reusable_tokens(rank, request)


def _stalled_answers(rank: RankView) -> int:
    """How many answers a prompt would keep waiting that is computed on this rank."""
    return max(rank.part.role is WorkerRole.DECODE, rank.load.inflight - rank.load.waiting)


def _home(ranks: Sequence[RankView], slot: int | None) -> RankView | None:
    return next((rank for rank in ranks if rank.slot == slot), None)


def _others(prices: Sequence[Price], than: Sequence[Price]) -> list[Price]:
    slots = {price.slot for price in than}
    return [price for price in prices if price.slot not in slots]


# --- the cheapest pair ----------------------------------------------------------------------------


class Leg(NamedTuple):
    """A rank with the price of its leg, in two parts: until it is ready for the other one, and the rest."""

    rank: RankView
    price: Price
    ready_seconds: float
    rest_seconds: float

    @classmethod
    def of(cls, rank: RankView, price: Price) -> Leg:
        """Split the price."""
        ready_seconds = price.wait_seconds + price.work_seconds
        return cls(rank, price, ready_seconds, price.total_seconds - ready_seconds)


def _together(prefill: Leg, decode: Leg) -> float:
    """What a pair costs: both wait at the same time, all else adds up."""
    return max(prefill.ready_seconds, decode.ready_seconds) + prefill.rest_seconds + decode.rest_seconds


def cheapest_pair(
    ways: Ways, prefill: Sequence[Price], decode: Sequence[Price], request: RouteRequest, *, pick: Pick
) -> Pair | None:
    """The pair with the lowest price of all whose ranks speak the same contract. None: there is no pair."""
    found: list[Pair] = []
    for handover in Handover:
        computing = _speaking(handover, ways.prefill, prefill)
        answering = _speaking(handover, ways.decode, decode)
        if computing and answering:
            found.append(_cheapest_of(computing, answering, request, pick=pick))
    return min(found, key=lambda pair: pair.seconds, default=None)


def _speaking(handover: Handover, ranks: Sequence[RankView], prices: Sequence[Price]) -> list[Leg]:
    return [Leg.of(rank, price) for rank, price in zip(ranks, prices, strict=True) if rank.part.handover is handover]


def _cheapest_of(prefill: Sequence[Leg], decode: Sequence[Leg], request: RouteRequest, *, pick: Pick) -> Pair:
    """For each prefill rank its best partner: of those ready before it the one with the least besides waiting, of those
    ready later the one with the least in all.
    """
    by_readiness = sorted((ready, rest) for _, _, ready, rest in decode)
    readiness = [ready for ready, _ in by_readiness]
    earlier = list(accumulate((rest for _, rest in by_readiness), min, initial=math.inf))
    later = list(accumulate((ready + rest for ready, rest in reversed(by_readiness)), min, initial=math.inf))
    later.reverse()

    def best_seconds(leg: Leg) -> float:
        place = bisect_right(readiness, leg.ready_seconds)
        return leg.rest_seconds + min(leg.ready_seconds + earlier[place], later[place])

    bests = [best_seconds(leg) for leg in prefill]
    chosen = _picked(prefill, bests, request.prefill_home, pick)
    together = [_together(chosen, leg) for leg in decode]
    partner = _picked(decode, together, request.home, pick, min(bests))
    return Pair(chosen, partner, min(bests))


def _picked(
    legs: Sequence[Leg], seconds: Sequence[float], home: int | None, pick: Pick, lowest_seconds: float | None = None
) -> Leg:
    rank = pick([leg.rank for leg in legs], seconds, home, lowest_seconds)
    return next(leg for leg in legs if leg.rank is rank)


# --- decisions ------------------------------------------------------------------------------------


def _paired(pair: Pair, ways: Ways, request: RouteRequest) -> Decision:
    chosen, decode, reusable = pair.prefill.rank, pair.decode.rank, request.reusable_tokens
    expected_tokens = reusable.get(chosen.slot, 0)
    best_tokens = max(reusable.get(rank.slot, 0) for rank in ways.prefill)
    reason = Affinity.reason(chosen, _home(ways.prefill, request.prefill_home), request)
    if request.exclude:
        reason = Reason.RETRY
    elif len(ways.prefill) == len(ways.decode) == 1 and not ways.alone:
        reason = Reason.ONLY
    prefill = Decision(
        slot=chosen.slot,
        id=chosen.id,
        reason=reason,
        expected_cached_tokens=expected_tokens,
        best_cached_tokens=best_tokens,
        expected_prefill_seconds=pair.prefill.price.work_seconds,
        transfer_tokens=_missing_tokens(decode, request),
    )
    return msgspec.structs.replace(prefill, slot=decode.slot, id=decode.id, prefill=prefill)


def _by_itself(chosen: RankView, ways: Ways, request: RouteRequest, view: FleetView) -> Decision:
    if request.exclude:
        reason = Reason.RETRY
    elif chosen.part.role is WorkerRole.DECODE:
        reason = Reason.BYPASS if has_partner(view, request, chosen) else Reason.DEGRADED
    elif len(ways.alone) == 1 and not ways.decode:
        reason = Reason.ONLY
    else:
        reason = Affinity.reason(chosen, _home(ways.alone, request.home), request)
    return Decision(
        slot=chosen.slot,
        id=chosen.id,
        reason=reason,
        expected_cached_tokens=request.reusable_tokens.get(chosen.slot, 0),
        best_cached_tokens=max(request.reusable_tokens.get(rank.slot, 0) for rank in ways.alone),
        expected_prefill_seconds=work_seconds(chosen, request),
    )
