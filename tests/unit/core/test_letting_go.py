"""A rank's clear takes time in what the rank held, and what nobody holds then goes in slices."""

from __future__ import annotations

import pytest

from router.core.blocks import SLICE
from router.core.chains import Chains
from router.core.holders import Holders, Holdings
from router.core.index import PrefixIndex
from router.core.tables import CopyTable
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

FULL = "full_attention"
WINDOW = "sliding_window"
CHAINS = 4 * SLICE
MANY = 2000


def stored(number: int, *, group: int = 0, kind: str = FULL) -> BlockStored:
    return BlockStored((number,), None, (number, number), 2, group=group, kind=kind, window_tokens=2)


@pytest.fixture
def index() -> PrefixIndex:
    """Rank 0 has many short chains, rank 1 and rank 2 one each."""
    index = PrefixIndex(block_tokens=2)
    for slot in range(3):
        index.add_rank(slot, domain="engine")
    for number in range(CHAINS):
        index.apply(0, stored(number))
    for slot in (1, 2):
        index.apply(slot, stored(CHAINS + slot))
    return index


def found(index: PrefixIndex, number: int) -> dict[int, int]:
    keys = block_keys((number, number), block_tokens=2, parent=namespace_seed("", ""))
    return index.reusable_tokens(keys, prompt_tokens=3)


def test_a_clear_looks_at_nothing_of_other_ranks(index: PrefixIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of runs no more are touched than the rank has."""
    touched: list[int] = []
    monkeypatch.setattr(Holders, "drop", lambda _self, slot: touched.append(slot))
    monkeypatch.setattr(Chains, "runs", lambda _self: pytest.fail("looked at all runs"))
    index.apply(1, AllBlocksCleared())
    assert touched == [1]


def test_what_nobody_holds_goes_in_slices(index: PrefixIndex) -> None:
    """It is found no more at once; its memory follows with the events of whatever rank."""
    index.apply(0, AllBlocksCleared())
    assert [found(index, number) for number in (0, CHAINS - 1, CHAINS + 1)] == [{}, {}, {1: 2}]
    assert index.blocks(0) == 0
    assert CHAINS - SLICE <= len(index) - 2 < CHAINS
    for _ in range(CHAINS // SLICE):
        index.end_batch(1)
    assert len(index) == 2


def test_what_is_stored_meanwhile_stays(index: PrefixIndex) -> None:
    """The rank goes on at once, and others store what has not been let go of yet."""
    index.apply(0, AllBlocksCleared())
    index.apply(0, stored(CHAINS - 1))
    index.apply(2, stored(CHAINS - 2))
    while index.tidy():
        pass
    assert [found(index, CHAINS - at) for at in (1, 2, 3)] == [{0: 2}, {2: 2}, {}]
    assert len(index) == 4
    index.sweep()
    assert len(index._names["engine"].places) == 4


def test_windows_of_others_hold_up_no_clear(index: PrefixIndex) -> None:
    """Rank 1 has the windows of a prompt whose other blocks rank 0 alone has: a clear of rank 0 goes in slices, too."""
    index.apply(1, stored(7, group=1, kind=WINDOW))
    index.apply(1, BlockRemoved((CHAINS + 1,)))
    index.apply(0, AllBlocksCleared())
    assert CHAINS - SLICE <= len(index) < CHAINS + 2
    while index.tidy():
        pass
    assert index.residency(1)[1] != frozenset()

    index.apply(1, BlockRemoved((7,), group=1))
    assert index.residency(1)[1] == frozenset()
    index.sweep()
    assert [len(index), len(index._names["engine"])] == [1, 1]


@pytest.mark.parametrize("is_swept", [False, True])
def test_windows_are_lost_by_name_whatever_became_of_their_dense_blocks(is_swept: bool) -> None:
    """Rank 1 gave up the dense block in the middle, rank 0 all it had, and rank 1 the block behind: the window block
    that rank 1 kept in the middle still goes by its name."""
    index = PrefixIndex(block_tokens=2)
    for slot in range(2):
        index.add_rank(slot, domain="engine")
    names, tokens = (1, 2, 3), (1, 1, 2, 2, 3, 3)
    index.apply(1, BlockStored(names, None, tokens, 2, group=1, kind=WINDOW, window_tokens=3))
    for slot in range(2):
        index.apply(slot, BlockStored(names, None, tokens, 2, kind=FULL))
    index.apply(1, BlockRemoved((2,)))
    index.apply(0, AllBlocksCleared())
    if is_swept:
        index.sweep()
    index.apply(1, BlockRemoved((3,)))
    assert len(index.residency(1)[1]) == 3
    index.apply(1, BlockRemoved((2, 3), group=1))
    assert len(index.residency(1)[1]) == 1
    assert len(index) == 1


def test_a_sweep_goes_on_while_blocks_of_another_size_turn_up(index: PrefixIndex) -> None:
    """A rank with larger blocks is met between two slices."""
    index.sweep_soon()
    index.tidy(steps=CHAINS)
    index.add_rank(3, domain="engine")
    index.apply(3, BlockStored((1 << 40,), None, (5, 5, 5, 5), 4, kind=FULL))
    while index.tidy():
        pass
    assert not index._is_sweeping


def test_a_table_forgets_a_rank_by_its_own_keys() -> None:
    """Copies included; what others have, and what was gained and lost many times, is no matter."""
    table = CopyTable()
    for key in range(5000):
        table.gain(1, key)
    for key in range(3):
        for _ in range(4000):
            table.gain(0, key)
            table.lose(0, key)
        table.gain(0, key)
        table.gain(0, key)
    table.clear(0)
    assert table.keys_of(0) == frozenset()
    assert len(table.keys_of(1)) == 5000
    assert table.extra_copies() == 0


def test_what_a_slot_has_held_is_not_noted_for_ever() -> None:
    """A slot that gains and loses the same things has a list that follows what it holds."""
    held = {1, 2}
    holdings = Holdings[int](lambda _slot, each: each in held)
    for number in range(100_000):
        holdings.add(7, number % 5)
    assert len(holdings._held[7]) <= 2048
    assert {1, 2} <= set(holdings.take(7))
    assert holdings.take(7) == []


def test_what_is_asked_for_stays_when_the_index_is_full() -> None:
    """A head that is looked up between prompts that nobody sends again outlives all of them, wherever it was stored."""
    index = PrefixIndex(block_tokens=2, max_blocks=1000)
    index.add_rank(0, domain="engine")
    head = [7] * 2 * 100
    keys = block_keys(head, block_tokens=2, parent=namespace_seed("", ""))
    for number in range(1, 60):
        tokens = head if number == 5 else [100 + number] * 2 * 100
        index.apply(0, BlockStored(tuple(range(100 * number, 100 * number + 100)), None, tokens, 2, kind=FULL))
        if number > 5:
            assert index.reusable_tokens(keys, prompt_tokens=201) == {0: 200}
    assert len(index) == 1000


def test_one_event_looks_at_few_turns() -> None:
    """Where everything was asked for since it was stored, no event waits until all of it has had its turn."""
    index = PrefixIndex(block_tokens=2, max_blocks=5 * MANY)
    index.add_rank(0, domain="engine")
    chains = index._chains[1]
    passed_over = 0
    for number in range(MANY):
        used = sum(run.is_used for run in chains.runs())
        index.apply(0, stored(number))
        passed_over = max(passed_over, used - sum(run.is_used for run in chains.runs()))
        assert found(index, number) == {0: 2}
    assert index.evicted_blocks
    assert 0 < passed_over < MANY // 2


def test_what_was_asked_for_once_goes_in_its_turn() -> None:
    """Nothing is kept for having been used long ago; turns of what is gone are not kept either."""
    index = PrefixIndex(block_tokens=2, max_blocks=100)
    index.add_rank(0, domain="engine")
    index.apply(0, stored(1))
    assert found(index, 1) == {0: 2}
    for number in range(2, 5000):
        index.apply(0, stored(number))
    assert [found(index, number) for number in (1, 4890, 4999)] == [{}, {}, {0: 2}]
    assert len(index._chains[1]._turns) <= 2 * 100 + 256
