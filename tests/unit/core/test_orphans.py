"""Blocks whose parent is not known yet: how many may wait, and what a removal takes of them."""

from __future__ import annotations

from router.core.bounded import FEW_ORPHANS
from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored


def index_of(max_blocks: int = 1 << 23) -> PrefixIndex:
    index = PrefixIndex(block_tokens=1, max_blocks=max_blocks)
    index.add_rank(0, domain="engine")
    return index


def test_blocks_that_wait_are_bounded_however_long_their_events_are() -> None:
    """Of 40 events of 100 blocks the last ten wait."""
    index = index_of(max_blocks=100)
    for number in range(40):
        names = tuple(range(1000 * number, 1000 * number + 100))
        index.apply(0, BlockStored(names, 10**6 + number, list(range(100)), 1))

    assert index.orphans(0) == FEW_ORPHANS // 100 * 100 == 1000


def test_a_removal_takes_the_events_that_bring_the_block_and_no_others() -> None:
    """Three events wait for one parent; a block of the first, and one that the others share, are removed in turn."""
    index = index_of()
    for names in ((10, 11), (20, 21), (20, 22), (30, 31)):
        index.apply(0, BlockStored(names, 1, names, 1))
    index.apply(0, BlockRemoved((11,)))
    assert index.orphans(0) == 6
    index.apply(0, BlockRemoved((20,)))
    assert index.orphans(0) == 2

    index.apply(0, BlockStored((1,), None, (1,), 1))
    assert index.orphans(0) == 0
    found = {
        last: index.reusable_tokens(
            block_keys((1, *last), block_tokens=1, parent=namespace_seed("", "")), prompt_tokens=len(last) + 2
        )
        for last in ((10, 11), (20, 21), (30, 31))
    }
    assert found == {(10, 11): {0: 1}, (20, 21): {0: 1}, (30, 31): {0: 3}}


def test_waits_that_hang_on_one_another_end_all_at_once_however_many() -> None:
    """Three thousand blocks come one by one, the last first, and then the one that they all hang on."""
    index, chain = index_of(), range(1, 3001)
    for name in reversed(chain):
        index.apply(0, BlockStored((name,), name - 1, (name,), 1))
    assert index.orphans(0) == 3000

    index.apply(0, BlockStored((0,), None, (0,), 1))

    assert (index.orphans(0), index.blocks(0)) == (0, 3001)
    keys = block_keys((0, *chain), block_tokens=1, parent=namespace_seed("", ""))
    assert index.reusable_tokens(keys, prompt_tokens=3002) == {0: 3001}


def test_a_parent_among_blocks_of_another_length_is_not_known() -> None:
    """Two ranks that name alike have blocks of one and of three tokens: what one stores the other has not."""
    index = index_of()
    index.add_rank(1, domain="engine")
    index.apply(0, BlockStored((1, 2, 3), None, (1, 2, 3), 1))
    index.apply(1, BlockStored((9,), None, (7, 7, 7), 3))
    index.apply(1, BlockStored((4,), 3, (4, 5, 6), 3))
    assert index.orphans(1) == 1
    assert index.blocks(1) == 1

    index.apply(1, BlockRemoved((3, 4, 9)))
    index.apply(0, BlockRemoved((3, 2, 1)))
    assert (index.orphans(1), index.blocks(0), index.blocks(1)) == (0, 0, 0)
    index.sweep()
    assert len(index) == 0
