"""The retry budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.retry import RetryBudget


@given(st.lists(st.booleans(), max_size=300), st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 5))
def test_retries_stay_within_reserve_and_share(events: list[bool], ratio: float, reserve: int) -> None:
    """However requests and retries alternate, retries never exceed the reserve and their share of the requests."""
    budget = RetryBudget(ratio=ratio, reserve=reserve)
    earned = spent = 0
    for is_request in events:
        if is_request:
            budget.earn()
            earned += 1
        else:
            spent += budget.spend()
        assert spent <= reserve + ratio * earned + 1e-9


def test_savings_are_bounded() -> None:
    """A long quiet time saves no more than the reserve: five retries, then one for every tenth request."""
    budget = RetryBudget(ratio=0.1, reserve=5)
    for _ in range(10_000):
        budget.earn()
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]
    for _ in range(11):
        budget.earn()
    assert [budget.spend() for _ in range(2)] == [True, False]
