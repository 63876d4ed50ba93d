"""Ranks without a dense group: what an event does not tell. Blocks of two tokens; engine names are made up."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.forecast import Pool
from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored, Event

TOKENS = tuple(range(100, 112))  # six blocks


def keys_of(tokens: Sequence[int], salt: str = "") -> list[int]:
    return block_keys(tokens, block_tokens=2, parent=namespace_seed("", salt))


def window(
    names: tuple[int, ...], *, start: int = 0, parent: int | None = None, extra: tuple[tuple[str, ...], ...] = ()
) -> BlockStored:
    """A window of five tokens: two blocks before a place."""
    return BlockStored(
        names, parent, TOKENS[2 * start :], 2, kind="sliding_window", window_tokens=5, extra_keys=extra or None
    )


def apply(index: PrefixIndex, *events: Event) -> None:
    for event in events:
        index.apply(0, event)
    index.end_batch(0)


def index_of(pool: Pool | None = None) -> PrefixIndex:
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine", pool=pool)
    return index


def reusable(index: PrefixIndex, blocks: int, salt: str = "") -> int:
    tokens = (*TOKENS[: 2 * blocks], 1)
    return index.reusable_tokens(keys_of(tokens, salt), prompt_tokens=len(tokens)).get(0, 0) // 2


def test_of_blocks_before_two_places_only_the_last_ones_are_known() -> None:
    """Four of six blocks: two before the end; before which other place the first two lie is not told."""
    index = index_of()
    apply(index, window((1, 2, 5, 6)))
    assert [reusable(index, blocks) for blocks in range(1, 7)] == [0, 0, 0, 0, 0, 6]
    assert index.blocks(0) == 2


def test_extra_keys_of_fewer_blocks_than_tokens_are_of_none_that_is_known() -> None:
    """Two names of six blocks, with an image's key beside the last: the prompt is taken to be without images."""
    index = index_of()
    apply(index, window((5, 6), extra=((), ("image",))))
    assert reusable(index, 6) == 6


def test_behind_a_block_that_nobody_knows_nothing_is_placed() -> None:
    """The parent was stored before anybody listened: where the blocks lie cannot be told."""
    index = index_of()
    apply(index, window((1, 2, 3, 4, 5, 6)))
    apply(index, window((15, 16), start=4, parent=99))
    assert index.blocks(0) == 6
    assert index.residency(0)[0] == frozenset(keys_of(TOKENS))


def test_what_was_promised_before_a_rank_is_known_to_be_lone_does_not_count() -> None:
    """Its dense promise; what the window is promised does."""
    index = index_of()
    index.promise(0, keys_of(TOKENS), prompt_tokens=13)
    assert reusable(index, 6) == 6
    other = BlockStored((50,), None, (1, 2), 2, kind="sliding_window", window_tokens=5)
    apply(index, other)
    assert reusable(index, 6) == 0
    assert index.stored_tokens(keys_of(TOKENS), prompt_tokens=13) == {}


def test_nothing_is_foretold_of_windows_alone() -> None:
    """A pool's forecast is of chains."""
    index = index_of(Pool(64))
    apply(index, window((5, 6)))
    assert index.pool(0) is None
    assert reusable(index, 6) == 6
