"""Where other routers decide too: new sessions of prefill and decode ranks go where all of them agree."""

from __future__ import annotations

import random
from collections import Counter
from copy import copy

import pytest

from router.core.cost import CostParameters
from router.core.pace import prior
from router.core.pd import make_role_policy
from router.core.policy import Policy
from router.core.types import (
    FleetView,
    Handover,
    Part,
    RankId,
    RankLoad,
    RankStatus,
    RankView,
    RouteRequest,
    SessionKey,
    Trust,
    WorkerRole,
)

NOW = 100.0
PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


def rank(
    slot: int, role: WorkerRole, *, factor: float = 1.0, waiting_seconds: float = 0.0, sufficient: bool = False
) -> RankView:
    """An idle one computes 1,000 tokens a second and fetches 10,000."""
    pace = prior(1000.0)
    pace.attention_seconds, pace.transfer_token_seconds, pace.factor = 0.0, 1e-4, factor
    waiting = int(waiting_seconds > 0)
    load = RankLoad(
        inflight=waiting, waiting=waiting, waiting_seconds=waiting_seconds, serving_since=NOW, recent_at=NOW
    )
    part = Part(role, Handover.PARAMS, sufficient)
    rank_id = RankId(f"w{slot}", 0)
    return RankView(slot, rank_id, frozenset({"m"}), RankStatus.READY, load, pace, Trust(), part=part)


def fleet(*ranks: RankView) -> FleetView:
    return FleetView(ranks, is_disaggregated=True)


def ask(number: int, **fields: object) -> RouteRequest:
    """A prompt of 1,000 tokens of the session of this number."""
    options = {"session": SessionKey("t", f"s{number}"), "handovers": frozenset(Handover), **fields}
    return RouteRequest(model="m", prompt_tokens=1000, output_tokens=10, **options)  # type: ignore[arg-type]


class Router:
    """A policy that draws its own lots, over the fleet as this router sees it."""

    def __init__(self, view: FleetView, *, seed: int) -> None:
        self._view, self._rng = view, random.Random(seed)
        self.policy: Policy = make_role_policy("affinity", CostParameters(), agree=True)

    def decide(self, request: RouteRequest) -> tuple[int | None, int]:
        """Slots of the prefill leg and of the answering rank."""
        decision = self.policy(self._view, request, self._rng, NOW)
        assert decision is not None
        return decision.prefill and decision.prefill.slot, decision.slot


@pytest.fixture
def routers() -> tuple[Router, Router]:
    """Two over three prefill and three decode ranks; of the second's paces none is the first's."""
    first, second = (
        fleet(
            *(rank(slot, PREFILL, factor=factor + slot * step) for slot in range(3)),
            *(rank(slot, DECODE, factor=factor - slot * step) for slot in range(3, 6)),
        )
        for factor, step in ((1.0, 0.0), (1.05, 0.01))
    )
    return Router(first, seed=1), Router(second, seed=2)


def test_a_new_session_goes_to_one_pair(routers: tuple[Router, Router]) -> None:
    """Whichever router it reaches; and many sessions go to all ranks."""
    first, second = routers
    found = [first.decide(ask(number)) for number in range(60)]

    assert [second.decide(ask(number)) for number in range(60)] == found
    assert {prompt for prompt, _ in found} == {0, 1, 2}
    assert {answer for _, answer in found} == {3, 4, 5}
    second.policy = copy(first.policy)  # for decisions that are only shown
    assert [second.decide(ask(number)) for number in range(60)] == found


def test_a_session_stays_in_its_pair(routers: tuple[Router, Router]) -> None:
    """Its place on the ring is for when it has no home; where one of the two has gone, the other is kept."""
    for router in routers:
        for number in range(20):
            held = {1: 900, 4: 900}
            assert router.decide(ask(number, home=4, prefill_home=1, reusable_tokens=held)) == (1, 4)
            assert router.decide(ask(number, home=9, prefill_home=1, reusable_tokens={1: 900}))[0] == 1


def test_a_head_is_worth_more_than_agreement(routers: tuple[Router, Router]) -> None:
    """All routers see in the caches who has it."""
    for router in routers:
        assert {router.decide(ask(number, reusable_tokens={2: 900}))[0] for number in range(20)} == {2}


def test_a_rank_that_does_it_all_is_agreed_on_too() -> None:
    """While the prefill rank has a minute of work before it."""
    view = fleet(rank(0, PREFILL, waiting_seconds=60.0), *(rank(slot, DECODE, sufficient=True) for slot in range(1, 4)))
    first, second = Router(view, seed=1), Router(view, seed=2)
    found = [first.decide(ask(number)) for number in range(30)]

    assert [second.decide(ask(number)) for number in range(30)] == found
    assert set(found) == {(None, 1), (None, 2), (None, 3)}


def test_agreement_costs_no_more_than_is_near() -> None:
    """The cheapest pair takes 1.105 s, so those of up to 1.48 s take sessions. The prefill rank that waits 0.2 s
    makes it 1.305 s, and the decode rank that is ready after 1.3 s, with either of them, 1.405 s. Ranks that are ready
    after 1.5 s make it 1.605 s: too much, also where they would be near to a pair that is itself no more than near.
    """
    view = fleet(
        rank(0, PREFILL),
        rank(1, PREFILL, waiting_seconds=0.2),
        rank(2, DECODE),
        rank(3, DECODE, waiting_seconds=1.3),
        rank(4, DECODE, waiting_seconds=1.5),
        rank(5, PREFILL, waiting_seconds=0.5),
    )
    router = Router(view, seed=1)
    found = Counter(router.decide(ask(number)) for number in range(120))
    assert set(found) == {(0, 2), (0, 3), (1, 2), (1, 3)}
