"""Claims against a model that keeps every claim in a plain list and counts anew each time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from router.core.load import (
    LASTING_HALF_LIFE_SECONDS,
    RECENT_HALF_LIFE_SECONDS,
    Claim,
    LoadBook,
    explains_silence,
    lasting_seconds,
    recent_seconds,
    wait_seconds,
)
from router.core.pace import prior

SLOTS = (0, 1, 2)
PACE = prior(1000)


@dataclass(eq=False)
class Known:
    """A claim as the model sees it. ``life`` counts the ranks that its slot has had."""

    slot: int
    life: int
    prompt_tokens: int
    prefill_tokens: int
    seconds: float
    waiting: bool = True
    open: bool = True


class LoadMachine(RuleBasedStateMachine):
    """Any order of open, first byte, close and forget, each as often as it likes."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.book = LoadBook()
        self.now = 0.0
        self.lives = dict.fromkeys(SLOTS, 0)
        self.known: list[Known] = []
        self.opened: list[Claim] = []

    def tick(self, seconds: float) -> float:
        self.now += seconds
        return self.now

    @rule(
        target=claims,
        slot=st.sampled_from(SLOTS),
        cached=st.integers(0, 1000),
        uncached=st.integers(0, 1000),
        seconds=st.floats(0, 100),
        step=st.floats(0, 10),
    )
    def open(self, slot: int, cached: int, uncached: int, seconds: float, step: float) -> tuple[Claim, Known]:
        prompt = cached + uncached
        claim = self.book.open(
            slot, prompt_tokens=prompt, prefill_tokens=uncached, seconds=seconds, now=self.tick(step)
        )
        known = Known(slot, self.lives[slot], prompt, uncached, seconds)
        self.known.append(known)
        self.opened.append(claim)
        return claim, known

    @rule(pair=claims, step=st.floats(0, 10))
    def first_byte(self, pair: tuple[Claim, Known], step: float) -> None:
        claim, known = pair
        served = self.book.first_byte(claim, now=self.tick(step))

        assert known.waiting or served is None
        assert served is None or served >= 0
        known.waiting = False

    @rule(pair=claims, step=st.floats(0, 10))
    def close(self, pair: tuple[Claim, Known], step: float) -> None:
        claim, known = pair
        self.book.close(claim, now=self.tick(step))
        known.waiting = known.open = False

    @rule(slot=st.sampled_from(SLOTS))
    def forget(self, slot: int) -> None:
        self.book.forget(slot)
        self.lives[slot] += 1

    @invariant()
    def counts_are_the_sums_over_open_claims(self) -> None:
        for slot in SLOTS:
            mine = [each for each in self.known if each.slot == slot and each.life == self.lives[slot] and each.open]
            waiting = [each for each in mine if each.waiting]
            load = self.book.load(slot)

            assert (load.inflight, load.inflight_tokens) == (len(mine), sum(each.prompt_tokens for each in mine))
            assert (load.waiting, load.waiting_tokens) == (
                len(waiting),
                sum(each.prefill_tokens for each in waiting),
            )
            assert math.isclose(load.waiting_seconds, sum(each.seconds for each in waiting), abs_tol=1e-9)
            assert 0 <= wait_seconds(load, PACE, now=self.now) <= load.waiting_seconds + 1e-9

    def teardown(self) -> None:
        for claim in self.opened:
            self.book.close(claim, now=self.now)
        for slot in SLOTS:
            load = self.book.load(slot)
            counts = (load.inflight, load.inflight_tokens, load.waiting, load.waiting_tokens, load.waiting_seconds)
            assert counts == (0, 0, 0, 0, 0.0)


LoadMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order_of_events_keeps_the_counts = LoadMachine.TestCase


def claim(book: LoadBook, *, now: float, seconds: float = 1.0, slot: int = 0) -> Claim:
    return book.open(slot, prompt_tokens=100, prefill_tokens=80, seconds=seconds, now=now)


def test_a_first_byte_measures_service_without_the_queue() -> None:
    """Three prompts at t=0 whose first bytes come at 2, 5 and 6 were served 2, 3 and 1 seconds."""
    book = LoadBook()
    claims = [claim(book, now=0.0) for _ in range(3)]

    assert [book.first_byte(each, now=now) for each, now in zip(claims, (2.0, 5.0, 6.0), strict=True)] == [2, 3, 1]


def test_a_rank_that_was_idle_serves_from_arrival() -> None:
    """The pause before a request is no service."""
    book = LoadBook()
    book.first_byte(claim(book, now=0.0), now=2.0)

    assert book.first_byte(claim(book, now=100.0), now=103.0) == 3.0


def test_overtaking_says_nothing_of_speed() -> None:
    """A first byte out of turn is no measurement."""
    book = LoadBook()
    claim(book, now=0.0)

    assert book.first_byte(claim(book, now=0.0), now=1.0) is None


def whole(book: LoadBook, *, now: float, seconds: float = 1.0) -> Claim:
    """On a rank without a queue."""
    return book.open(0, prompt_tokens=100, prefill_tokens=80, seconds=seconds, now=now, heard_by=now + seconds)


@pytest.mark.parametrize("end", [9.8, 10.3, 20.0])
@pytest.mark.parametrize("ends_well", [True, False])
def test_a_whole_answer_in_the_making_is_nobodys_prefill(end: float, ends_well: bool) -> None:
    """Its prompt is computed by t=1. Another comes at 9.5 and has its first token at 10.5: that took a second, whether
    the answer before it ends then, meanwhile or later.
    """
    book = LoadBook()
    answer, other = whole(book, now=0.0), claim(book, now=9.5)

    def finish() -> None:
        if ends_well:
            book.first_byte(answer, now=end)
        book.close(answer, now=end)

    if end < 10.5:
        finish()
        assert wait_seconds(book.load(0), PACE, now=10.5) == 0.0  # it has been at work for as long as was promised
    assert book.first_byte(other, now=10.5) == 1.0
    if end > 10.5:
        finish()
    assert book.load(0).waiting == 0


def test_behind_a_prompt_that_may_still_be_computed_nothing_is_measured() -> None:
    """One that is sent with it or before it should be done, or later but behind a stream's; but once it has ended, the
    next is served from the time on by which it should have been.
    """
    book = LoadBook()
    answer, other = whole(book, now=0.0, seconds=4.0), claim(book, now=3.9)
    assert book.first_byte(other, now=5.0) is None
    book.close(answer, now=6.0)

    answer, other = whole(book, now=10.0, seconds=4.0), claim(book, now=10.0)
    book.first_byte(answer, now=16.0)
    assert book.first_byte(other, now=17.0) == 3.0

    whole(book, now=20.0), claim(book, now=30.0)
    assert book.first_byte(claim(book, now=30.0), now=31.0) is None


def test_of_a_whole_answer_all_is_counted() -> None:
    """Its prompt took no longer: the end of another, beside which it was computed, says nothing of its beginning."""
    book = LoadBook()
    answer, other = whole(book, now=0.0), whole(book, now=8.0)
    assert book.first_byte(answer, now=8.5) == 8.5
    assert book.first_byte(other, now=8.6) == pytest.approx(0.6)


def test_one_that_gives_up_in_the_queue_does_not_disturb_the_one_served() -> None:
    """A client that leaves at t=9 while another's prefill runs from 0 to 10: that took ten seconds, not one."""
    book = LoadBook()
    served = claim(book, now=0.0, seconds=8.0)
    waiting = claim(book, now=0.0, seconds=4.0)
    book.close(waiting, now=9.0)

    assert wait_seconds(book.load(0), PACE, now=9.0) == 0.0  # 8 s were promised, 9 have passed
    assert book.first_byte(served, now=10.0) == 10.0


def test_one_that_gives_up_while_served_hands_over_to_the_next() -> None:
    """Service of the next begins when the one before leaves."""
    book = LoadBook()
    leaving, following = claim(book, now=0.0), claim(book, now=0.0)
    book.close(leaving, now=9.0)

    assert book.first_byte(following, now=10.0) == 1.0


def test_waiting_shrinks_while_the_rank_works() -> None:
    """10 s promised at t=0, 4 s later 6 remain, and never less than none."""
    book = LoadBook()
    claim(book, now=0.0, seconds=10.0)
    load = book.load(0)

    assert [wait_seconds(load, PACE, now=now) for now in (0.0, 4.0, 11.0)] == [10.0, 6.0, 0.0]


def test_a_rank_that_hangs_is_not_one_that_is_done() -> None:
    """However late the prompt in hand, those behind it have not begun; once it ends, theirs is the time."""
    book = LoadBook()
    first, *_ = (claim(book, now=0.0, seconds=seconds) for seconds in (8.0, 5.0, 1.0))
    load = book.load(0)

    assert [wait_seconds(load, PACE, now=now) for now in (0.0, 4.0, 8.0, 250.0)] == [14.0, 10.0, 6.0, 6.0]
    book.first_byte(first, now=250.0)
    assert [wait_seconds(load, PACE, now=now) for now in (250.0, 252.0, 300.0)] == [6.0, 4.0, 1.0]


def test_what_was_sent_on_a_wrong_guess_is_counted_as_what_is_known_now() -> None:
    """A rank is taken to need 10 s for what waits there, and is 20 times as slow: of 200 s 4 are over."""
    book, pace = LoadBook(), prior(1000)
    claim(book, now=0.0, seconds=10.0)
    pace.factor = 20.0

    assert wait_seconds(book.load(0), pace, now=4.0) == pytest.approx(196.0)
    assert explains_silence(book.load(0), pace, now=409.0)


@pytest.mark.parametrize(
    ("seconds", "half_life_seconds"),
    [(recent_seconds, RECENT_HALF_LIFE_SECONDS), (lasting_seconds, LASTING_HALF_LIFE_SECONDS)],
)
def test_work_that_was_sent_halves_in_a_half_life(seconds: Callable[..., float], half_life_seconds: float) -> None:
    """8 s of work: 4 after one half-life, and 4 + 8 once the same again is sent."""
    book = LoadBook()
    claim(book, now=0.0, seconds=8.0)
    assert seconds(book.load(0), now=half_life_seconds) == pytest.approx(4.0)

    claim(book, now=half_life_seconds, seconds=8.0)
    assert seconds(book.load(0), now=half_life_seconds) == pytest.approx(12.0)


@pytest.mark.parametrize("began", [False, True])
def test_the_end_of_a_claim_on_a_rank_that_left_spares_its_successor(began: bool) -> None:
    """A slot is given again at once; what the old rank had open is not the new rank's."""
    book = LoadBook()
    old = claim(book, now=0.0)
    if began:
        book.first_byte(old, now=1.0)
    book.forget(0)
    claim(book, now=2.0)
    book.close(old, now=3.0)

    load = book.load(0)
    assert (load.inflight, load.inflight_tokens, load.waiting, load.waiting_tokens) == (1, 100, 1, 80)


def test_what_was_turned_away_was_no_work() -> None:
    """A rank that computed nothing of what it was sent is as idle as one that was sent nothing."""
    book = LoadBook()
    kept = book.open(0, prompt_tokens=10, prefill_tokens=10, seconds=2.0, now=0.0)
    turned_away = [book.open(0, prompt_tokens=10, prefill_tokens=10, seconds=3.0, now=90.0 * n) for n in range(3)]
    for claim in turned_away:
        book.close(claim, now=400.0, is_computed=False)
    book.close(kept, now=400.0)
    load = book.load(0)
    assert recent_seconds(load, now=400.0) == pytest.approx(2.0 * 0.5 ** (400.0 / RECENT_HALF_LIFE_SECONDS))
    assert lasting_seconds(load, now=400.0) == pytest.approx(2.0 * 0.5 ** (400.0 / LASTING_HALF_LIFE_SECONDS))


def test_leaving_a_long_queue_is_cheap_wherever_one_stands() -> None:
    """Forty times as many waiting, and leaving from the middle costs about the same each, not forty times."""

    def seconds_each(waiting: int) -> float:
        best = math.inf
        for _ in range(5):
            book = LoadBook()
            claims = [claim(book, now=0.0) for _ in range(waiting)]
            claims = claims[waiting // 2 :] + claims[: waiting // 2]
            begin = time.thread_time()
            for each in reversed(claims):
                book.close(each, now=1.0)
            best = min(best, (time.thread_time() - begin) / waiting)
        return best

    assert seconds_each(20_000) < 10 * seconds_each(500)


def test_silence_is_explained_by_work_in_hand() -> None:
    """Streaming explains it for ever, a prompt for twice its expected time and ten seconds more, idleness never."""
    book = LoadBook()
    assert not explains_silence(book.load(0), PACE, now=0.0)
    claim = book.open(0, prompt_tokens=1000, prefill_tokens=1000, seconds=30.0, now=100.0)
    assert explains_silence(book.load(0), PACE, now=170.0)
    assert not explains_silence(book.load(0), PACE, now=170.1)
    book.first_byte(claim, now=171.0)
    assert explains_silence(book.load(0), PACE, now=1e6)
    book.close(claim, now=1e6)
    assert not explains_silence(book.load(0), PACE, now=1e6)
