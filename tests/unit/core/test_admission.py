"""Who may start and who waits; pools of 1,000 tokens, of which charges may fill 900, so that sums can be read off."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
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
    Visit,
)
from router.core.admission_guard import Guard
from router.core.load import LoadBook
from router.core.pace import prior
from router.core.types import FleetView, RankId, RankStatus, RankView, RouteRequest, SessionKey, Trust


def fleet(ranks: int, *, pool_tokens: int = 1000) -> FleetView:
    book = LoadBook()
    return FleetView(
        tuple(
            RankView(
                slot=slot,
                id=RankId("w", slot),
                models=frozenset({"m"}),
                status=RankStatus.READY,
                load=book.load(slot),
                pace=prior(10_000.0),
                trust=Trust(),
                pool_tokens=pool_tokens,
            )
            for slot in range(ranks)
        )
    )


def ask(
    name: str,
    tokens: int,
    *,
    agent: str = "",
    cached: dict[int, int] | None = None,
    loadable: dict[int, int] | None = None,
) -> RouteRequest:
    return RouteRequest(
        model="m",
        prompt_tokens=tokens,
        output_tokens=0,
        reusable_tokens=cached or {},
        loadable_tokens=loadable or {},
        session=SessionKey("", name, agent),
    )


class AlwaysHold(Guard):
    """A guard that is never persuaded."""

    def decide(self, *, now: float) -> bool:
        return True


class Desk:
    """An admission with the steps that a data plane takes."""

    def __init__(self, view: FleetView, guard: Guard | None = None) -> None:
        self.view = view
        self.admission = Admission(
            AdmissionParameters(budget_ratio=0.9, least_idle_seconds=60.0, most_idle_seconds=60.0), guard
        )

    def offer(self, request: RouteRequest, *, now: float = 0.0) -> Admit | Hold:
        return self.admission.offer(request, self.view, now=now)

    def send(self, request: RouteRequest, *, now: float = 0.0) -> Visit:
        """Offered, admitted, and sent to the first slot that is open to it."""
        admit = self.offer(request, now=now)
        assert isinstance(admit, Admit), admit
        return self.admission.start(request, min(admit.slots or {0}), self.view, now=now)

    def turn(self, request: RouteRequest, *, now: float = 0.0) -> None:
        """Sent, and over at once."""
        visit = self.send(request, now=now)
        self.admission.finish(visit, now=now)

    def release(self, *, now: float) -> Released | None:
        return self.admission.release(self.view, now=now)


def test_charges_stay_within_the_budget() -> None:
    """400 and 400 fit into 900; another 200 does not, and waits first in the queue."""
    desk = Desk(fleet(1))
    desk.turn(ask("a", 400))
    desk.turn(ask("b", 400))

    assert desk.offer(ask("c", 200)) == Hold(1, 1, Barrier.BUDGET)
    assert desk.admission.charged_tokens(0) == 800


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


def test_charges_lapse_while_nobody_is_held_too() -> None:
    """The guard is off and nobody comes back: of a hundred conversations those few stay charged that fit."""
    guard = Guard()
    guard.on = False
    guard._returns._departed = 1000.0
    desk = Desk(fleet(1), guard)
    for number in range(100):
        desk.turn(ask(f"once{number}", 100), now=100.0 * number)

    assert desk.admission.charged_tokens(0) <= 900
    assert len(desk.admission.charges) <= 9


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


def test_subagents_are_charged_though_they_pass() -> None:
    """A child's 300 tokens beside 400 leave 200."""
    desk = Desk(fleet(1))
    desk.turn(ask("a", 400))
    desk.turn(ask("a", 300, agent="child"))

    assert isinstance(desk.offer(ask("b", 201)), Hold)
    desk.admission.cancel(1)
    assert isinstance(desk.offer(ask("b", 200)), Admit)


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


def test_what_all_ranks_hold_is_charged_to_nobody() -> None:
    """A system prompt of 300 tokens on both ranks: conversations of 500 occupy 200 by themselves."""
    desk = Desk(fleet(2))
    for name in "abcd":
        desk.turn(ask(name, 500, cached={0: 300, 1: 300}))

    assert desk.admission.charged_tokens(0) == 800


def test_a_conversation_that_moves_takes_its_charge_along() -> None:
    """Booked on the rank it was sent to last."""
    desk = Desk(fleet(2))
    desk.turn(ask("a", 500))
    desk.admission.finish(desk.admission.start(ask("a", 600), 1, desk.view, now=1.0), now=1.0)

    assert (desk.admission.charged_tokens(0), desk.admission.charged_tokens(1)) == (0, 600)


def test_a_lost_ranks_conversations_start_anew() -> None:
    """Its charges are gone with it, also those of a request that ends afterwards."""
    desk = Desk(fleet(1))
    visit = desk.send(ask("a", 800))
    desk.admission.forget_slot(0)
    desk.admission.finish(visit, now=1.0)

    assert desk.admission.charged_tokens(0) == 0
    assert desk.offer(ask("b", 800)) == Admit(Passage.ROOM, frozenset({0}))


def test_no_rank_that_is_not_ready_is_offered() -> None:
    """Rank 0 is draining."""
    view = fleet(2)
    desk = Desk(replace(view, ranks=(replace(view.ranks[0], status=RankStatus.DRAINING), view.ranks[1])))

    assert desk.offer(ask("a", 100)) == Admit(Passage.ROOM, frozenset({1}))


class Ledger:
    """What an engine would have to hold, kept from the admissions alone: a list a conversation and rank."""

    def __init__(self) -> None:
        self.flying: dict[tuple[str, int], list[int]] = {}
        self.left: dict[tuple[str, int], list[int]] = {}
        self.since: dict[tuple[str, int], float] = {}

    def tokens(self, slot: int, *, now: float, but: str = "") -> int:
        """Of all that fly or have been idle for a minute at most."""
        keys = {*self.flying, *self.left}
        return sum(
            max(sum(self.flying.get(key, ())), *self.left.get(key, [0])[-4:], 0)
            for key in keys
            if key[1] == slot and key[0] != but and (self.flying.get(key) or now - self.since.get(key, -1e9) <= 60)
        )

    def sent(self, name: str, slots: Sequence[int], tokens: int, *, now: float) -> None:
        """To one rank, or to a pair."""
        for slot in slots:
            if not self.flying.get((name, slot)) and now - self.since.get((name, slot), now) > 60:
                self.left.pop((name, slot), None)  # who comes back later may have lost its place
        for key in [key for key in self.left if key[0] == name and key[1] not in slots and not self.flying.get(key)]:
            if tokens >= 0.7 * max(self.left[key][-4:]):
                del self.left[key]
        for slot in slots:
            self.flying.setdefault((name, slot), []).append(tokens)

    def ended(self, name: str, slot: int, tokens: int, *, now: float, is_kept: bool) -> None:
        self.flying[name, slot].remove(tokens)
        if is_kept:
            self.left.setdefault((name, slot), []).append(tokens)
        self.since[name, slot] = now


def test_admission_never_runs_over() -> None:
    """Random conversations of titles, turns, jumps and parallel requests that come, fail, pause and go: counted by the
    test itself, they fit 0.9 of the pool where room was given, 1.05 where who was admitted grew; or one was alone.
    """
    rng = random.Random(7)
    desk = Desk(fleet(3), AlwaysHold())
    ledger = Ledger()
    waiting: dict[int, RouteRequest] = {}
    running: list[tuple[str, int, int, Visit]] = []
    passed: Counter[Passage] = Counter()

    def start(request: RouteRequest, admit: Admit, now: float) -> None:
        assert request.session is not None
        assert admit.slots
        name, slot = request.session.session, rng.choice(sorted(admit.slots))
        others = ledger.tokens(slot, now=now, but=name)
        visit = desk.admission.start(request, slot, desk.view, now=now)
        was_flying = bool(ledger.flying.get((name, slot)))
        ledger.sent(name, [slot], request.prompt_tokens, now=now)
        running.append((name, slot, request.prompt_tokens, visit))
        passed[admit.why] += 1
        whole = ledger.tokens(slot, now=now)
        most = 900 if admit.why is Passage.ROOM else 1050
        assert whole <= most or (not others and not was_flying), (admit, whole)

    for now in range(6000):
        name = f"s{rng.randrange(60 if now % 1000 < 700 else 2000)}"
        request = ask(name, rng.choice((10, rng.randrange(50, 400), rng.randrange(50, 400), 700)))
        answer = desk.offer(request, now=float(now))
        if isinstance(answer, Admit):
            start(request, answer, float(now))
        else:
            waiting[answer.ticket] = request
        while running and rng.random() < 0.6:
            name, slot, tokens, visit = running.pop(rng.randrange(len(running)))
            is_kept = rng.random() < 0.8
            desk.admission.finish(visit, now=float(now), is_kept=is_kept)
            ledger.ended(name, slot, tokens, now=float(now), is_kept=is_kept)
        while (released := desk.release(now=float(now))) is not None:
            start(waiting.pop(released.ticket), released.admit, float(now))
        if rng.random() < 0.1 and waiting:
            desk.admission.cancel(waiting.popitem()[0])

    assert passed[Passage.ROOM] > 300
    assert passed[Passage.ADMITTED] > 100
    for name, slot, tokens, visit in running:
        desk.admission.finish(visit, now=6000.0)
        ledger.ended(name, slot, tokens, now=6000.0, is_kept=True)
    desk.admission.charges.age(9000.0)
    assert all(desk.admission.charges.book(slot).active_tokens == 0 for slot in range(3))


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


def test_an_admitted_turn_that_is_cached_passes_whatever_its_rank_is_charged() -> None:
    """It brings 100 of 800 tokens to a rank charged with 700 and 300: holding it would only lose what is there."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.turn(ask("b", 150))
    desk.turn(ask("a", 700))
    desk.turn(ask("b", 300, cached={0: 250}))

    assert isinstance(desk.offer(ask("a", 800)), Hold)
    assert desk.offer(ask("a", 800, cached={0: 700})) == Admit(Passage.ADMITTED, frozenset({0}))


def test_each_request_under_one_name_is_charged() -> None:
    """Under one id 400, 400, and no third; of a fork that finds 300 of its 400 there only the rest counts."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.send(ask("same", 400))
    desk.send(ask("same", 400))
    assert isinstance(desk.offer(ask("same", 400)), Hold)
    assert desk.admission.charged_tokens(0) == 800

    desk.admission.start(ask("same", 400, cached={0: 300}), 0, desk.view, now=0.0)
    assert desk.admission.charged_tokens(0) == 900


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


def test_nobody_waits_for_room_where_nobody_serves() -> None:
    """It passes, and is told that there is no worker. Who waits already goes on waiting."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.turn(ask("a", 800))
    assert isinstance(desk.offer(ask("b", 400)), Hold)
    down = replace(desk.view, ranks=(replace(desk.view.ranks[0], status=RankStatus.DOWN),))

    assert desk.admission.offer(ask("c", 400), down, now=0.0) == Admit(Passage.UNSERVED)
    assert desk.admission.release(down, now=0.0) is None


def test_who_waits_is_judged_by_what_is_cached_by_then() -> None:
    """At first nothing of it; when somebody else has brought its prompt, it is warm, and passes."""
    desk = Desk(fleet(1), AlwaysHold())
    desk.turn(ask("a", 600))
    held = desk.offer(ask("b", 400))
    assert isinstance(held, Hold)
    assert desk.admission.head == held.ticket
    assert desk.admission.held_tokens == 400
    desk.admission.renew(held.ticket, ask("b", 400, cached={0: 390}))
    desk.admission.renew(99, ask("b", 400))

    assert desk.release(now=0.0) == Released(1, Admit(Passage.WARM, frozenset({0})))


def test_traffic_that_does_not_come_back_is_not_held() -> None:
    """Forty conversations of one request each, one a second: the guard gives up on them after half a minute."""
    desk = Desk(fleet(1, pool_tokens=100_000))
    for second in range(60):
        desk.turn(ask(f"once{second}", 1000), now=float(second))

    assert desk.admission.guard.return_ratio < Guard.RETURN_OFF
    assert not desk.admission.guard.on
    desk.turn(ask("large", 89_000), now=60.0)
    assert desk.offer(ask("beside", 89_000), now=60.0) == Admit(Passage.OFF)


def test_conversations_that_come_back_keep_the_guard_on() -> None:
    """Ten conversations that ask every ten seconds for ten minutes."""
    guard = Guard()
    for second in range(600):
        conversation = ("m", SessionKey("", f"s{second % 10}"))
        guard.arrived(conversation, now=float(second))
        guard.left(conversation, now=second + 0.5)

    assert guard.decide(now=600.0)
    assert guard.return_ratio == 1.0


def test_the_guard_waits_for_evictions_and_forgets_them() -> None:
    """No verdict before the pools were filled once, nor while requests are held; then 2 % is little, 20 % enough."""
    guard = Guard()
    learn = {"tokens": 100, "pool_tokens": 1000, "now": 0.0}
    for _ in range(10):
        guard.computed(**learn, evicted_tokens=0, is_holding=False)  # type: ignore[arg-type]
    guard.computed(**learn, evicted_tokens=0, is_holding=True)  # type: ignore[arg-type]
    assert guard.evicted_ratio == 1.0
    assert guard.decide(now=0.0)

    guard.computed(**learn, evicted_tokens=2, is_holding=False)  # type: ignore[arg-type]
    assert guard.evicted_ratio == 0.02
    assert not guard.decide(now=0.0)
    guard.computed(**learn, evicted_tokens=38, is_holding=False)  # type: ignore[arg-type]
    assert guard.evicted_ratio == 0.2
    assert guard.decide(now=0.0)
    guard.computed(tokens=100, evicted_tokens=0, pool_tokens=1000, is_holding=False, now=120.0)
    assert guard.evicted_ratio == 20 / (100 + 100)


def test_what_outgrew_the_ranks_while_the_guard_was_off_is_shed() -> None:
    """Off, 600 idle, then 500 and 400 in flight, are charged to 900: the idle one and the newest lose their place."""
    guard = Guard()
    guard.on = False
    guard._returns._departed = 1000.0
    desk = Desk(fleet(1), guard)
    desk.turn(ask("idle", 600))
    desk.send(ask("older", 500))
    desk.send(ask("newer", 450))
    guard._returns._departed = guard._returns._returned = 1000.0

    assert isinstance(desk.offer(ask("idle", 600), now=1.0), Hold)
    assert desk.admission.charged_tokens(0) == 500
    assert isinstance(desk.offer(ask("older", 500), now=1.0), Admit)
    assert isinstance(desk.offer(ask("newer", 450), now=1.0), Hold)


def test_a_warm_head_ties_nobody_to_its_rank_where_there_is_room_elsewhere() -> None:
    """Rank 0 holds most of the prompt, as it does of everybody's who shares its head; rank 1 has room. While another
    waits, only the warm rank is open: room is the queue's."""
    desk = Desk(fleet(2), AlwaysHold())
    assert desk.offer(ask("new", 400, cached={0: 380})) == Admit(Passage.WARM, frozenset({0, 1}))

    desk.send(ask("cold", 800))
    desk.admission.start(ask("other", 800), 1, desk.view, now=0.0)
    assert isinstance(desk.offer(ask("waits", 500)), Hold)
    assert desk.offer(ask("warm", 200, cached={0: 190})) == Admit(Passage.WARM, frozenset({0}))
