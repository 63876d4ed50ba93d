"""What the index forgets to keep within its bound, case by case. Blocks of one token; block n is named n."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored

WINDOW, DENSE = 0, 1


def index_of(max_blocks: int) -> PrefixIndex:
    index = PrefixIndex(block_tokens=1, max_blocks=max_blocks)
    index.add_rank(0, domain="engine")
    return index


def keys_of(tokens: Sequence[int]) -> list[int]:
    return block_keys(tokens, block_tokens=1, parent=namespace_seed("", ""))


def store(index: PrefixIndex, tokens: Sequence[int], *, behind: int | None = None, medium: str = "GPU") -> None:
    """Blocks of the dense group."""
    index.apply(0, BlockStored(tuple(tokens), behind, tokens, 1, group=DENSE, kind="full_attention", medium=medium))


def store_window(index: PrefixIndex, tokens: Sequence[int], *, behind: int | None = None) -> None:
    """The same of a window of two blocks, which keeps all."""
    index.apply(0, BlockStored(tuple(tokens), behind, tokens, 1, group=WINDOW, kind="sliding_window", window_tokens=3))


def remove(index: PrefixIndex, *names: int, group: int = DENSE, medium: str = "GPU") -> None:
    index.apply(0, BlockRemoved(names, group=group, medium=medium))


def reusable(index: PrefixIndex, tokens: Sequence[int]) -> int:
    return index.reusable_tokens(keys_of(tokens), prompt_tokens=len(tokens) + 1).get(0, 0)


def test_no_block_is_known_without_the_one_before_it() -> None:
    """To make room the last of a chain goes, behind which the new one was stored: that one cannot come in, either."""
    index = index_of(max_blocks=4)
    store(index, (1, 2, 3, 4))
    store(index, (5,), behind=4)
    assert index.residency(0)[-1] == frozenset(keys_of((1, 2, 3)))
    assert (len(index), index.blocks(0), reusable(index, (1, 2, 3, 4, 5))) == (3, 3, 3)

    store(index, (4, 5), behind=3)  # there is room for no more than one of them
    assert len(index) <= 4
    assert index.residency(0)[-1] <= frozenset(keys_of((1, 2, 3, 4)))


def test_what_was_forgotten_is_forgotten_in_all_groups() -> None:
    """A window's blocks are given up unheard: nothing of them is known when the chain is stored once more."""
    index = index_of(max_blocks=3)
    store_window(index, (1, 2, 3))
    store(index, (1, 2, 3))
    assert reusable(index, (1, 2, 3)) == 3
    store_window(index, (7, 8, 9))
    store(index, (7, 8, 9))
    assert (reusable(index, (1, 2, 3)), reusable(index, (7, 8, 9))) == (0, 3)
    assert index.residency(0) == {-1: frozenset(keys_of((7, 8, 9))), WINDOW: frozenset(keys_of((7, 8, 9)))}

    remove(index, 1, 2, 3, group=WINDOW)
    store(index, (1, 2, 3))  # by one whose window had been kept
    assert reusable(index, (1, 2, 3)) == 0


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_copies_of_what_was_forgotten_do_not_count(medium: str) -> None:
    """A block stored thrice and forgotten is stored once more, and removed: nobody knows of another copy."""
    index = index_of(max_blocks=3)
    for name, before in ((1, None), (2, 1)):  # one by one: a whole prompt told once more was found, not stored
        for _ in range(3):
            store(index, (name,), behind=before, medium=medium)
    assert index._copies(0) == (6 if medium == "GPU" else 0)
    store(index, (7, 8, 9), medium=medium)
    store(index, (1, 2), medium=medium)
    loadable = index.loadable_tokens(keys_of((1, 2)), prompt_tokens=3)
    assert (reusable(index, (1, 2)), loadable) == ((2, {}) if medium == "GPU" else (0, {0: 2}))

    assert index._copies(0) == index.blocks(0)
    remove(index, 1, 2, medium=medium)
    assert reusable(index, (1, 2)) == 0
    assert not index.loadable_tokens(keys_of((1, 2)), prompt_tokens=3)
    assert index._copies(0) == index.blocks(0)


def test_a_hole_at_a_chains_end_goes_with_what_stood_behind_it() -> None:
    """Of four blocks the third is removed and the last one forgotten: two are left that anybody holds."""
    index = index_of(max_blocks=4)
    store(index, (1, 2, 3, 4))
    remove(index, 3)
    assert (len(index), index.blocks(0)) == (4, 3)
    store(index, (9,))
    assert index.residency(0)[-1] == frozenset({*keys_of((1, 2)), *keys_of((9,))})
    assert len(index) == 3
