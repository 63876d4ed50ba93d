"""What conversations are charged, on which rank, and until when."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import msgspec

from router.core.admission import (
    Admit,
    Barrier,
    Hold,
    Passage,
    Visit,
)
from router.core.admission_guard import Guard
from router.core.returns import Conversation
from router.core.types import RouteRequest, SessionKey
from tests.fakes.admission_desk import AlwaysHold, Desk, Ledger, ask, fleet, teach


def test_charges_stay_within_the_budget() -> None:
    """400 and 400 fit into 900; another 200 does not, and waits first in the queue."""
    desk = Desk(fleet(1))
    desk.turn(ask("a", 400))
    desk.turn(ask("b", 400))

    assert desk.offer(ask("c", 200)) == Hold(1, 1, Barrier.BUDGET)
    assert desk.admission.charged_tokens(0) == 800


def test_charges_lapse_while_nobody_is_held_too() -> None:
    """The guard is off and nobody comes back: of a hundred conversations those few stay charged that fit."""
    guard = Guard()
    teach(guard, "m", comes_back=False, now=-20.0)
    desk = Desk(fleet(1), guard)
    for number in range(100):
        desk.turn(ask(f"once{number}", 100), now=100.0 * number)

    assert desk.admission.charged_tokens(0) <= 900
    assert len(desk.admission.charges) <= 9


def test_subagents_are_charged_though_they_pass() -> None:
    """A child's 300 tokens beside 400 leave 200."""
    desk = Desk(fleet(1))
    desk.turn(ask("a", 400))
    desk.turn(ask("a", 300, agent="child"))

    assert isinstance(desk.offer(ask("b", 201)), Hold)
    desk.admission.cancel(1)
    assert isinstance(desk.offer(ask("b", 200)), Admit)


def test_what_all_ranks_hold_is_charged_to_nobody() -> None:
    """A system prompt of 300 tokens on both ranks: conversations of 500 occupy 200 by themselves."""
    desk = Desk(fleet(2))
    for name in "abcd":
        desk.turn(ask(name, 500, cached={0: 300, 1: 300}))

    assert desk.admission.charged_tokens(0) == 800


def test_what_no_other_conversation_has_is_charged_to_its_own() -> None:
    """A conversation of 500 tokens that both ranks have served, of which 100 are a head that others share."""
    desk = Desk(fleet(2))
    desk.turn(msgspec.structs.replace(ask("a", 500, cached={0: 400, 1: 400}), common_tokens=100))

    assert desk.admission.charged_tokens(0) == 400


def test_a_conversation_that_moves_takes_its_charge_along() -> None:
    """Booked on the rank it was sent to last."""
    desk = Desk(fleet(2))
    desk.turn(ask("a", 500))
    desk.admission.finish(desk.admission.start(ask("a", 600), 1, desk.view, now=1.0), now=1.0)

    assert (desk.admission.charged_tokens(0), desk.admission.charged_tokens(1)) == (0, 600)


def test_a_context_that_was_used_again_meanwhile_has_not_moved() -> None:
    """One request takes 500 tokens to rank 1. While it runs another is served on rank 0, and leaves them there."""
    desk = Desk(fleet(2))
    desk.turn(ask("a", 500))
    moving = desk.start(ask("a", 500), 1, now=2.0)
    desk.admission.finish(desk.start(ask("a", 500), 0, now=3.0), now=4.0)
    desk.admission.finish(moving, now=5.0)

    assert (desk.admission.charged_tokens(0), desk.admission.charged_tokens(1)) == (500, 500)


def test_a_lost_ranks_conversations_start_anew() -> None:
    """Its charges are gone with it, also those of a request that ends afterwards."""
    desk = Desk(fleet(1))
    visit = desk.send(ask("a", 800))
    desk.admission.forget_slot(0)
    desk.admission.finish(visit, now=1.0)

    assert desk.admission.charged_tokens(0) == 0
    assert desk.offer(ask("b", 800)) == Admit(Passage.ROOM, frozenset({0}))


#: Heads of 120 tokens that conversations share, by where they are cached: on all ranks, where nobody is charged for
#: them; on two, where everybody is; nowhere.
HEADS = (dict.fromkeys(range(3), 120), {0: 120, 1: 120}, {})


def test_admission_never_runs_over() -> None:
    """Random conversations of titles, turns, jumps and parallel requests that come, fail, are tried elsewhere, pause
    and go: counted by the test itself, they fit 0.9 of the pool where room was given, 1.05 where who was admitted grew;
    or one was alone.
    """
    rng = random.Random(7)
    desk = Desk(fleet(3), AlwaysHold())
    ledger = Ledger()
    waiting: dict[int, RouteRequest] = {}
    running: list[tuple[RouteRequest, int, int, int, Visit]] = []
    passed: Counter[Passage | str] = Counter()

    def start(request: RouteRequest, admit: Admit, now: float) -> None:
        assert request.session is not None
        assert admit.slots
        assert not admit.slots & request.exclude
        name, slot = request.session.session, rng.choice(sorted(admit.slots))
        others = ledger.tokens(slot, now=now, but=name)
        visit = desk.start(request, slot, allowed=admit.slots, now=now)
        was_flying = bool(ledger.flying.get((name, slot)))
        head = request.reusable_tokens
        tokens = request.prompt_tokens - (120 if len(head) == 3 else 0)
        found = head.get(slot, 0) if len(head) == 2 else 0
        ledger.sent(name, [slot], tokens, now=now, found=[found])
        running.append((request, slot, tokens, found, visit))
        passed[admit.why] += 1
        passed["elsewhere"] += bool(request.exclude)
        whole = ledger.tokens(slot, now=now)
        most = 900 if admit.why is Passage.ROOM else 1050
        assert whole <= most or (not others and not was_flying), (admit, whole)
        assert desk.admission.charged_tokens(slot) >= whole

    def offer(request: RouteRequest, now: float) -> None:
        answer = desk.offer(request, now=now)
        if isinstance(answer, Admit):
            start(request, answer, now)
        else:
            waiting[answer.ticket] = request

    for now in range(6000):
        number = rng.randrange(60 if now % 1000 < 700 else 2000)
        tokens = rng.choice((10, rng.randrange(50, 400), rng.randrange(50, 400), 700))
        head = HEADS[number % 3]
        offer(ask(f"s{number}", tokens + (120 if head else 0), cached=head), float(now))
        while running and rng.random() < 0.6:
            request, slot, tokens, found, visit = running.pop(rng.randrange(len(running)))
            assert request.session is not None
            is_kept = rng.random() < 0.8
            desk.admission.finish(visit, now=float(now), is_kept=is_kept)
            ledger.ended(request.session.session, slot, tokens, now=float(now), is_kept=is_kept, found=found)
            if not is_kept and len(request.exclude) < 2 and rng.random() < 0.5:
                offer(msgspec.structs.replace(request, exclude=request.exclude | {slot}), float(now))
        while (released := desk.release(now=float(now))) is not None:
            start(waiting.pop(released.ticket), released.admit, float(now))
        if rng.random() < 0.1 and waiting:
            desk.admission.cancel(waiting.popitem()[0])

    assert passed[Passage.ROOM] > 200
    assert passed[Passage.ADMITTED] > 100
    assert passed["elsewhere"] > 50
    for _, _, _, _, visit in running:
        desk.admission.finish(visit, now=6000.0)
    desk.admission.charges.age(9000.0)
    assert all(desk.admission.charges.book(slot).active_tokens == 0 for slot in range(3))


def test_what_is_charged_is_what_was_checked() -> None:
    """A head of 300 on both of two ranks, one of them full: a newcomer of 500, checked with 200, is sent with the other
    rank alone open, or after a failure on the one, and is charged 200. A head on two of three ranks is charged, though
    the third is not open."""
    request = ask("new", 500, cached={0: 300, 1: 300})
    replaced = msgspec.structs.replace
    for sent in (replaced(request, allowed=frozenset({0})), replaced(request, exclude=frozenset({1}))):
        desk = Desk(fleet(2), AlwaysHold())
        desk.admission.start(ask("full", 900), 1, desk.view, now=0.0)
        desk.turn(ask("half", 600))
        assert desk.offer(request) == Admit(Passage.ROOM, frozenset({0}))
        desk.admission.start(sent, 0, desk.view, now=0.0)
        assert desk.admission.charged_tokens(0) == 600 + 200

    desk = Desk(fleet(3), AlwaysHold())
    desk.start(ask("a", 500, cached={0: 300, 1: 300}), 0, allowed=frozenset({0, 1}))
    assert desk.admission.charged_tokens(0) == 500


def test_a_title_admits_no_prompt_of_any_size() -> None:
    """Twenty conversations begin with 10 tokens each and then ask with 400: two fit 1,050 beside the titles."""
    desk = Desk(fleet(1), AlwaysHold())
    for number in range(20):
        desk.turn(ask(f"s{number}", 10))
    answers = []
    for number in range(20):
        answers.append(desk.offer(ask(f"s{number}", 400)))
        if isinstance(answers[-1], Admit):
            desk.admission.start(ask(f"s{number}", 400), 0, desk.view, now=0.0)

    assert [isinstance(answer, Admit) for answer in answers] == [True, True] + 18 * [False]
    assert desk.admission.charged_tokens(0) == 2 * 400 + 18 * 10


def test_each_request_under_one_name_is_charged() -> None:
    """Under one id 400, 400, and no third; of a fork that finds 300 of its 400 there only the rest counts."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.send(ask("same", 400))
    desk.send(ask("same", 400))
    assert isinstance(desk.offer(ask("same", 400)), Hold)
    assert desk.admission.charged_tokens(0) == 800

    desk.admission.start(ask("same", 400, cached={0: 300}), 0, desk.view, now=0.0)
    assert desk.admission.charged_tokens(0) == 900


def test_what_one_finds_in_another_is_its_own_once_that_is_given_up() -> None:
    """800 and the same again, of which 790 are found in the first; that one ends before its first token. A third finds
    all of the second. No second conversation of 800 fits, whichever of them runs."""
    desk = Desk(fleet(1), AlwaysHold())
    first = desk.send(ask("s", 800))
    again = desk.start(ask("s", 800, cached={0: 790}), 0)
    third = desk.start(ask("s", 800, cached={0: 800}), 0)
    assert desk.admission.charged_tokens(0) == 810
    desk.admission.finish(first, now=1.0, is_kept=False)
    assert desk.admission.charged_tokens(0) == 800
    desk.admission.finish(again, now=2.0, is_kept=False)
    assert desk.admission.charged_tokens(0) == 800
    held = desk.offer(ask("next", 800), now=2.0)
    assert isinstance(held, Hold)
    desk.admission.finish(third, now=3.0, is_kept=False)
    assert desk.admission.charged_tokens(0) == 0


def test_what_runs_is_charged_whatever_ended_before_it() -> None:
    """A turn of 800 runs beside another that it finds in full. That one and four titles of 10 end first."""
    desk = Desk(fleet(1), AlwaysHold())
    other = desk.send(ask("s", 800))
    turn = desk.start(ask("s", 800, cached={0: 800}), 0)
    desk.admission.finish(other, now=1.0)
    for _ in range(4):
        desk.admission.finish(desk.start(ask("s", 10), 0), now=2.0)
    assert desk.admission.charged_tokens(0) == 800

    desk.admission.finish(turn, now=3.0)
    assert desk.admission.charged_tokens(0) == 800


def test_a_title_does_not_shrink_the_charge_of_what_runs_beside_it() -> None:
    """600 in flight on rank 0; a title of 10 tokens is sent to rank 1, a second one to rank 0, and both end first."""
    desk = Desk(fleet(2), AlwaysHold())
    turn = desk.send(ask("s", 600))
    for slot in (1, 0):
        title = desk.admission.start(ask("s", 10), slot, desk.view, now=0.0)
        assert desk.admission.charged_tokens(0) >= 600
        desk.admission.finish(title, now=0.0)
    assert (desk.admission.charged_tokens(0), desk.admission.charged_tokens(1)) == (600, 0)

    desk.admission.finish(turn, now=1.0)
    desk.turn(ask("s", 10), now=2.0)
    assert desk.admission.charged_tokens(0) == 600


def test_a_compacted_conversation_is_charged_less_after_some_turns() -> None:
    """From 600 to 100 tokens: four requests later nothing of the 600 is wanted any more."""
    desk = Desk(fleet(1))
    desk.turn(ask("s", 600))
    charged = []
    for turn in range(4):
        desk.turn(ask("s", 100 + turn), now=float(turn))
        charged.append(desk.admission.charged_tokens(0))

    assert charged == [600, 600, 600, 103]


def test_a_failed_request_leaves_no_charge() -> None:
    """The engine refused 800 tokens: another conversation starts at once. A turn that fails leaves the turn before."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.admission.finish(desk.send(ask("refused", 800)), now=0.0, is_kept=False)
    assert desk.admission.charged_tokens(0) == 0
    desk.turn(ask("b", 500))
    desk.admission.finish(desk.send(ask("b", 600), now=1.0), now=1.0, is_kept=False)
    assert desk.admission.charged_tokens(0) == 500


def test_an_answer_is_charged_by_its_length_once_that_is_known() -> None:
    """200 tokens and at most 600 more in flight; the answer took 50."""
    desk = Desk(fleet(1))
    visit = desk.send(msgspec.structs.replace(ask("s", 200), output_tokens=600))
    assert desk.admission.charged_tokens(0) == 800
    desk.admission.finish(visit, now=1.0, output_tokens=50)
    assert desk.admission.charged_tokens(0) == 250


def test_charges_end_where_the_pool_is_unknown() -> None:
    """A thousand conversations, one each second, on a rank that does not say how much it holds."""
    view = fleet(1)
    desk = Desk(replace(view, ranks=(replace(view.ranks[0], pool_tokens=None),)))
    for second in range(1000):
        desk.turn(ask(f"once{second}", 100), now=float(second))

    assert len(desk.admission.charges) <= 62


def test_what_other_routers_have_admitted_takes_room() -> None:
    """They charge 600 of 1,000: no 400 fit beside that, 300 do, and the conversation whose 500 these are passes."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.view.ranks[0].load.charged_tokens = 600

    held = desk.offer(ask("a", 400))
    assert isinstance(held, Hold)
    desk.admission.cancel(held.ticket)
    theirs = msgspec.structs.replace(ask("b", 550), charged_elsewhere={0: 500})
    assert desk.offer(theirs) == Admit(Passage.ADMITTED, frozenset({0}))
    desk.turn(ask("c", 300))
    assert isinstance(desk.offer(ask("d", 10)), Hold)
    assert desk.offer(theirs) == Admit(Passage.ADMITTED, frozenset({0}))
    desk.admission.charges.drop_idle(("m", SessionKey("", "c")))
    assert desk.admission.charged_tokens(0) == 0


def test_what_other_routers_have_admitted_makes_the_idle_lapse() -> None:
    """Two idle for long, 300 each, beside 100: with 400 charged by others the older one goes, without them neither."""
    for elsewhere_tokens, left in ((0, 700), (400, 400)):
        desk = Desk(fleet(1), AlwaysHold())
        desk.turn(ask("a", 300))
        desk.turn(ask("b", 300), now=1.0)
        desk.view.ranks[0].load.charged_tokens = elsewhere_tokens
        desk.admission.start(ask("c", 100), 0, desk.view, now=100.0)
        assert desk.admission.charged_tokens(0) == left


def test_a_conversation_that_changes_router_is_no_cold_start() -> None:
    """Another router charges it with 500 of its 550 tokens: they are there, though nothing is known of the cache. With
    300 of them it is one, and the next one waits."""
    for tokens, answer in ((500, Admit(Passage.ROOM, frozenset({0}))), (300, Hold(1, 1, Barrier.COLD_START))):
        desk = Desk(fleet(1), AlwaysHold())
        moved = msgspec.structs.replace(ask("s", 550), charged_elsewhere={0: tokens})
        desk.admission.start(moved, 0, desk.view, now=0.0)
        assert desk.offer(ask("new", 100)) == answer


def test_who_wants_to_know_is_told_of_every_change() -> None:
    """Of those that open, close, lapse and end: what a copy of the charges that follows them has is what there is."""
    desk = Desk(fleet(2), AlwaysHold())
    charges, copy = desk.admission.charges, dict[tuple[str, int], int]()

    def changed(conversation: Conversation, slot: int) -> None:
        charge, name = charges.of(conversation).get(slot), conversation[1].session
        copy.pop((name, slot), None)
        if charge is not None and not charge.is_lapsable:
            copy[name, slot] = 0 if charge.inflight else charge.tokens

    charges.on_changed = changed
    visit = desk.start(ask("a", 300), 0)
    assert copy == {("a", 0): 0}
    desk.admission.finish(visit, now=0.0)
    desk.turn(ask("b", 200))
    assert copy == {("a", 0): 300, ("b", 0): 200}
    moved = desk.start(ask("a", 310), 1)
    assert copy == {("a", 0): 300, ("b", 0): 200, ("a", 1): 0}
    desk.admission.finish(moved, now=1.0)
    assert copy == {("b", 0): 200, ("a", 1): 310}
    desk.admission.finish(desk.start(ask("c", 100), 0, now=2.0), now=2.0, is_kept=False)
    charges.age(61.0)
    assert copy == {("a", 1): 310}
    desk.admission.forget_slot(1)
    assert copy == {}
