"""Prefill and decode chosen together: against all pairs priced one by one, with the formula written out here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from router.core import pd
from router.core.cost import CostParameters
from router.core.pace import prior
from router.core.pd import make_role_policy
from router.core.types import (
    Decision,
    FleetView,
    Handover,
    Part,
    RankId,
    RankLoad,
    RankStatus,
    RankView,
    Reason,
    RouteRequest,
    SessionKey,
    Trust,
    WorkerRole,
)
from router.core.ways import can_serve, lacking

NOW = 100.0
#: An idle rank of this pace computes 1,000 tokens a second, whatever lies before them, and fetches 10,000.
TOKEN_SECONDS, TRANSFER_SECONDS = 1e-3, 1e-4
EITHER = frozenset(Handover)


def rank(
    slot: int,
    role: WorkerRole,
    *,
    handover: Handover = Handover.BOOTSTRAP,
    sufficient: bool = True,
    status: RankStatus = RankStatus.READY,
    waiting_seconds: float = 0.0,
    waiting: int | None = None,
    answering: int = 0,
    factor: float = 1.0,
) -> RankView:
    pace = prior(1 / TOKEN_SECONDS)
    pace.attention_seconds, pace.transfer_token_seconds, pace.factor = 0.0, TRANSFER_SECONDS, factor
    waiting = waiting if waiting is not None else int(waiting_seconds > 0)
    load = RankLoad(
        inflight=waiting + answering, waiting=waiting, waiting_seconds=waiting_seconds, serving_since=NOW, recent_at=NOW
    )
    part = Part(role, handover, sufficient)
    return RankView(slot, RankId(f"w{slot}", 0), frozenset({"m"}), status, load, pace, Trust(), part=part)


def unified(slot: int, **options: object) -> RankView:
    return rank(slot, WorkerRole.UNIFIED, **options)  # type: ignore[arg-type]


def prefill(slot: int, **options: object) -> RankView:
    return rank(slot, WorkerRole.PREFILL, **options)  # type: ignore[arg-type]


def decode(slot: int, **options: object) -> RankView:
    return rank(slot, WorkerRole.DECODE, **options)  # type: ignore[arg-type]


def ask(
    prompt_tokens: int = 1000,
    *,
    held: Mapping[int, int] | None = None,
    home: int | None = None,
    prefill_home: int | None = None,
    exclude: frozenset[int] = frozenset(),
    handovers: frozenset[Handover] = EITHER,
    stored: Mapping[int, int] | None = None,
) -> RouteRequest:
    return RouteRequest(
        model="m",
        prompt_tokens=prompt_tokens,
        output_tokens=10,
        reusable_tokens=held or {},
        session=SessionKey("t", "s"),
        home=home,
        prefill_home=prefill_home,
        exclude=exclude,
        handovers=handovers,
        stored_tokens=stored or {},
    )


def decide(
    *ranks: RankView, request: RouteRequest, policy: str = "affinity", seed: int = 0, move_weight: float = 16.0
) -> Decision | None:
    roles = make_role_policy(policy, CostParameters(move_weight=move_weight))
    return roles(FleetView(ranks, is_disaggregated=True), request, random.Random(seed), NOW)


def chosen(decision: Decision | None) -> tuple[int | None, int, Reason]:
    """Slots of the prefill leg and of the answering rank, and why."""
    assert decision is not None
    return decision.prefill.slot if decision.prefill else None, decision.slot, decision.reason


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((prefill(0), decode(1, sufficient=False)), (0, 1)),
        ((prefill(0), decode(1, sufficient=True)), (0, 1)),
        ((prefill(0, status=RankStatus.DOWN), decode(1)), (None, 1)),
        ((unified(0),), (None, 0)),
        ((prefill(0, handover=Handover.PARAMS), decode(1, handover=Handover.PARAMS, sufficient=False)), (0, 1)),
    ],
)
@pytest.mark.parametrize("home", [None, 0, 1])
def test_a_part_of_the_fleet_that_nobody_plays_has_no_price(
    ranks: tuple[RankView, ...], expected: tuple[int | None, int], home: int | None
) -> None:
    """Fleets in which nobody answers alone, nobody prefills or nobody decodes: a new session's head is stored there."""
    decision = decide(*ranks, request=ask(home=home, stored={0: 512, 1: 256}))
    assert chosen(decision)[:2] == expected


# --- the price, by brute force ----------------------------------------------------------------------


def shared_seconds(rank: RankView, request: RouteRequest) -> float:
    """Three fourths of what a conversation without a home saves: others could have used a copy made elsewhere."""
    held = request.reusable_tokens.get(rank.slot, 0)
    return TOKEN_SECONDS * rank.pace.factor * (held - held // 4)


def computing(rank: RankView, request: RouteRequest) -> float:
    return TOKEN_SECONDS * rank.pace.factor * (request.prompt_tokens - request.reusable_tokens.get(rank.slot, 0))


def leaving(home: RankView, ranks: Sequence[RankView], request: RouteRequest) -> float:
    """What home saves, but for what all hold."""
    held = request.reusable_tokens
    return TOKEN_SECONDS * home.pace.factor * (held.get(home.slot, 0) - min(held.get(one.slot, 0) for one in ranks))


def pair_seconds(
    p: RankView,
    d: RankView,
    request: RouteRequest,
    *,
    move_weight: float,
    home: bool,
    at: RankView | None,
    among: Sequence[RankView],
) -> float:
    """The price of a pair as the page on disaggregation has it; idle ranks, no pools, no recent work.

    ``home``: d is the session's home or it has none; ``at``: its prefill home, if it has one, ``among`` others.
    """
    held = request.reusable_tokens
    tokens = request.prompt_tokens
    seconds = max(p.load.waiting_seconds + computing(p, request), d.load.waiting_seconds)
    seconds += 0.005 + TRANSFER_SECONDS * (tokens - held.get(d.slot, 0))
    seconds += 60 * d.pace.factor * d.pace.decode_request_seconds * d.load.inflight
    if not home:
        assert request.home is not None
        seconds += move_weight * TRANSFER_SECONDS * held.get(request.home, 0)
    if request.prefill_home is None:
        seconds += shared_seconds(p, request)
    if at is not None and at is not p:
        seconds += move_weight * leaving(at, among, request)
    return seconds


def alone_seconds(
    d: RankView, request: RouteRequest, *, move_weight: float, home: RankView | None, among: Sequence[RankView]
) -> float:
    own = computing(d, request)
    seconds = d.load.waiting_seconds + own
    seconds += 60 * d.pace.factor * d.pace.decode_request_seconds * d.load.inflight
    seconds += own * max(d.load.inflight - d.load.waiting, 1 if d.part.role is WorkerRole.DECODE else 0)
    if request.home is None:
        seconds += shared_seconds(d, request)
    if home is not None and home is not d:
        seconds += move_weight * leaving(home, among, request)
    return seconds


@pytest.mark.parametrize("seed", range(300))
def test_the_choice_is_the_cheapest_of_all(seed: int) -> None:
    """Of all compatible pairs and all ranks that can do it alone, priced one by one, the cheapest is taken."""
    draw = random.Random(seed)
    count = draw.randint(2, 7)
    ranks = [
        rank(
            slot,
            draw.choice([WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE, WorkerRole.UNIFIED]),
            handover=draw.choice(list(Handover)),
            sufficient=draw.random() < 0.5,
            waiting_seconds=draw.choice([0.0, draw.uniform(0, 2)]),
            answering=draw.choice([0, 0, draw.randint(1, 30)]),
        )
        for slot in range(count)
    ]
    held = {slot: draw.randint(0, 1000) for slot in range(count) if draw.random() < 0.5}
    answering = [one.slot for one in ranks if one.part.role is not WorkerRole.PREFILL]
    computing = [one.slot for one in ranks if one.part.role is WorkerRole.PREFILL]
    weight = draw.choice([0.0, 1.0, 16.0])
    request = ask(
        held=held,
        home=draw.choice([None, *answering]),
        prefill_home=draw.choice([None, *computing]),
        handovers=frozenset(draw.sample(list(Handover), draw.randint(1, 2))),
    )
    able = [
        one
        for one in ranks
        if one.part.role is WorkerRole.UNIFIED or (one.part.role is WorkerRole.DECODE and one.part.is_self_sufficient)
    ]
    pairs = [
        (p, d)
        for p in ranks
        for d in ranks
        if p.part.role is WorkerRole.PREFILL
        and d.part.role is WorkerRole.DECODE
        and p.part.handover is d.part.handover
        and p.part.handover in request.handovers
    ]
    # A home that could not serve in this way draws nobody to itself.
    homes = {d.slot for _, d in pairs}
    prompts = [one for one in ranks if one.slot in computing and one.part.handover in request.handovers]
    prompt_homes = {one.slot for one in prompts}
    costs: dict[tuple[int | None, int], float] = {
        (p.slot, d.slot): pair_seconds(
            p,
            d,
            request,
            move_weight=weight,
            home=request.home not in homes or request.home == d.slot,
            at=ranks[request.prefill_home] if request.prefill_home in prompt_homes else None,
            among=prompts,
        )
        for p, d in pairs
    } | {
        (None, d.slot): alone_seconds(
            d,
            request,
            move_weight=weight,
            home=ranks[request.home] if request.home in {one.slot for one in able} else None,
            among=able,
        )
        for d in able
    }
    if len({one.part.role for one in ranks}) == 1 and ranks[0].part.role is WorkerRole.UNIFIED:
        return  # no roles at all: that is the other policy's
    decision = decide(*ranks, request=request, seed=seed, move_weight=weight)
    if not costs:
        assert decision is None
        return
    assert decision is not None
    way = (decision.prefill.slot if decision.prefill else None, decision.slot)
    assert costs[way] == pytest.approx(min(costs.values()), abs=3e-6)
    for seconds, ways in ((decision.pair_seconds, pairs), (decision.alone_seconds, able)):
        lowest = min((cost for (p, _), cost in costs.items() if (p is None) == (ways is able)), default=None)
        assert seconds == (pytest.approx(lowest, abs=3e-6) if lowest is not None else None)


def test_the_bypass_is_taken_where_it_costs_less_and_nowhere_else() -> None:
    """A decode rank that lacks u of 1,000 tokens: alone u ms twice; as a pair 100 ms of prompt, 5 ms, u/10 to fetch."""
    for missing in range(0, 1001, 10):
        request = ask(held={1: 1000 - missing, 0: 900}, home=1, prefill_home=0)
        pair_ms = 100 + 5 + missing / 10
        way, _, reason = chosen(decide(prefill(0), decode(1), request=request))
        assert (way is None) == (2 * missing <= pair_ms), missing
        assert (reason is Reason.BYPASS) == (way is None)


def test_answers_being_made_speak_against_a_bypass() -> None:
    """What is worth computing on an idle decode rank is not where it would keep ten answers waiting."""
    request = ask(held={1: 960, 0: 900}, home=1, prefill_home=0)
    assert chosen(decide(prefill(0), decode(1), request=request)) == (None, 1, Reason.BYPASS)
    assert chosen(decide(prefill(0), decode(1, answering=10), request=request)) == (0, 1, Reason.HOME)


def test_a_busy_prefill_pool_sends_more_to_decode_ranks() -> None:
    """With a second of prompts waiting, computing 300 tokens beside the answers is the quicker way."""
    request = ask(held={1: 700, 0: 900}, home=1, prefill_home=0)
    assert chosen(decide(prefill(0), decode(1), request=request)) == (0, 1, Reason.HOME)
    assert chosen(decide(prefill(0, waiting_seconds=1.0), decode(1), request=request)) == (None, 1, Reason.BYPASS)


def test_reasons_speak_of_the_prompt() -> None:
    """Home, prefix, spill and cold are said of the prefill rank."""
    fleet = (prefill(0), prefill(1), decode(2, sufficient=False))
    assert chosen(decide(*fleet, request=ask(held={0: 500}, prefill_home=0))) == (0, 2, Reason.HOME)
    assert chosen(decide(*fleet, request=ask(held={1: 500}))) == (1, 2, Reason.PREFIX)
    assert chosen(decide(*fleet, request=ask()))[2] is Reason.COLD
    hot = (prefill(0, waiting_seconds=60.0), *fleet[1:])
    assert chosen(decide(*hot, request=ask(held={0: 500}, prefill_home=0))) == (1, 2, Reason.SPILL)


def test_a_retry_takes_another_pair() -> None:
    """Ranks that failed are left out, and the reason is that it is a retry."""
    fleet = (prefill(0), prefill(1), decode(2), decode(3))
    request = ask(held={0: 900, 2: 500}, home=2, prefill_home=0, exclude=frozenset({0, 2}))
    assert chosen(decide(*fleet, request=request)) == (1, 3, Reason.RETRY)


def test_without_prefill_ranks_those_decode_ranks_serve_that_can() -> None:
    """A decode rank of SGLang refuses a prompt that nobody computed; others do it themselves."""
    assert chosen(decide(decode(0), request=ask())) == (None, 0, Reason.DEGRADED)
    assert decide(decode(0, sufficient=False), request=ask()) is None
    assert decide(decode(0, sufficient=False), prefill(1, handover=Handover.PARAMS), request=ask()) is None


def test_a_prefill_rank_never_answers() -> None:
    """Without decode ranks nothing is decided, and the missing role is named."""
    fleet = (prefill(0), prefill(1))
    assert decide(*fleet, request=ask()) is None
    assert lacking(FleetView(fleet), "m") is WorkerRole.DECODE
    assert not can_serve(fleet)
    assert lacking(FleetView((decode(0, sufficient=False),)), "m") is WorkerRole.PREFILL
    assert not can_serve([decode(0, sufficient=False)])
    assert not can_serve([decode(0, sufficient=False), prefill(1, handover=Handover.PARAMS)])
    assert can_serve([decode(0, sufficient=False), prefill(1)])
    assert can_serve([decode(0)])
    assert can_serve([unified(0)])
    assert lacking(FleetView((unified(0), prefill(1))), "m") is None


def test_what_cannot_be_split_goes_to_a_rank_that_does_it_all() -> None:
    """A batch that vLLM's contract cannot hand over is computed where it is answered."""
    fleet = (prefill(0, handover=Handover.PARAMS), decode(1, handover=Handover.PARAMS))
    request = ask(handovers=frozenset({Handover.BOOTSTRAP}))
    assert chosen(decide(*fleet, request=request)) == (None, 1, Reason.DEGRADED)


def test_what_has_no_answer_goes_anywhere() -> None:
    """Tokenizing and embedding need no decode rank."""
    assert chosen(decide(prefill(0), request=ask(handovers=frozenset())))[:2] == (None, 0)


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "session_hash"])
def test_other_policies_make_pairs_too(policy: str) -> None:
    """Each leg is chosen by the policy among the ranks of its role, and a prefill rank never answers."""
    fleet = (prefill(0), decode(1), prefill(2), decode(3), unified(4))
    roles = make_role_policy(policy, CostParameters())
    view, rng = FleetView(fleet, is_disaggregated=True), random.Random(0)
    ways = set()
    for number in range(60):
        request = RouteRequest("m", 100, 10, session=SessionKey("t", f"s{number}"), handovers=EITHER)
        decision = roles(view, request, rng, NOW)
        assert decision is not None
        ways.add((decision.prefill.slot if decision.prefill else None, decision.slot))
    assert ways <= {(p, d) for p in (0, 2) for d in (1, 3)} | {(None, 4)}
    assert {d for _, d in ways} == {1, 3, 4}
    assert {p for p, _ in ways} == {0, 2, None}


def test_a_draining_rank_keeps_its_own_prompts() -> None:
    """A session whose prompts a draining prefill rank computes stays; no other comes."""
    fleet = (prefill(0, status=RankStatus.DRAINING), prefill(1), decode(2, sufficient=False))
    assert chosen(decide(*fleet, request=ask(held={0: 900}, prefill_home=0)))[0] == 0
    assert chosen(decide(*fleet, request=ask(held={0: 900})))[0] == 1


def test_equals_are_drawn_by_lot() -> None:
    """Idle and empty, every pair is as likely as any other."""
    fleet = (prefill(0), prefill(1), decode(2, sufficient=False), decode(3, sufficient=False))
    seen = {chosen(decide(*fleet, request=ask(), seed=seed))[:2] for seed in range(40)}
    assert seen == {(0, 2), (0, 3), (1, 2), (1, 3)}


@pytest.mark.parametrize("dp_size", [1, 2, 3, 7, 8, 64])
def test_rooms_name_the_rank_and_never_repeat(dp_size: int) -> None:
    """63 bits at most, congruent to the rank modulo the ranks of the worker, no two alike."""
    rng = random.Random(1)
    rooms = [(rank, pd.room(rng, rank=rank, dp_size=dp_size)) for rank in range(dp_size) for _ in range(200)]
    assert all(0 <= found < 2**63 and found % dp_size == rank for rank, found in rooms)
    assert len({found for _, found in rooms}) == len(rooms)


def test_the_highest_room_fits() -> None:
    """The congruent room above the largest draw would need a 64th bit: the one below is taken."""

    class Highest(random.Random):
        def getrandbits(self, k: int) -> int:
            return 2**k - 1

    for dp_size in range(1, 65):
        for rank in range(dp_size):
            found = pd.room(Highest(), rank=rank, dp_size=dp_size)
            assert found < 2**63
            assert found % dp_size == rank
