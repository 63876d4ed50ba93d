"""Breakers against a second writing of the table at their head, and the share that may be out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.breaker import BreakerParameters, Breakers, BreakerState, Verdict

PARAMETERS = BreakerParameters(failures=3, open_seconds=10.0, longest_open_seconds=35.0, max_open_ratio=0.5)


def fail(breakers: Breakers, slot: int, times: int, *, ranks: int = 4, now: float = 0.0) -> None:
    for _ in range(times):
        breakers.ended(slot, Verdict.BAD, ranks=ranks, now=now)


def test_opens_after_failures_in_a_row_only() -> None:
    """The third failure in a row opens; a success between starts the count anew; neither counts for nothing."""
    breakers = Breakers(PARAMETERS)
    fail(breakers, 0, 2)
    breakers.ended(0, Verdict.NEITHER, ranks=4, now=0.0)
    breakers.ended(0, Verdict.GOOD, ranks=4, now=0.0)
    fail(breakers, 0, 2)
    assert breakers.closed_to(now=0.0) == frozenset()
    fail(breakers, 0, 1)
    assert breakers.closed_to(now=0.0) == {0}
    assert breakers.state(0, now=0.0) is BreakerState.OPEN


def test_one_trial_at_a_time_and_longer_after_each_failure() -> None:
    """After 10 s one request goes; if it fails the rank rests 20 s, then 35 at most; a success closes."""
    breakers = Breakers(PARAMETERS)
    fail(breakers, 0, 3)
    now = 0.0
    for rest in (10.0, 20.0, 35.0, 35.0):
        assert breakers.closed_to(now=now + rest - 0.001) == {0}
        now += rest
        assert breakers.closed_to(now=now) == frozenset()
        assert breakers.state(0, now=now) is BreakerState.TRIAL
        breakers.sent(0, now=now)
        assert breakers.closed_to(now=now) == {0}
        breakers.ended(0, Verdict.BAD, ranks=4, now=now)
    now += 35.0
    breakers.sent(0, now=now)
    breakers.ended(0, Verdict.NEITHER, ranks=4, now=now)
    assert breakers.closed_to(now=now) == frozenset()
    breakers.sent(0, now=now)
    breakers.ended(0, Verdict.GOOD, ranks=4, now=now)
    assert breakers.state(0, now=now) is BreakerState.CLOSED
    fail(breakers, 0, 3, now=now)
    assert breakers.closed_to(now=now + 9.999) == {0}
    assert breakers.closed_to(now=now + 10.0) == frozenset()


def test_late_failures_do_not_prolong() -> None:
    """Failures of requests that were under way when the breaker opened change nothing."""
    breakers = Breakers(PARAMETERS)
    fail(breakers, 0, 3, now=0.0)
    fail(breakers, 0, 5, now=9.0)
    assert breakers.closed_to(now=10.0) == frozenset()


def test_a_rank_that_left_leaves_nothing() -> None:
    """A slot that is given to another rank starts closed, and its share is free again."""
    breakers = Breakers(PARAMETERS)
    fail(breakers, 0, 3, ranks=2)
    fail(breakers, 1, 3, ranks=2)
    assert breakers.closed_to(now=0.0) == {0}
    breakers.forget(0)
    fail(breakers, 1, 1, ranks=2)
    assert breakers.closed_to(now=0.0) == {1}


def test_the_only_rank_is_never_out() -> None:
    """Of one rank no share of a half may be out; with failures=0 no breaker opens."""
    breakers = Breakers(PARAMETERS)
    fail(breakers, 0, 100, ranks=1)
    never = Breakers(BreakerParameters(failures=0))
    fail(never, 0, 100)
    assert breakers.closed_to(now=0.0) == never.closed_to(now=0.0) == frozenset()


def refuse(breakers: Breakers, slot: int, times: int, *, now: float, ranks: int = 4) -> None:
    for _ in range(times):
        breakers.ended(slot, Verdict.FULL, ranks=ranks, now=now)


def test_a_rank_that_takes_nothing_is_left_alone() -> None:
    """Three refusals in a row or more, the first 5 s ago: it rests 10 s, and as long again after each refused trial.
    The first success closes.
    """
    breakers = Breakers(PARAMETERS)
    refuse(breakers, 0, 100, now=0.0)
    refuse(breakers, 0, 1, now=4.9)
    assert breakers.closed_to(now=4.9) == frozenset()
    refuse(breakers, 0, 1, now=5.0)
    for now in (5.0, 15.0, 25.0, 35.0):
        assert breakers.closed_to(now=now + 9.999) == {0}
        assert breakers.closed_to(now=now + 10.0) == frozenset()
        breakers.sent(0, now=now + 10.0)
        assert breakers.closed_to(now=now + 10.0) == {0}
        refuse(breakers, 0, 1, now=now + 10.0)
    breakers.sent(0, now=55.0)
    breakers.ended(0, Verdict.GOOD, ranks=4, now=55.0)
    refuse(breakers, 0, 100, now=59.0)
    assert breakers.state(0, now=59.0) is BreakerState.CLOSED


def test_a_full_rank_that_takes_some_is_only_full() -> None:
    """However many it refuses between the answers that it begins, and however seldom it is asked."""
    breakers = Breakers(PARAMETERS)
    for second in range(60):
        refuse(breakers, 0, 50, now=float(second))
        if second % 4 == 0:
            breakers.begun(0)
    refuse(breakers, 1, 1, now=0.0)
    refuse(breakers, 1, 1, now=30.0)
    assert breakers.closed_to(now=59.0) == frozenset()


def test_refusals_are_no_failures_nor_the_other_way_round() -> None:
    """Neither adds to the other; a trial that is refused once says nothing of a rank that failed."""
    breakers = Breakers(PARAMETERS)
    fail(breakers, 0, 2)
    refuse(breakers, 0, 2, now=0.0)
    refuse(breakers, 0, 1, now=4.0)
    assert breakers.closed_to(now=4.0) == frozenset()
    breakers.begun(0)
    fail(breakers, 0, 1, now=4.0)
    assert breakers.closed_to(now=4.0) == {0}
    breakers.sent(0, now=14.0)
    refuse(breakers, 0, 1, now=14.0)
    assert breakers.closed_to(now=14.0) == frozenset()


def test_a_long_answer_keeps_nobody_waiting_for_its_end() -> None:
    """Once the trial's answer begins others may go, one by one until theirs begin. Its failure opens it for longer."""
    breakers = Breakers(PARAMETERS)
    fail(breakers, 0, 3)
    breakers.sent(0, now=10.0)
    assert breakers.closed_to(now=10.0) == {0}
    breakers.begun(0)
    assert breakers.closed_to(now=10.5) == frozenset()
    breakers.sent(0, now=10.5)
    assert breakers.closed_to(now=10.5) == {0}
    breakers.begun(0)
    breakers.ended(0, Verdict.BAD, ranks=4, now=11.0)
    assert breakers.closed_to(now=30.9) == {0}
    breakers.sent(0, now=31.0)
    breakers.ended(0, Verdict.GOOD, ranks=4, now=31.0)
    assert breakers.state(0, now=31.0) is BreakerState.CLOSED


EVENTS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["send", "begin", *Verdict]), st.floats(0.0, 30.0)), max_size=80
)


@settings(deadline=None)
@given(EVENTS, st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_never_more_than_the_share(events: list[tuple[int, str, float]], ratio: float) -> None:
    """Whatever happens to five ranks, no more than the share of them is kept from requests."""
    breakers = Breakers(BreakerParameters(failures=2, open_seconds=10.0, max_open_ratio=ratio))
    now = 0.0
    for slot, event, pause in events:
        now += pause
        if event == "send":
            breakers.sent(slot, now=now)
        elif event == "begin":
            breakers.begun(slot)
        else:
            breakers.ended(slot, Verdict(event), ranks=5, now=now)
        assert len(breakers.closed_to(now=now)) <= 5 * ratio
