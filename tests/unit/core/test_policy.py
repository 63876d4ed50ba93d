"""Decisions on hand-made fleets; every expected value is arithmetic written out."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.cost import CostParameters, price, prices
from router.core.load import LoadBook, recent_seconds
from router.core.pace import prefill_seconds, prior
from router.core.policy import Affinity, Policy, RoundRobin, SessionHash, least_loaded, make_policy
from router.core.types import (
    FleetView,
    RankPace,
    RankStatus,
    RankView,
    Reason,
    Residency,
    RouteRequest,
    SessionKey,
)
from tests.fakes.rank_views import rank_view

#: 1 ms a token, no attention term: prices can be read off.
PACE = RankPace(token_seconds=0.001, attention_seconds=0.0)


class Fleet:
    """Ranks 0..n-1 of one model, with a load book behind them."""

    def __init__(self, ranks: int) -> None:
        self.book = LoadBook()
        self.ranks = [self.rank(slot) for slot in range(ranks)]

    def rank(self, slot: int, *, status: RankStatus = RankStatus.READY, pace: RankPace = PACE) -> RankView:
        return rank_view(
            slot,
            status=status,
            load=self.book.load(slot),
            pace=pace,
            residency=Residency(),
        )

    @property
    def view(self) -> FleetView:
        return FleetView(ranks=tuple(self.ranks))


def request(**fields: object) -> RouteRequest:
    return RouteRequest(**{"model": "m", "prompt_tokens": 1000, "output_tokens": 10, **fields})  # type: ignore[arg-type]


AFFINITY = Affinity(CostParameters(move_weight=16.0))


def decide(policy: Policy, fleet: Fleet, asked: RouteRequest, *, seed: int = 0, now: float = 0.0) -> tuple[int, Reason]:
    decision = policy(fleet.view, asked, random.Random(seed), now)
    assert decision is not None
    return decision.slot, decision.reason


def test_a_session_stays_where_its_prefix_is() -> None:
    """Home holds 900 of 1,000 tokens and is idle, as everybody is."""
    asked = request(reusable_tokens={2: 900}, home=2)

    assert decide(AFFINITY, Fleet(4), asked) == (2, Reason.HOME)


def test_a_prefix_without_a_home_is_followed() -> None:
    """No session is known, yet one rank saves 0.9 s of prefill."""
    assert decide(AFFINITY, Fleet(4), request(reusable_tokens={1: 900})) == (1, Reason.PREFIX)


@pytest.mark.parametrize(("queued_seconds", "expected"), [(15.25, (0, Reason.HOME)), (15.3, (1, Reason.SPILL))])
def test_a_warm_session_outwaits_a_queue_up_to_a_bound(queued_seconds: float, expected: tuple[int, Reason]) -> None:
    """Leaving costs what home saves; staying costs the queue.

    Leaving for an idle rank: 16 * 0.9 + 1.0 = 15.4 s. Staying: the queue, 0.1, 0.006 for decoding beside another, and,
    as home is busy, 2 * 15.25 * ln 2 / 180 * 0.1 = 0.012: 15.37 s, or 15.42 s with 15.3 s in the queue.
    """
    fleet = Fleet(2)
    fleet.book.open(0, prompt_tokens=0, prefill_tokens=0, seconds=queued_seconds, now=0.0)

    assert decide(AFFINITY, fleet, request(reusable_tokens={0: 900}, home=0)) == expected


@pytest.mark.parametrize(
    ("who", "return_ratio", "bound_seconds"),
    [
        (None, 1.0, 0.9),  # nobody in particular: all that is saved
        (SessionKey("t", "new"), 1.0, 0.225),  # one that begins: a fourth of it, the head being others', too
        (SessionKey("t", "new"), 0.0, 0.9),  # unless nobody ever comes back
        (SessionKey("t", "new", "child"), 1.0, 1.35),  # a subagent: half as much again
    ],
)
def test_how_long_a_head_is_waited_for(who: SessionKey | None, return_ratio: float, bound_seconds: float) -> None:
    """Rank 0 holds 900 of 1,000 tokens and is queued for: who has no home waits up to what the head is worth."""
    for queued_seconds, slot in ((bound_seconds - 0.01, 0), (bound_seconds + 0.01, 1)):
        fleet = Fleet(2)
        fleet.ranks[0].load.waiting, fleet.ranks[0].load.waiting_seconds = 1, queued_seconds
        asked = request(reusable_tokens={0: 900}, session=who, return_ratio=return_ratio)

        assert decide(AFFINITY, fleet, asked)[0] == slot


@pytest.mark.parametrize(
    ("who", "bound_seconds"),
    [
        (SessionKey("t", "new"), 1.5),  # three who follow
        (SessionKey("t", "new", "child"), 0.5),  # one
    ],
)
def test_a_head_is_made_ready_where_it_is_stored(who: SessionKey, bound_seconds: float) -> None:
    """Rank 0 stores 500 of 1,000 tokens and can use none of them for want of windows: 0.5 s for who comes after."""
    for queued_seconds, slot in ((bound_seconds - 0.01, 0), (bound_seconds + 0.01, 1)):
        fleet = Fleet(2)
        fleet.ranks[0].load.waiting, fleet.ranks[0].load.waiting_seconds = 1, queued_seconds

        assert decide(AFFINITY, fleet, request(stored_tokens={0: 500}, session=who))[0] == slot


@pytest.mark.parametrize(
    ("fields", "move_seconds"),
    [
        ({}, [0.0, 1.2, 1.5]),
        ({"reusable_tokens": {1: 500}}, [0.0, 0.375, 0.0]),  # ready on rank 1: three fourths of 0.5 s are not credited
        ({"reusable_tokens": {1: 100}}, [0.0, 1.2 + 0.075, 1.2]),  # as far as it is ready nobody has to make it so
        ({"home": 2}, [0.0, 0.0, 0.0]),  # whoever has been somewhere has a history of its own
    ],
)
def test_a_head_that_is_ready_anywhere_is_made_ready_nowhere_else(
    fields: dict[str, object], move_seconds: list[float]
) -> None:
    """The part of the price that is others': rank 0 stores 500 tokens without their windows."""
    fleet = Fleet(3)
    asked = request(session=SessionKey("t", "new"), stored_tokens={0: 500, 1: 100}, **fields)
    home = None if asked.home is None else fleet.ranks[asked.home]
    found = prices(fleet.ranks, asked, home=home, parameters=CostParameters(), now=0.0)

    assert [entry.move_seconds for entry in found] == pytest.approx(move_seconds)


@pytest.mark.parametrize(
    ("recent_seconds", "waiting", "bound_seconds"),
    [
        (0.0, 0, 0.9),  # idle ranks: the work alone, 1.0 s elsewhere and 0.1 s at home
        (129.84, 0, 1.8),  # rho = 0.5: 2 * 0.5 * (1.0 - 0.1) more for the busy rank it would be brought to
        (129.84, 2, 3.6),  # and 2 * 1 * 0.9 for those who come before the two that wait there are served
        (194.77, 6, 18.45),  # rho = 0.75: 6 * 3 * 0.9, and 2 * 0.75 * (1.0 - 0.1)
    ],
)
def test_readers_stay_where_ranks_are_busy(recent_seconds: float, waiting: int, bound_seconds: float) -> None:
    """Of conversations that do not come back: rho is the recent seconds times ln 2 / 180 s; 900 tokens are at home.
    Those who wait elsewhere are short, and count by their number alone."""
    for queued_seconds, slot in ((bound_seconds - 0.05, 0), (bound_seconds + 0.05, 1)):
        fleet = Fleet(2)
        fleet.ranks[0].load.waiting, fleet.ranks[0].load.waiting_seconds = 1, queued_seconds
        fleet.ranks[1].load.waiting = waiting
        for rank in fleet.ranks:
            rank.load.recent_seconds = recent_seconds
        asked = request(reusable_tokens={0: 900}, home=0, return_ratio=0.0)

        assert decide(AFFINITY, fleet, asked)[0] == slot


@pytest.mark.parametrize(("factors", "move_seconds"), [((16.0, 1.0, 1.0), 14.4), ((1.0, 4.0, 4.0), 14.4)])
def test_a_slow_home_is_as_easy_to_leave_as_any(factors: tuple[float, ...], move_seconds: float) -> None:
    """What 900 tokens save is lost 16 times where they are computed again, a millisecond each. That others are slow is
    in the price of their own work, four times as much, and does not count again for what is to come."""
    fleet = Fleet(3)
    for slot, factor in enumerate(factors):
        fleet.ranks[slot] = fleet.rank(slot, pace=RankPace(token_seconds=0.001, attention_seconds=0.0, factor=factor))
    decision = AFFINITY(fleet.view, request(reusable_tokens={0: 900}, home=0), random.Random(0), 0.0)
    assert decision is not None
    assert [each.move_seconds for each in decision.prices] == pytest.approx([0.0, move_seconds, move_seconds])


@given(
    waits=st.lists(st.floats(0.0, 3000.0), min_size=2, max_size=2).map(sorted),
    others=st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=5),
    held_tokens=st.integers(0, 200_000),
    return_ratio=st.floats(0.0, 1.0),
    factor=st.floats(0.2, 16.0),
)
def test_a_longer_queue_at_home_keeps_nobody_there(
    waits: list[float], others: list[float], held_tokens: int, return_ratio: float, factor: float
) -> None:
    """Whatever the other ranks have to do, and however slow home is: staying grows dearer by the queue at least, and
    leaving costs the same."""
    asked = request(
        prompt_tokens=200_100, reusable_tokens={0: held_tokens}, home=0, return_ratio=return_ratio, output_tokens=0
    )
    found = []
    for waiting_seconds in waits:
        fleet = Fleet(1 + len(others))
        fleet.ranks[0] = fleet.rank(0, pace=RankPace(token_seconds=0.001, attention_seconds=0.0, factor=factor))
        for slot, seconds in enumerate([waiting_seconds, *others]):
            fleet.book.open(slot, prompt_tokens=0, prefill_tokens=0, seconds=seconds, now=0.0)
        decision = AFFINITY(fleet.view, asked, random.Random(0), 0.0)
        assert decision is not None
        found.append({each.slot: each.total_seconds for each in decision.prices})
    short, long = found
    assert long[0] - short[0] >= factor * (waits[1] - waits[0]) - 1e-6
    assert all(long[slot] == short[slot] for slot in short if slot)


@pytest.mark.parametrize(("queued_seconds", "slot"), [(1.43, 0), (1.45, 1)])
def test_what_home_would_only_load_ties_a_session_once(queued_seconds: float, slot: int) -> None:
    """900 of 1,000 tokens lie in home's lower tier: 0.28 s there, 1 s elsewhere. The 0.72 s saved count once more."""
    fleet = Fleet(2)
    fleet.ranks[0].load.waiting, fleet.ranks[0].load.waiting_seconds = 1, queued_seconds

    assert decide(AFFINITY, fleet, request(loadable_tokens={0: 900}, home=0))[0] == slot


def test_a_cold_session_is_free_to_move() -> None:
    """Home holds nothing any more: what it would save is nothing, and it queues."""
    fleet = Fleet(2)
    fleet.book.open(0, prompt_tokens=0, prefill_tokens=0, seconds=0.5, now=0.0)

    assert decide(AFFINITY, fleet, request(home=0)) == (1, Reason.COLD)


def test_a_head_that_all_ranks_hold_keeps_nobody_at_home() -> None:
    """Compacted: 120 of 300 tokens are left at home, as elsewhere. Any queue is longer than none."""
    fleet = Fleet(2)
    fleet.ranks[0].load.waiting, fleet.ranks[0].load.waiting_seconds = 1, 0.05
    asked = request(prompt_tokens=300, reusable_tokens={0: 120, 1: 120}, home=0)

    assert decide(AFFINITY, fleet, asked) == (1, Reason.PREFIX)
    assert price(fleet.ranks[1], asked, home=fleet.ranks[0], parameters=CostParameters(), now=0.0).move_seconds == 0.0


def test_equal_ranks_share_cold_requests_at_random() -> None:
    """Four idle ranks, nothing cached: every rank is drawn, by the seeded generator alone."""
    fleet = Fleet(4)
    drawn = [decide(AFFINITY, fleet, request(), seed=seed)[0] for seed in range(400)]

    assert all(70 <= count <= 130 for count in Counter(drawn).values())
    assert drawn == [decide(AFFINITY, fleet, request(), seed=seed)[0] for seed in range(400)]


def test_sequential_cold_traffic_spreads_though_nothing_is_in_flight() -> None:
    """Forty requests, each over before the next: recent work alone tells the ranks apart, and all get ten or so."""
    fleet, rng = Fleet(4), random.Random(0)
    served: Counter[int] = Counter()
    for number in range(40):
        decision = AFFINITY(fleet.view, request(), rng, float(number))
        assert decision is not None
        served[decision.slot] += 1
        claim = fleet.book.open(decision.slot, prompt_tokens=1000, prefill_tokens=1000, seconds=1.0, now=float(number))
        fleet.book.close(claim, now=number + 0.5)

    assert all(9 <= count <= 11 for count in served.values())


def test_who_begins_avoids_a_rank_whose_conversations_pause() -> None:
    """Rank 0 was sent 8 s of work a minute for ten minutes, then nothing for ten; rank 1 12 s in all, five minutes ago.
    By the shorter memory rank 0 is the quieter one."""
    fleet = Fleet(2)
    for slot, seconds, times in ((0, 8.0, range(0, 600, 60)), (1, 12.0, range(900, 901))):
        for now in times:
            sent = fleet.book.open(slot, prompt_tokens=1000, prefill_tokens=1000, seconds=seconds, now=float(now))
            fleet.book.close(sent, now=now + seconds)

    paused, quiet = (recent_seconds(rank.load, now=1200.0) for rank in fleet.ranks)
    assert paused < quiet
    assert decide(AFFINITY, fleet, request(), now=1200.0)[0] == 1


def test_a_distrusted_prediction_counts_for_less() -> None:
    """Rank 0 promises 900 but has kept a tenth of its promises; rank 1 promises 200 and keeps them."""
    fleet = Fleet(2)
    fleet.ranks[0].trust.ratio = 0.1

    assert decide(AFFINITY, fleet, request(reusable_tokens={0: 900, 1: 200})) == (1, Reason.PREFIX)


@pytest.mark.parametrize(
    ("resident_tokens", "pushed_tokens"),
    [(0, 0), (3990, 0), (4500, 510), (5000, 1010), (9000, 1010)],  # by more than it adds no prompt pushes others out
)
def test_a_full_pool_is_a_price(resident_tokens: int, pushed_tokens: int) -> None:
    """Of 5,000 tokens, of what the cold prompt and its answer, 1,010, push out there, half of which will be missed."""
    full = rank_view(0, pace=PACE, pool_tokens=5000, residency=Residency(resident_tokens))
    found = price(full, request(), home=None, parameters=CostParameters(), now=0.0)

    assert found.evict_seconds == pytest.approx(0.5 * 0.001 * pushed_tokens)


def test_of_equals_home_is_taken() -> None:
    """It has nothing, so nothing keeps the session there; but nothing speaks for another rank either."""
    for policy in (AFFINITY, Affinity(CostParameters(), agree=True)):
        for number in range(20):
            asked = request(home=2, session=SessionKey("t", f"s{number}"))
            assert decide(policy, Fleet(4), asked, seed=number) == (2, Reason.HOME)


@pytest.mark.parametrize(("cached", "expected"), [({}, {0, 1, 2}), ({2: 900}, {0})])
def test_where_a_near_rank_has_something_routers_agree_on_the_cheapest(
    cached: dict[int, int], expected: set[int]
) -> None:
    """Computing takes 1 s, and of the queues that of rank 2 is the longest: what it has makes up for most of it. New
    sessions go to all ranks that are near while those are cold, else to the cheapest though it is cold itself.
    """
    fleet = Fleet(3)
    for slot, queued_seconds in ((1, 0.1), (2, 0.3)):
        fleet.ranks[slot].load.waiting, fleet.ranks[slot].load.waiting_seconds = 1, queued_seconds
    policy = Affinity(CostParameters(), agree=True)
    asked = [request(session=SessionKey("t", f"s{number}"), reusable_tokens=cached) for number in range(40)]

    assert {decide(policy, fleet, one)[0] for one in asked} == expected


def test_a_slow_rank_is_dearer() -> None:
    """Three times the seconds for the same prefill."""
    fleet = Fleet(2)
    fleet.ranks[0] = fleet.rank(0, pace=RankPace(token_seconds=0.001, attention_seconds=0.0, factor=3.0))

    assert decide(AFFINITY, fleet, request()) == (1, Reason.COLD)


@pytest.mark.parametrize("name", ["affinity", "round_robin", "least_loaded", "session_hash"])
def test_no_policy_picks_what_cannot_serve(name: str) -> None:
    """Down, pending, draining, excluded and other models' ranks get nothing; with nobody left the answer is None."""
    fleet = Fleet(1)
    for slot, status in ((1, RankStatus.DOWN), (2, RankStatus.PENDING), (3, RankStatus.DRAINING)):
        fleet.ranks.append(fleet.rank(slot, status=status))
    policy = make_policy(name, CostParameters())
    session = SessionKey("", "s")

    assert decide(policy, fleet, request(session=session))[0] == 0
    assert policy(fleet.view, request(session=session, exclude=frozenset({0})), random.Random(0), 0.0) is None
    assert policy(fleet.view, request(session=session, model="other"), random.Random(0), 0.0) is None


@pytest.mark.parametrize(("queued_seconds", "expected"), [(0.49, 0), (0.51, 1)])
def test_first_requests_meet_for_half_of_their_own_work(queued_seconds: float, expected: int) -> None:
    """Home has nothing for this prompt of 1 s, but the session's first request is on its way there."""
    for is_beginning, slot in ((True, expected), (False, 1)):
        fleet = Fleet(2)
        fleet.ranks[0].load.waiting, fleet.ranks[0].load.waiting_seconds = 1, queued_seconds

        assert decide(AFFINITY, fleet, request(home=0, is_beginning=is_beginning))[0] == slot


def test_a_draining_rank_keeps_its_own_sessions() -> None:
    """A session at home there may be served there; new ones go elsewhere."""
    fleet = Fleet(1)
    fleet.ranks.append(fleet.rank(1, status=RankStatus.DRAINING))

    assert decide(AFFINITY, fleet, request(home=1, reusable_tokens={1: 900}))[0] == 1
    assert decide(AFFINITY, fleet, request(reusable_tokens={1: 900}))[0] == 0


def test_round_robin_takes_turns() -> None:
    """Whatever is cached."""
    policy, fleet = RoundRobin(), Fleet(3)

    assert [decide(policy, fleet, request(reusable_tokens={0: 900}))[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_least_loaded_goes_by_waiting_prefill_then_requests() -> None:
    """A rank with one long prefill waiting is busier than one with two short decodes."""
    fleet = Fleet(2)
    fleet.book.open(0, prompt_tokens=0, prefill_tokens=0, seconds=9.0, now=0.0)
    for _ in range(2):
        fleet.book.first_byte(fleet.book.open(1, prompt_tokens=0, prefill_tokens=0, seconds=0.1, now=0.0), now=0.1)

    assert decide(least_loaded, fleet, request(), now=0.2) == (1, Reason.LOAD)


def test_session_hash_moves_only_the_lost_ranks_sessions() -> None:
    """Of 400 sessions on 8 ranks, those of a lost rank move and no other does."""
    policy, fleet = SessionHash(), Fleet(8)
    sessions = [request(session=SessionKey("t", f"s{number}")) for number in range(400)]
    before = [decide(policy, fleet, asked)[0] for asked in sessions]
    assert len(set(before)) == 8

    fleet.ranks[3] = fleet.rank(3, status=RankStatus.DOWN)
    after = [decide(policy, fleet, asked)[0] for asked in sessions]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 3)
    assert 3 not in after


def test_the_prior_costs_half_more_a_token_at_a_hundred_thousand_tokens() -> None:
    """The last token of a 100,000-token context against one at its start."""
    pace = prior(20_000.0)

    assert prefill_seconds(pace, uncached_tokens=1000, context_tokens=1000) == pytest.approx(0.05, rel=0.01)
    last = prefill_seconds(pace, uncached_tokens=1, context_tokens=100_000)
    assert last == pytest.approx(1.5 / 20_000, rel=0.001)
