"""What a consistent-hash ring promises, for any set of names."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.ring import Ring

NAMES = st.sets(st.text("abcdefgh/:.0123", min_size=1, max_size=12), min_size=1, max_size=8)
KEYS = st.text(max_size=12)


@settings(max_examples=40, deadline=None)
@given(names=NAMES, key=KEYS)
def test_a_walk_visits_each_name_once(names: set[str], key: str) -> None:
    """From the key's own rank through all that would inherit it."""
    walk = list(Ring(names).walk(key))

    assert sorted(walk) == sorted(names)


@settings(max_examples=40, deadline=None)
@given(names=NAMES, key=KEYS)
def test_order_of_registration_does_not_matter(names: set[str], key: str) -> None:
    """Two routers that met the ranks in another order agree."""
    forwards, backwards = Ring(sorted(names)), Ring(sorted(names, reverse=True))

    assert list(forwards.walk(key)) == list(backwards.walk(key))


@settings(max_examples=40, deadline=None)
@given(names=NAMES, key=KEYS, data=st.data())
def test_a_name_that_leaves_changes_nobody_elses_place(names: set[str], key: str, data: st.DataObject) -> None:
    """The walk without it is the walk with it, but for the gap."""
    gone = data.draw(st.sampled_from(sorted(names)))

    assert list(Ring(names - {gone}).walk(key)) == [name for name in Ring(names).walk(key) if name != gone]


def test_keys_are_spread_and_few_move() -> None:
    """Of 2,000 keys on 8 ranks none has fewer than 100 or more than 500, and a ninth rank takes some ninth of them."""
    eight, nine = (Ring(f"w{number}/0" for number in range(count)) for count in (8, 9))
    before = [next(eight.walk(f"session {number}")) for number in range(2000)]
    after = [next(nine.walk(f"session {number}")) for number in range(2000)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]

    assert all(100 < count < 500 for count in Counter(before).values())
    assert len(Counter(before)) == 8
    assert set(moved) == {"w8/0"}
    assert 100 < len(moved) < 450


def test_an_empty_ring_leads_nowhere() -> None:
    """No rank, no walk."""
    assert list(Ring(()).walk("key")) == []
