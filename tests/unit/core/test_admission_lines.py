"""Who waits for whom: those that could go to the same ranks, and nobody for ever."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from router.core.admission import Admit, Barrier, Hold, Passage, Released
from router.core.types import FleetView, RankStatus, RouteRequest
from tests.fakes.admission_desk import AlwaysHold, Desk, ask, fleet


def for_model(model: str, name: str, tokens: int, *, exclude: frozenset[int] = frozenset()) -> RouteRequest:
    return msgspec.structs.replace(ask(name, tokens), model=model, exclude=exclude)


def two_models() -> FleetView:
    """Rank 0 serves a, rank 1 serves b."""
    view = fleet(2)
    return replace(
        view, ranks=tuple(replace(rank, models=frozenset({m})) for rank, m in zip(view.ranks, "ab", strict=True))
    )


def test_a_full_model_holds_nobody_of_another() -> None:
    """Rank 0 is full and a's second conversation waits; b's first goes, its second waits for b's rank alone."""
    desk = Desk(two_models(), AlwaysHold())
    full = desk.start(for_model("a", "full", 800), 0)
    full.first_token()
    assert desk.offer(for_model("a", "waits", 500)) == Hold(1, 1, Barrier.BUDGET)

    admit = desk.offer(for_model("b", "first", 600))
    assert admit == Admit(Passage.ROOM, frozenset({1}))
    first = desk.start(for_model("b", "first", 600), 1)
    first.first_token()
    assert desk.offer(for_model("b", "second", 500)) == Hold(2, 2, Barrier.BUDGET)
    assert desk.offer(for_model("b", "third", 10)) == Hold(3, 3, Barrier.QUEUE)

    desk.admission.finish(first, now=1.0, is_kept=False)
    assert desk.release(now=1.0) == Released(2, Admit(Passage.ROOM, frozenset({1})))
    second = desk.start(for_model("b", "second", 500), 1)
    assert desk.release(now=1.0) is None
    second.first_token()
    assert desk.release(now=1.0) == Released(3, Admit(Passage.ROOM, frozenset({1})))
    assert (desk.admission.held, desk.admission.heads) == (1, [1])


def test_who_waits_for_one_rank_leaves_the_others_to_those_behind() -> None:
    """It failed on rank 0 and waits for rank 1, which is full: a newcomer gets rank 0, but not what rank 1 has left."""
    desk = Desk(fleet(2), AlwaysHold())
    for slot in (0, 1):
        desk.start(ask(f"full{slot}", 600), slot).first_token()
    retry = msgspec.structs.replace(ask("retry", 500), exclude=frozenset({0}))
    assert desk.offer(retry) == Hold(1, 1, Barrier.BUDGET)

    assert desk.offer(ask("new", 200)) == Admit(Passage.ROOM, frozenset({0}))
    desk.start(ask("new", 200), 0).first_token()
    assert desk.offer(ask("newer", 200)) == Hold(2, 2, Barrier.QUEUE)


def test_who_waits_for_ranks_that_go_holds_up_nobody() -> None:
    """A model's only rank is down: its first is told so, and the other model's go."""
    desk = Desk(two_models(), AlwaysHold())
    desk.start(for_model("a", "full", 900), 0)
    desk.start(for_model("b", "full", 900), 1)
    assert isinstance(desk.offer(for_model("a", "waits", 500)), Hold)
    assert isinstance(desk.offer(for_model("b", "waits", 500)), Hold)
    down = replace(desk.view, ranks=(replace(desk.view.ranks[0], status=RankStatus.DOWN), desk.view.ranks[1]))

    assert desk.admission.release(down, now=1.0) == Released(1, Admit(Passage.UNSERVED))
    assert desk.admission.release(down, now=1.0) is None
    desk.admission.forget_slot(1)
    assert desk.admission.release(down, now=1.0) == Released(2, Admit(Passage.ROOM, frozenset({1})))


def test_who_waits_and_is_warm_goes_by_the_rule_of_who_comes() -> None:
    """Behind one of 600 that does not fit, a warm one of 300 waits since 900 are charged; once 700 are, it goes."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.start(ask("a", 700), 0).first_token()
    other = desk.start(ask("b", 200), 0)
    other.first_token()
    assert isinstance(desk.offer(ask("cold", 600)), Hold)
    assert isinstance(desk.offer(ask("warm", 300, cached={0: 290})), Hold)
    assert desk.release(now=0.0) is None

    desk.admission.finish(other, now=1.0, is_kept=False)
    assert desk.release(now=1.0) == Released(2, Admit(Passage.WARM, frozenset({0})))
    assert desk.release(now=1.0) is None


def test_no_stream_of_warm_ones_keeps_a_cold_one_waiting_for_ever() -> None:
    """A conversation a second, each warm but for 20 of its 100 tokens, answered at once and kept for a minute. One of
    300 comes when nine are charged: it is overtaken by two, as 150 tokens lie between the budgets of 900 and 1,050, and
    goes when five of the eleven have lapsed, the fifth at 65.4 s.
    """
    desk = Desk(fleet(1), AlwaysHold())
    waiting: dict[int, RouteRequest] = {}
    overtook, cold = 0, 0
    released: float | None = None

    def serve(request: RouteRequest, now: float) -> None:
        desk.admission.finish(desk.start(request, 0, now=now), now=now + 0.4)

    for second in range(1, 100):
        now = float(second)
        if second == 10:
            held = desk.offer(ask("cold", 300), now=now)
            assert isinstance(held, Hold)
            cold = held.ticket
        request = ask(f"w{second}", 100, cached={0: 80})
        answer = desk.offer(request, now=now)
        if isinstance(answer, Admit):
            overtook += second >= 10
            serve(request, now)
        else:
            waiting[answer.ticket] = request
        while released is None and (gone := desk.release(now=now + 0.7)) is not None:
            if gone.ticket == cold:
                released = now
                break
            overtook += second >= 10 and gone.ticket > cold
            serve(waiting.pop(gone.ticket), now + 0.7)
        if released is not None:
            break

    assert overtook == 2
    assert released == 65.0


def test_who_is_drained_has_room_elsewhere_before_those_who_wait() -> None:
    """300 at home on rank 0, and 400 free on rank 1, for which somebody with 500 waits: where rank 0 is drained, and
    only then, the next turn may go to rank 1, too.
    """
    desk = Desk(fleet(2), AlwaysHold())
    desk.start(ask("full", 500), 1).first_token()
    desk.turn(ask("other", 450))
    desk.admission.finish(desk.start(ask("s", 300), 0), now=0.0)
    assert isinstance(desk.offer(ask("waits", 500)), Hold)

    turn = msgspec.structs.replace(ask("s", 350, cached={0: 300}), home=0)
    assert desk.offer(turn) == Admit(Passage.ADMITTED, frozenset({0}))
    draining = replace(desk.view.ranks[0], status=RankStatus.DRAINING)
    desk.view = replace(desk.view, ranks=(draining, desk.view.ranks[1]))
    assert desk.offer(turn) == Admit(Passage.ADMITTED, frozenset({0, 1}))


def test_each_may_be_overtaken_anew() -> None:
    """A warm one of 200 passes the first of two that wait for 500 beside 600, and another must not; once the first has
    given up, it passes the second."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.start(ask("full", 600), 0).first_token()
    for name in ("first", "second"):
        assert isinstance(desk.offer(ask(name, 500)), Hold)
    passing = ask("warm", 200, cached={0: 200})
    assert isinstance(desk.offer(passing), Admit)
    desk.start(passing, 0)
    another = desk.offer(ask("another", 200, cached={0: 200}))
    assert isinstance(another, Hold)
    assert desk.release(now=0.0) is None

    desk.admission.cancel(1)
    assert desk.release(now=0.0) == Released(another.ticket, Admit(Passage.WARM, frozenset({0})))
