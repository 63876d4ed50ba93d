"""Who may start and who waits."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from router.core.admission import (
    Admission,
    AdmissionParameters,
    Admit,
    Barrier,
    Hold,
    Passage,
    Released,
)
from router.core.types import RankStatus, RouteRequest
from tests.fakes.admission_desk import AlwaysHold, Desk, ask, fleet


def test_room_is_made_by_idleness_alone_and_no_more_than_is_needed() -> None:
    """After a minute a, b and c may lapse. d needs 300: with 100 free a's 300 must go, b and c stay admitted."""
    desk = Desk(fleet(1))
    for number, name in enumerate("abc"):
        desk.turn(ask(name, 300 if name == "a" else 250), now=float(number))
    assert isinstance(desk.offer(ask("d", 300), now=10.0), Hold)
    assert desk.release(now=60.0) is None  # a has been idle for sixty seconds, not for longer

    released = desk.release(now=63.0)
    assert released == Released(1, Admit(Passage.ROOM, frozenset({0})))
    desk.admission.start(ask("d", 300), 0, desk.view, now=63.0)
    assert desk.admission.charged_tokens(0) == 250 + 250 + 300
    assert isinstance(desk.offer(ask("b", 250), now=64.0), Admit)
    assert isinstance(desk.offer(ask("a", 300), now=64.0), Hold)


@pytest.mark.parametrize(
    ("pool_tokens", "loadable_tokens", "seconds"),
    [
        (1_000_000, 0, 37.5),  # .3 of 1,000,000 tokens at 8,000 a second
        (1_000_000, 100_000, 15.0),  # loading takes a fifth of that: 7.5 s, and 15 are the least
        (2_400_000, 70_000, 18.0),  # .3 of a fifth of 300 s
        (2_400_000, 69_999, 90.0),  # too little of it is loadable
        (9_000_000, 0, 120.0),  # the most
    ],
)
def test_room_is_kept_in_proportion_to_what_a_context_costs_to_get_back(
    pool_tokens: int, loadable_tokens: int, seconds: float
) -> None:
    """A rank that computes 100,000 tokens in 12.5 s: 10,000 a second, a quarter more for attention."""
    desk = Desk(fleet(1, pool_tokens=pool_tokens), AlwaysHold())
    desk.admission = Admission(AdmissionParameters(), AlwaysHold())
    idle = ask("idle", 100_000, loadable={0: loadable_tokens})
    size = pool_tokens * 85 // 100 - 50_000  # beside the idle one there is no room for this
    desk.turn(idle)
    assert isinstance(desk.offer(ask("next", size)), Hold)

    assert desk.release(now=seconds) is None
    assert desk.release(now=seconds + 0.001) is not None


def test_who_was_at_work_meanwhile_is_not_idle() -> None:
    """A turn at 40 s begins the minute anew."""
    desk = Desk(fleet(1))
    desk.turn(ask("a", 500))
    desk.turn(ask("a", 500), now=40.0)
    assert isinstance(desk.offer(ask("b", 500), now=50.0), Hold)

    assert desk.release(now=99.0) is None
    assert desk.release(now=101.0) is not None


def test_what_a_lower_tier_holds_is_warm() -> None:
    """70 % of the prompt can be loaded: it passes those who wait, while it fits."""
    desk = Desk(fleet(1))
    desk.turn(ask("a", 600))
    assert isinstance(desk.offer(ask("waits", 500)), Hold)

    assert desk.offer(ask("b", 400, loadable={0: 280})) == Admit(Passage.WARM, frozenset({0}))
    assert isinstance(desk.offer(ask("c", 400, loadable={0: 279})), Hold)


def test_what_is_wholly_cached_counts_in_full_beside_all_that_is_charged() -> None:
    """The same prompt under a new name: 400 of it, 150 of a subagent and 500 more are 1.05 of the pool, 501 are not."""
    desk = Desk(fleet(1))
    desk.turn(ask("a", 400))
    desk.turn(ask("a", 150, agent="helper"))
    assert isinstance(desk.offer(ask("waits", 500)), Hold)

    assert desk.offer(ask("b", 500, cached={0: 500})) == Admit(Passage.WARM, frozenset({0}))
    assert isinstance(desk.offer(ask("c", 501, cached={0: 501})), Hold)


def test_the_queue_is_strictly_first_come_first_served() -> None:
    """A small request that would fit waits behind a large one that does not; when that gives up, it goes."""
    desk = Desk(fleet(1))
    desk.turn(ask("a", 500))
    large = desk.offer(ask("large", 600))
    small = desk.offer(ask("small", 100))

    assert large == Hold(1, 1, Barrier.BUDGET)
    assert small == Hold(2, 2, Barrier.QUEUE)
    assert desk.release(now=1.0) is None
    desk.admission.cancel(1)
    assert desk.admission.position(2) == 1
    assert desk.release(now=1.0) == Released(2, Admit(Passage.ROOM, frozenset({0})))
    assert desk.admission.held == 0


def test_who_is_admitted_passes_those_who_wait() -> None:
    """An admitted conversation, its subagent, a warm prompt that fits, and one that names nobody."""
    desk = Desk(fleet(1))
    desk.turn(ask("a", 600))
    assert isinstance(desk.offer(ask("waits", 500)), Hold)

    passages = [
        desk.offer(request)
        for request in (
            ask("a", 650),
            ask("other", 800, agent="child"),
            ask("warm", 400, cached={0: 280}),  # 70 %, and 600 + 400 are within 1.05 of the pool
            RouteRequest(model="m", prompt_tokens=800, output_tokens=0),
        )
    ]
    assert [passage.why for passage in passages] == [
        Passage.ADMITTED,
        Passage.CHILD,
        Passage.WARM,
        Passage.KEYLESS,
    ]
    assert isinstance(desk.offer(ask("lukewarm", 400, cached={0: 279})), Hold)
    assert isinstance(desk.offer(ask("too large", 500, cached={0: 500})), Hold)


def test_one_cold_conversation_at_a_time_on_each_rank() -> None:
    """Two ranks take one each; the third waits for a first token, and goes to the rank that gave it."""
    desk = Desk(fleet(2))
    first = desk.send(ask("a", 100))
    desk.send(ask("b", 100))

    assert desk.offer(ask("c", 100)) == Hold(1, 1, Barrier.COLD_START)
    first.first_token()
    first.first_token()
    assert desk.release(now=1.0) == Released(1, Admit(Passage.ROOM, frozenset({0})))


def test_a_rank_without_active_conversations_takes_any_size() -> None:
    """A prompt larger than the budget does not wait for ever: it starts where all others have fallen idle."""
    desk = Desk(fleet(1))
    desk.turn(ask("a", 500))
    assert isinstance(desk.offer(ask("giant", 950)), Hold)

    assert desk.release(now=60.0) is None
    assert isinstance(desk.release(now=61.0), Released)


def test_no_rank_that_is_not_ready_is_offered() -> None:
    """Rank 0 is draining."""
    view = fleet(2)
    desk = Desk(replace(view, ranks=(replace(view.ranks[0], status=RankStatus.DRAINING), view.ranks[1])))

    assert desk.offer(ask("a", 100)) == Admit(Passage.ROOM, frozenset({1}))


def test_an_admitted_turn_that_is_cached_passes_whatever_its_rank_is_charged() -> None:
    """It brings 100 of 800 tokens to a rank charged with 700 and 300: holding it would only lose what is there."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.turn(ask("b", 150))
    desk.turn(ask("a", 700))
    desk.turn(ask("b", 300, cached={0: 250}))

    assert isinstance(desk.offer(ask("a", 800)), Hold)
    assert desk.offer(ask("a", 800, cached={0: 700})) == Admit(Passage.ADMITTED, frozenset({0}))


def test_no_room_is_seen_on_a_rank_that_keeps_failing() -> None:
    """Rank 0 is full, rank 1 fails: held. Where all fail, they are as good as any. What failed goes where it fits."""
    desk = Desk(fleet(3), AlwaysHold())
    desk.turn(ask("a", 800))
    view = replace(desk.view, ranks=desk.view.ranks[:2])
    admission = desk.admission

    assert isinstance(admission.offer(ask("b", 400), view, now=0.0, closed=frozenset({1})), Hold)
    assert admission.release(view, now=0.0, closed=frozenset({1})) is None
    assert admission.release(view, now=0.0, closed=frozenset({0, 1})) == Released(
        1, Admit(Passage.ROOM, frozenset({1}))
    )
    failed = msgspec.structs.replace(ask("b", 400), exclude=frozenset({1}))
    assert desk.offer(failed) == Admit(Passage.ROOM, frozenset({2}))


def test_nobody_waits_for_room_where_nobody_serves() -> None:
    """It passes, and is told that there is no worker, whether it comes or waits already."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.turn(ask("a", 800))
    assert isinstance(desk.offer(ask("b", 400)), Hold)
    down = replace(desk.view, ranks=(replace(desk.view.ranks[0], status=RankStatus.DOWN),))

    assert desk.admission.offer(ask("c", 400), down, now=0.0) == Admit(Passage.UNSERVED)
    assert desk.admission.release(down, now=0.0) == Released(1, Admit(Passage.UNSERVED))
    assert desk.admission.release(down, now=0.0) is None
    assert desk.admission.held == 0


def test_who_waits_is_judged_by_what_is_cached_by_then() -> None:
    """At first nothing of it; when somebody else has brought its prompt, it is warm, and passes."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.turn(ask("a", 600))
    held = desk.offer(ask("b", 400))
    assert isinstance(held, Hold)
    assert desk.admission.heads == [held.ticket]
    assert desk.admission.held_tokens == 400
    desk.admission.renew(held.ticket, ask("b", 400, cached={0: 390}))
    desk.admission.renew(99, ask("b", 400))

    assert desk.release(now=0.0) == Released(1, Admit(Passage.WARM, frozenset({0})))


def test_a_warm_head_ties_nobody_to_its_rank_where_there_is_room_elsewhere() -> None:
    """Rank 0 holds most of the prompt, as it does of everybody's who shares its head; rank 1 has room. While another
    waits, only the warm rank is open: room is the queue's."""
    desk = Desk(fleet(2), AlwaysHold())
    assert desk.offer(ask("new", 400, cached={0: 380})) == Admit(Passage.WARM, frozenset({0, 1}))

    desk.send(ask("cold", 800))
    desk.admission.start(ask("other", 800), 1, desk.view, now=0.0)
    assert isinstance(desk.offer(ask("waits", 500)), Hold)
    assert desk.offer(ask("warm", 200, cached={0: 190})) == Admit(Passage.WARM, frozenset({0}))


def test_what_is_warm_waits_elsewhere_for_a_cold_start_like_any_other() -> None:
    """Rank 1 has room, but computes a cold conversation: only where it is warm it may go until that has its token."""
    desk = Desk(fleet(2), AlwaysHold())
    cold = desk.admission.start(ask("cold", 100), 1, desk.view, now=0.0)
    assert desk.offer(ask("new", 400, cached={0: 380})) == Admit(Passage.WARM, frozenset({0}))

    cold.first_token()
    assert desk.offer(ask("new", 400, cached={0: 380})) == Admit(Passage.WARM, frozenset({0, 1}))
