"""Who may start where prompts and answers have ranks of their own. Slots 0 and 1 compute prompts, 2 and 3 answer; pools
of 1,000 tokens, of which charges may fill 900.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import msgspec
import pytest

from router.core.admission import Admission, AdmissionParameters, Admit, Barrier, Hold, Passage, Released, Visit
from router.core.load import LoadBook
from router.core.types import (
    FleetView,
    Handover,
    Part,
    RankStatus,
    RouteRequest,
    SessionKey,
    WorkerRole,
)
from tests.fakes.admission_desk import AlwaysHold, Ledger
from tests.fakes.rank_views import rank_view

P, D, U = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.UNIFIED
POOL = 1000


def fleet(
    *roles: WorkerRole, sufficient: bool = True, keeps: bool = True, pools: Sequence[int] = (), down: int | None = None
) -> FleetView:
    book = LoadBook()
    ranks = tuple(
        rank_view(
            slot,
            status=RankStatus.DOWN if slot == down else RankStatus.READY,
            load=book.load(slot),
            pool_tokens=pools[slot] if pools else POOL,
            part=Part(role, Handover.PARAMS, sufficient, keeps or role is P),
        )
        for slot, role in enumerate(roles)
    )
    return FleetView(ranks, is_disaggregated=True)


def ask(name: str, tokens: int, *, cached: dict[int, int] | None = None, output: int = 0) -> RouteRequest:
    return RouteRequest(
        model="m",
        prompt_tokens=tokens,
        output_tokens=output,
        reusable_tokens=cached or {},
        session=SessionKey("", name),
        handovers=frozenset({Handover.PARAMS}),
    )


class Desk:
    """An admission with the steps that a data plane takes."""

    def __init__(self, view: FleetView) -> None:
        self.view = view
        parameters = AdmissionParameters(budget_ratio=0.9, least_idle_seconds=60.0, most_idle_seconds=60.0)
        self.admission = Admission(parameters, AlwaysHold())

    def offer(self, request: RouteRequest, *, now: float = 0.0) -> Admit | Hold:
        return self.admission.offer(request, self.view, now=now)

    def pair(self, request: RouteRequest, prefill: int, decode: int, *, now: float = 0.0) -> tuple[Visit, Visit]:
        """Sent to both."""
        start = self.admission.start
        answer = start(request, decode, self.view, now=now, partner=prefill)
        return answer, start(request, prefill, self.view, now=now, partner=decode)

    def turn(self, request: RouteRequest, *slots: int, now: float = 0.0) -> None:
        """Admitted, sent, and over at once: to a pair of ranks or to one."""
        admit = self.offer(request, now=now)
        assert isinstance(admit, Admit), admit
        assert admit.slots is None or admit.slots >= set(slots), admit
        visits = self.pair(request, *slots, now=now) if len(slots) == 2 else ()
        for visit in visits or (self.admission.start(request, slots[0], self.view, now=now),):
            visit.first_token()
            self.admission.finish(visit, now=now)

    def charged(self) -> list[int]:
        return [self.admission.charged_tokens(rank.slot) for rank in self.view.ranks]


def test_both_pools_are_charged_each_with_its_part() -> None:
    """The prompt of 400 where it is computed; with its answer of 100 where that is made."""
    desk = Desk(fleet(P, P, D, D))
    desk.turn(ask("a", 400, output=100), 1, 2)

    assert desk.charged() == [0, 400, 500, 0]


def test_neither_rank_of_a_pair_takes_the_others_context() -> None:
    """A turn visits both at once: what the prompt's rank has is no context that the answer's takes along, though the
    clock has not moved on between its turns.
    """
    desk = Desk(fleet(P, P, D, D))
    desk.turn(ask("a", 400, output=100), 1, 2)
    answer, prompt = desk.pair(ask("a", 400, output=100), 1, 2)
    for visit in (prompt, answer):
        visit.first_token()
        desk.admission.finish(visit, now=0.0)

    assert desk.charged() == [0, 400, 500, 0]


@pytest.mark.parametrize("full", [(0, 1), (2, 3)])
def test_a_newcomer_needs_room_in_both_pools(full: tuple[int, int]) -> None:
    """With the prefill ranks full it waits, and with the decode ranks; it goes when one of those has room again."""
    desk = Desk(fleet(P, P, D, D, pools=[POOL if slot in full else 100_000 for slot in range(4)]))
    desk.turn(ask("a", 600), 0, 2)
    desk.turn(ask("b", 600), 1, 3)

    assert desk.offer(ask("c", 500)) == Hold(1, 1, Barrier.BUDGET)
    assert desk.admission.release(desk.view, now=60.0) is None
    released = desk.admission.release(desk.view, now=61.0)
    assert isinstance(released, Released)
    assert released.admit.why is Passage.ROOM
    assert released.admit.slots == {0, 1, 2, 3}


def test_ranks_without_a_partner_that_has_room_are_not_offered() -> None:
    """Prefill rank 0 is full: a newcomer goes to rank 1 and any decode rank."""
    desk = Desk(fleet(P, P, D, D, pools=[POOL, POOL, 100_000, 100_000]))
    desk.turn(ask("a", 800), 0, 2)

    assert desk.offer(ask("b", 200)) == Admit(Passage.ROOM, frozenset({1, 2, 3}))


def test_a_conversation_that_its_decode_rank_serves_alone_leaves_room_to_prefill_others() -> None:
    """Twelve conversations of 500 on prefill ranks that hold one each: with its second turn each gives up its charge
    there, so that what counts are the decode ranks, of 6,000 tokens."""
    desk = Desk(fleet(P, D, D, pools=[POOL, 4_000, 4_000]))
    for number in range(12):
        name = f"s{number}"
        desk.turn(ask(name, 500), 0, 1 + number % 2)
        assert isinstance(desk.offer(ask("other", 500)), Hold)
        desk.admission.cancel(number + 1)
        desk.turn(ask(name, 510, cached={1 + number % 2: 496}), 1 + number % 2)

    assert desk.charged() == [0, 6 * 510, 6 * 510]


def test_a_cold_prompt_is_not_computed_on_a_decode_rank_for_want_of_room_elsewhere() -> None:
    """Decode ranks could do it; they do while no prefill rank is up."""
    desk = Desk(fleet(P, D, pools=[POOL, 100_000]))
    desk.turn(ask("a", 800), 0, 1)
    assert desk.offer(ask("b", 200)) == Hold(1, 1, Barrier.BUDGET)

    alone = Desk(fleet(P, D, down=0))
    assert alone.offer(ask("b", 200)) == Admit(Passage.ROOM, frozenset({1}))


def test_who_is_admitted_passes_where_it_was() -> None:
    """Others wait. The decode rank alone, which has its context; both, after a turn in a pair; not one that is new."""
    desk = Desk(fleet(P, P, D, D))
    desk.turn(ask("a", 500), 0, 2)
    desk.turn(ask("b", 500), 1, 3)
    assert isinstance(desk.offer(ask("waits", 800)), Hold)

    assert desk.offer(ask("a", 550)) == Admit(Passage.ADMITTED, frozenset({0, 2}))
    alone = desk.admission.start(ask("a", 550, cached={2: 500}), 2, desk.view, now=0.0)
    desk.admission.finish(alone, now=0.0)
    assert desk.offer(ask("a", 560)) == Admit(Passage.ADMITTED, frozenset({2}))
    assert isinstance(desk.offer(ask("new", 10)), Hold)


def test_what_a_prefill_rank_has_needs_room_on_a_decode_rank() -> None:
    """Others wait. 80 % of the prompt on prefill rank 0, and room for 400 on decode rank 3; then on none."""
    desk = Desk(fleet(P, P, D, D))
    desk.turn(ask("a", 800), 1, 2)
    desk.turn(ask("b", 100), 0, 3)
    assert isinstance(desk.offer(ask("waits", 850)), Hold)

    assert desk.offer(ask("c", 400, cached={0: 320})) == Admit(Passage.WARM, frozenset({0, 3}))
    desk.admission.start(ask("d", 700), 3, desk.view, now=0.0)
    assert isinstance(desk.offer(ask("c", 400, cached={0: 320})), Hold)


def test_one_cold_prompt_at_a_time_on_each_prefill_rank() -> None:
    """What decode ranks are handed is no cold start there; the place is free with the prefill rank's first token."""
    desk = Desk(fleet(P, D, pools=[10_000, 10_000]))
    answer, computed = desk.pair(ask("a", 100), 0, 1)
    assert desk.offer(ask("b", 100)) == Hold(1, 1, Barrier.COLD_START)

    answer.first_token()
    assert desk.admission.release(desk.view, now=1.0) is None
    computed.first_token()
    assert desk.admission.release(desk.view, now=1.0) == Released(1, Admit(Passage.ROOM, frozenset({0, 1})))


def test_ranks_that_keep_no_cache_are_charged_for_what_is_in_flight() -> None:
    """As SGLang's decode ranks are. Between its turns a conversation is on the prefill rank, where its next one is
    admitted, whichever decode rank is to answer."""
    desk = Desk(fleet(P, P, D, D, sufficient=False, keeps=False))
    answer, computed = desk.pair(ask("a", 600), 0, 2)
    assert desk.charged() == [600, 0, 600, 0]
    desk.admission.finish(computed, now=0.0)
    desk.admission.finish(answer, now=0.0)
    assert desk.charged() == [600, 0, 0, 0]

    desk.turn(ask("b", 600), 1, 2)
    assert isinstance(desk.offer(ask("waits", 500)), Hold)
    assert desk.offer(ask("a", 650, cached={0: 592})) == Admit(Passage.ADMITTED, frozenset({0, 2, 3}))


def test_a_failed_pair_leaves_nothing() -> None:
    """Neither on the one nor on the other."""
    desk = Desk(fleet(P, P, D, D))
    for visit in desk.pair(ask("a", 600), 0, 2):
        desk.admission.finish(visit, now=0.0, is_kept=False)

    assert desk.charged() == [0, 0, 0, 0]
    assert not len(desk.admission.charges)


def test_what_other_routers_admitted_is_charged_on_both() -> None:
    """700 on each rank by another router, 400 of them this conversation's: it passes, and a newcomer waits."""
    desk = Desk(fleet(P, D))
    for rank in desk.view.ranks:
        rank.load.charged_tokens = 700
    assert desk.offer(ask("new", 300)) == Hold(1, 1, Barrier.BUDGET)
    mine = RouteRequest(
        model="m",
        prompt_tokens=600,
        output_tokens=0,
        session=SessionKey("", "mine"),
        handovers=frozenset({Handover.PARAMS}),
        charged_elsewhere={0: 400, 1: 400},
    )
    assert desk.offer(mine) == Admit(Passage.ADMITTED, frozenset({0, 1}))


def test_requests_that_nobody_could_split_go_by_all_ranks() -> None:
    """No contract suits them: any rank serves them whole, and has to have the room."""
    desk = Desk(fleet(P, D))
    whole = RouteRequest(model="m", prompt_tokens=400, output_tokens=0, session=SessionKey("", "s"))
    assert desk.offer(whole) == Admit(Passage.ROOM, frozenset({0, 1}))


def test_nobody_waits_for_a_role_that_nobody_has() -> None:
    """Prefill ranks alone answer nobody: to be told so, not held."""
    assert Desk(fleet(P, P)).offer(ask("a", 100)) == Admit(Passage.UNSERVED)
    assert Desk(fleet(D, sufficient=False)).offer(ask("a", 100)) == Admit(Passage.UNSERVED)


def test_pools_never_run_over() -> None:
    """Random conversations over two prefill, two decode ranks and one of both kinds, that go in pairs or alone, fail,
    pause and come back: counted by the test itself, what was admitted for its room fits 0.9 of each rank's pool, and
    1.05 with those who were admitted already; or one was alone.
    """
    rng = random.Random(5)
    desk, ledger = Desk(fleet(P, P, D, D, U)), Ledger()
    roles = [rank.part.role for rank in desk.view.ranks]
    running: list[tuple[str, int, int, Visit]] = []
    waiting: dict[int, RouteRequest] = {}
    passed: Counter[Passage] = Counter()
    ways: Counter[int] = Counter()

    def send(request: RouteRequest, admit: Admit, now: float) -> None:
        assert request.session is not None
        assert admit.slots
        name, tokens = request.session.session, request.prompt_tokens
        request = msgspec.structs.replace(request, allowed=admit.slots)  # as the data plane sends it
        parts = {role: [slot for slot in admit.slots if roles[slot] is role] for role in (P, D, U)}
        alone = parts[U] if admit.why is Passage.ROOM else parts[U] + parts[D]
        slots = rng.choice([*product(parts[P], parts[D]), *((slot,) for slot in alone)])
        others = [ledger.tokens(slot, now=now, but=name) for slot in slots]
        was_flying = [bool(ledger.flying.get((name, slot))) for slot in slots]
        visits = (
            reversed(desk.pair(request, *slots, now=now))
            if len(slots) == 2
            else [desk.admission.start(request, slots[0], desk.view, now=now)]
        )
        ledger.sent(name, slots, tokens, now=now)
        for slot, visit in zip(slots, visits, strict=True):
            running.append((name, slot, tokens, visit))
        most = 900 if admit.why is Passage.ROOM else 1050
        for slot, beside, flew in zip(slots, others, was_flying, strict=True):
            assert ledger.tokens(slot, now=now) <= most or not (beside or flew), (admit, slots)
        passed[admit.why] += 1
        ways[len(slots)] += 1

    for step in range(6000):
        now = float(step)
        name = f"s{rng.randrange(60 if step % 1000 < 700 else 2000)}"
        request = ask(name, rng.choice((rng.randrange(50, 400), rng.randrange(50, 400), 700)))
        answer = desk.offer(request, now=now)
        if isinstance(answer, Admit):
            send(request, answer, now)
        else:
            waiting[answer.ticket] = request
        while running and rng.random() < 0.7:
            name, slot, tokens, visit = running.pop(rng.randrange(len(running)))
            is_kept = rng.random() < 0.8
            desk.admission.finish(visit, now=now, is_kept=is_kept)
            ledger.ended(name, slot, tokens, now=now, is_kept=is_kept)
        while (released := desk.admission.release(desk.view, now=now)) is not None:
            send(waiting.pop(released.ticket), released.admit, now)
        if rng.random() < 0.1 and waiting:
            desk.admission.cancel(waiting.popitem()[0])

    assert passed[Passage.ROOM] > 300
    assert passed[Passage.ADMITTED] > 50
    assert min(ways[1], ways[2]) > 100
