"""Who is taken to be full, and for how long."""

from __future__ import annotations

from router.core.fullness import FullRanks


def test_for_a_second_after_each_refusal_or_until_a_request_ends_well() -> None:
    """Each refusal counts anew; an answer means a free place; others are not concerned."""
    full = FullRanks()
    assert full.slots(now=0.0) == frozenset()
    full.turned_away(0, now=10.0)
    full.turned_away(1, now=10.5)
    assert full.slots(now=10.9) == {0, 1}
    assert full.slots(now=11.0) == {1}
    full.turned_away(1, now=11.4)
    assert full.slots(now=12.3) == {1}
    full.forget(1)
    full.forget(2)
    assert full.slots(now=12.3) == frozenset()
