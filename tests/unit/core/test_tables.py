"""Copies of sparse blocks and holders of a run's blocks, against a plain count of each."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.holders import Holders
from router.core.tables import CopyTable

SLOTS = (0, 70)
SLOT = st.sampled_from(SLOTS)
KEYS = (11, 12)
TABLE_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["gain", "lose"]), SLOT, st.sampled_from(KEYS)),
        st.tuples(st.just("clear"), SLOT, st.none()),
        st.tuples(st.just("discard"), st.none(), st.sampled_from(KEYS)),
    ),
    min_size=25,
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps=TABLE_STEPS)
def test_a_sparse_block_is_held_as_long_as_there_is_a_copy(steps: list[Any]) -> None:
    """Stored any number of times, given up one by one, cleared with its rank, or forgotten on all ranks at once."""
    table, copies = CopyTable(), Counter[tuple[int, int]]()
    for what, slot, key in steps:
        match what:
            case "gain":
                assert table.gain(slot, key) == (copies[slot, key] == 0)
                copies[slot, key] += 1
            case "lose":
                assert table.lose(slot, key) == (copies[slot, key] == 1)
                copies[slot, key] = max(0, copies[slot, key] - 1)
            case "clear":
                table.clear(slot)
                copies = Counter({copy: count for copy, count in copies.items() if copy[0] != slot})
            case "discard":
                assert table.discard(key) == sum(1 << each for each in SLOTS if copies[each, key])
                copies = Counter({copy: count for copy, count in copies.items() if copy[1] != key})
        held = {copy for copy, count in copies.items() if count}
        assert {(each, one) for each in SLOTS for one in table.keys_of(each)} == held
        assert table.extra_copies() == sum(count > 1 for count in copies.values())
        assert [one in table for one in KEYS] == [any(copy[1] == one for copy in held) for one in KEYS]


HOLDER_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("gain"), SLOT, st.integers(0, 6), st.integers(1, 3)),
        st.tuples(st.just("lose"), SLOT, st.integers(0, 8), st.none()),
        st.tuples(st.just("lose_all"), SLOT, st.sets(st.integers(0, 8)), st.none()),
        st.tuples(st.just("add"), SLOT, st.integers(0, 511), st.none()),
        st.tuples(st.just("drop"), SLOT, st.none(), st.none()),
        st.tuples(st.just("cut_to"), st.none(), st.integers(0, 8), st.none()),
    ),
    min_size=25,
    max_size=40,
)


def bits_of(held: set[int]) -> int:
    return sum(1 << at for at in held)


@settings(max_examples=300, deadline=None)
@given(steps=HOLDER_STEPS)
def test_holders_of_a_run_are_sets_of_its_blocks(steps: list[Any]) -> None:
    """With gaps or without; who holds the longest stretch is known after every step."""
    holders, sets = Holders(), {slot: set[int]() for slot in SLOTS}
    for what, slot, which, count in steps:
        match what:
            case "gain":
                span = set(range(which, which + count))
                assert holders.gain(slot, which, which + count) == bits_of(span & sets[slot]) >> which
                sets[slot] |= span
            case "lose":
                assert holders.lose(slot, which) == (which in sets[slot])
                sets[slot].discard(which)
            case "lose_all":
                holders.lose_all(slot, which & sets[slot])
                sets[slot] -= which
            case "add":
                holders.add(slot, which)
                sets[slot] |= {at for at in range(9) if which >> at & 1}
            case "drop":
                holders.drop(slot)
                sets[slot].clear()
            case "cut_to":
                lost = {each: bits_of(held) >> which for each, held in sets.items() if bits_of(held) >> which}
                assert dict(holders.cut_to(which)) == lost
                sets = {each: {at for at in held if at < which} for each, held in sets.items()}
        every = set[int]().union(*sets.values())
        assert holders.length() == max(every, default=-1) + 1
        assert bool(holders) == bool(every)
        for at in range(10):
            assert holders.any_holds(at) == (at in every)
            for slot in SLOTS:
                others = [held for each, held in sets.items() if each != slot]
                assert holders.any_holds(at, beside=slot) == any(at in held for held in others)
            assert [holders.holds(each, at) for each in SLOTS] == [at in sets[each] for each in SLOTS]
        for each, held in sets.items():
            assert holders.bits(each) == bits_of(held)
            first = next(at for at in range(12) if at not in held)
            assert holders.cuts.get(each, 0) == first
            assert [holders.holds_first(each, at) for at in range(12)] == [at <= first for at in range(12)]
