"""What is shared pulls nobody where everybody is, and children leave room for their parent."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.core.cost import CostParameters, prices
from router.core.load import LoadBook
from router.core.pd import prefill_prices
from router.core.policy import make_policy
from router.core.session import identify
from router.core.session_table import SessionTable
from router.core.types import FleetView, RankPace, RankView, Residency, RouteRequest, SessionKey
from tests.fakes.rank_views import rank_view

PACE = RankPace(token_seconds=0.001, attention_seconds=0.0)
CHILD, PARENT = SessionKey("t", "s", "reader-1"), SessionKey("t", "s")


def ranks(count: int, **fields: object) -> list[RankView]:
    return [rank_view(slot, pace=PACE, **fields) for slot in range(count)]


def asked(**fields: object) -> RouteRequest:
    plain: dict[str, object] = {"model": "m", "prompt_tokens": 1000, "output_tokens": 10, "session": PARENT}
    return RouteRequest(**plain | fields)  # type: ignore[arg-type]


def test_sessions_that_begin_one_by_one_with_one_head_are_spread() -> None:
    """Each one's turns are short and over before the next comes, so that no rank is ever busy: by the head alone all
    would go to the first one's rank, and queue there on the day when all ask for more.
    """
    book, table, rng = LoadBook(), SessionTable(max_sessions=1000, idle_seconds=3600), random.Random(3)
    views = [rank_view(slot, pace=PACE, load=book.load(slot)) for slot in range(8)]
    policy, held = make_policy("affinity", CostParameters()), dict[int, int]()
    homes: Counter[int] = Counter()
    for number in range(24):
        now, session = 100.0 * number, SessionKey("t", f"s{number}")
        decision = policy(
            FleetView(tuple(views)),
            asked(session=session, reusable_tokens=dict(held), at_home=table.at_home),
            rng,
            now,
        )
        assert decision is not None
        for turn in (now, now + 1.0):
            table.finish("m", session, table.start("m", session, slot=decision.slot, now=turn), now=turn)
        held[decision.slot] = 950
        homes[decision.slot] += 1

    assert sorted(homes.values()) == [6, 6, 6, 6]  # the mean of eight ranks is 3, and its root 1.7


@pytest.mark.parametrize(
    ("at_home", "return_ratio", "move_seconds"),
    [
        ({}, 1.0, 0.675),  # three fourths of the head's 0.9 s are not credited
        ({0: 1}, 1.0, 0.675),  # the next one follows the first
        ({0: 3}, 1.0, 0.9),  # three are a crowd: the mean of four ranks is .75, and its root .87
        ({0: 40, 1: 40, 2: 38, 3: 38}, 1.0, 0.675),  # where all are, there is no crowd
        ({}, 0.0, 0.0),  # who does not come back has no followers
        ({0: 5}, 0.0, 0.9),  # one of a few may
    ],
)
def test_a_head_counts_for_nothing_in_a_crowd(
    at_home: dict[int, int], return_ratio: float, move_seconds: float
) -> None:
    """For a conversation that begins; 900 of its 1,000 tokens are on rank 0."""
    request = asked(reusable_tokens={0: 900}, at_home=at_home, return_ratio=return_ratio)
    first = prices(ranks(4), request, home=None, parameters=CostParameters(), now=0.0)[0]

    assert first.move_seconds == pytest.approx(move_seconds)


def test_what_a_child_pushes_out_of_its_parents_rank_is_wanted_back() -> None:
    """All of it, instead of half: both ranks are full."""
    request = asked(session=CHILD, parent_home=1)
    full = ranks(2, pool_tokens=5000, residency=Residency(5000))
    found = prices(full, request, home=None, parameters=CostParameters(), now=0.0)

    assert [price.evict_seconds for price in found] == pytest.approx([0.5 * 1.01, 1.01])


def test_where_ranks_share_the_work_its_prompts_are_at_home_elsewhere() -> None:
    """On prefill ranks: what is pushed out of the one that computed the parent's last prompt is computed again."""
    request = asked(session=CHILD, parent_home=5, prefill_parent_home=1)
    full = ranks(2, pool_tokens=5000, residency=Residency(5000))
    found = prefill_prices(full, request, parameters=CostParameters(), now=0.0)

    assert [price.evict_seconds for price in found] == pytest.approx([0.5, 1.0])


def test_a_subagent_knows_its_parents_home() -> None:
    """Whether it is an agent of the parent's session, or names the parent beside a session of its own."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    table.start("m", PARENT, slot=3, now=0)
    child = identify({"x-session-id": "c", "x-parent-session-id": PARENT.session}, {}, tenant=PARENT.tenant)
    stray = identify({"x-session-id": "c", "x-parent-session-id": PARENT.session}, {}, tenant="another")
    assert child is not None
    assert stray is not None

    assert table.parent_home("m", CHILD, now=1) == 3
    assert table.parent_home("m", child, now=1) == 3
    assert table.parent_home("m", PARENT, now=1) is None
    assert table.parent_home("m", stray, now=1) is None


def test_a_subagents_subagent_knows_its_home() -> None:
    """As long as that is known, and of the parent that was heard of last where there are two of one name."""
    table = SessionTable(max_sessions=3, idle_seconds=60)

    def named(name: str, parent: str) -> SessionKey:
        key = identify({"x-session-id": name, "x-parent-session-id": parent}, {}, tenant=PARENT.tenant)
        assert key is not None
        return key

    child, grandchild = named("c", PARENT.session), named("g", "c")
    table.finish("m", child, table.start("m", child, slot=2, now=0), now=0)
    table.finish("m", grandchild, table.start("m", grandchild, slot=4, now=0), now=0)
    assert table.parent_home("m", grandchild, now=1) == 2
    assert table.parent_home("m", named("h", "g"), now=1) == 4
    assert table.parent_home("n", grandchild, now=1) is None

    other = named("c", "another")
    table.finish("m", other, table.start("m", other, slot=5, now=2), now=2)
    assert table.parent_home("m", grandchild, now=3) == 5
    for number in range(3):  # more than there is room for
        key = SessionKey(PARENT.tenant, f"s{number}")
        table.finish("m", key, table.start("m", key, slot=number, now=4), now=4)
    assert table.parent_home("m", grandchild, now=5) is None
    assert not table._parents


def test_of_two_parents_of_one_name_the_one_used_last_counts() -> None:
    """A request that left its parent's name out makes another conversation of it, and that may be over, or its rank."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    child, alone = SessionKey(PARENT.tenant, "c", f"child of {PARENT.session}"), SessionKey(PARENT.tenant, "c")
    grandchild = SessionKey(PARENT.tenant, "g", "child of c")
    for key, slot, now in ((alone, 1, 0), (child, 2, 1)):
        table.finish("m", key, table.start("m", key, slot=slot, now=now), now=now)
    assert table.parent_home("m", grandchild, now=2) == 2
    table.finish("m", alone, table.start("m", alone, slot=1, now=3), now=3)
    assert table.parent_home("m", grandchild, now=4) == 1
    table.forget_slot(1)
    assert table.parent_home("m", grandchild, now=4) == 2
    table.forget_slot(2)
    assert table.parent_home("m", grandchild, now=4) is None


def test_a_session_comes_back_once_it_has_been_answered() -> None:
    """Here or at another router, as is told when it asks here; not when it asks twice at once, or is tried again."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    first = table.start("m", PARENT, slot=3, now=0)
    table.start("m", PARENT, slot=3, now=0)
    assert table.at_home == {}
    table.finish("m", PARENT, first, now=1)
    table.start("m", PARENT, slot=3, now=2)
    assert table.at_home == {3: 1}

    elsewhere = SessionKey("t", "elsewhere")
    table.adopt("m", elsewhere, slot=3, used_at=3, now=3, is_own=False)
    table.adopt("m", elsewhere, slot=3, used_at=4, now=4, is_own=False)
    assert table.at_home == {3: 1}
    table.start("m", elsewhere, slot=3, now=5)
    assert table.at_home == {3: 2}
    assert not table.is_beginning("m", elsewhere)

    failing = SessionKey("t", "failing")
    table.finish("m", failing, table.start("m", failing, slot=4, now=6), now=7, is_answered=False)
    table.finish("m", failing, table.start("m", failing, slot=3, now=8), now=9)
    assert table.at_home == {3: 2}
    table.start("m", failing, slot=3, now=10)
    assert table.at_home == {3: 3}


def test_who_comes_back_late_is_no_crowd() -> None:
    """A reader's next message may come or not; an agent's comes within seconds."""
    table = SessionTable(max_sessions=10, idle_seconds=600)
    for now, counted in ((0, {}), (11, {}), (21, {3: 1}), (200, {3: 1})):
        binding = table.start("m", PARENT, slot=3, now=now)
        assert table.at_home == counted
        table.finish("m", PARENT, binding, now=now)


@pytest.mark.parametrize("seed", range(5))
def test_sessions_at_home_are_counted(seed: int) -> None:
    """Once they have come back: through moves, idleness, a full table, ranks that leave and others in their slots.
    Children are not.
    """
    rng = random.Random(seed)
    table = SessionTable(max_sessions=20, idle_seconds=50)
    running = []
    for now in range(800):
        slot, key = rng.randrange(6), SessionKey("t", f"s{rng.randrange(40)}", rng.choice(["", "", "", "child"]))
        match rng.randrange(8):
            case 0:
                table.forget_slot(slot)
            case 1:
                table.adopt("m", key, slot=slot, used_at=now - rng.randrange(3), now=now, is_own=False)
            case 2 | 3 if running:
                table.finish("m", *running.pop(rng.randrange(len(running))), now=now)
            case _:
                running.append((key, table.start("m", key, slot=slot, now=now)))
        counted = Counter(
            binding.homes[0].slot
            for (_, session), binding in table.recent()
            if binding.comes_back and not session.agent and not binding.homes[0].is_over
        )
        assert {slot: count for slot, count in table.at_home.items() if count} == counted
