"""A rank whose layers all attend within windows: no dense group names its blocks.

Events as vLLM 0.32 sends them for such a model: the tokens of all blocks that a step has filled, the names of those
that lie before the last place where the prompt can be resumed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK = 16
#: A window of two blocks.
WINDOW_TOKENS = 2 * BLOCK + 1


def prompt(blocks: int, *, first: int = 0, rest: int = 1) -> array[int]:
    return array("I", range(first, first + blocks * BLOCK + rest))


def keys(tokens: Sequence[int], salt: str = "") -> list[int]:
    return block_keys(tokens, block_tokens=BLOCK, parent=namespace_seed("", salt))


def names(tokens: Sequence[int]) -> list[int]:
    return [key ^ 1 for key in keys(tokens)]


def stored(tokens: array[int], kept: slice, *, start: int = 0) -> BlockStored:
    """Of the blocks from ``start`` on those are named that are ``kept``."""
    known = names(tokens)
    end = len(known) * BLOCK
    parent = known[start - 1] if start else None
    return BlockStored(
        tuple(known[kept]),
        parent,
        tokens[start * BLOCK : end],
        BLOCK,
        kind="sliding_window",
        window_tokens=WINDOW_TOKENS,
    )


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(block_tokens=BLOCK)
    index.add_rank(0, domain="engine")
    return index


def hear(index: PrefixIndex, *events: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
    for event in events:
        index.apply(0, event)
    index.end_batch(0)


def found(index: PrefixIndex, tokens: Sequence[int], salt: str = "") -> int:
    return index.reusable_tokens(keys(tokens, salt), prompt_tokens=len(tokens)).get(0, 0) // BLOCK


def test_a_prompt_is_found_where_its_last_blocks_are_kept(index: PrefixIndex) -> None:
    """The two blocks before its end suffice; where it goes on otherwise a block earlier, one of them is too few."""
    asked = prompt(6)
    hear(index, stored(asked, slice(4, 6)))
    assert found(index, asked) == 6
    assert found(index, [*asked[: 5 * BLOCK], *prompt(3, first=900)]) == 0
    assert index.blocks(0) == 2


def test_an_answers_blocks_are_not_kept_and_name_nothing(index: PrefixIndex) -> None:
    """They are told of without names; the next prompt is stored behind the block it was resumed at."""
    asked = prompt(9)
    first = asked[: 6 * BLOCK + 1]
    hear(index, stored(first, slice(4, 6)), stored(asked[: 7 * BLOCK + 1], slice(0, 0), start=6))
    assert found(index, asked) == 6
    hear(index, stored(asked, slice(7, 9), start=6))
    assert found(index, asked) == 9


def test_a_prompt_that_ends_with_a_block_keeps_those_before_it(index: PrefixIndex) -> None:
    """Its last token is always computed, so that it is resumed a block earlier: its request tells."""
    asked = prompt(6, rest=0)
    index.promise(0, keys(asked), prompt_tokens=len(asked))
    hear(index, stored(asked, slice(3, 5)))
    assert found(index, asked) == 5
    assert found(index, [*asked, 7]) == 5


def test_a_salted_prompt_is_known_by_its_request(index: PrefixIndex) -> None:
    """The salt is told with the first block, which is not kept; nobody else finds what is."""
    asked = prompt(6)
    ticket = index.promise(0, keys(asked, "tenant"), prompt_tokens=len(asked))
    hear(index, stored(asked, slice(4, 6)))
    index.provisional.drop(ticket)
    assert (found(index, asked, "tenant"), found(index, asked)) == (6, 0)


def test_what_is_removed_or_cleared_is_not_found(index: PrefixIndex) -> None:
    """One removal for each copy."""
    asked, other = prompt(6), prompt(4, first=500)
    last = names(asked)[5]
    hear(index, stored(asked, slice(4, 6)), stored(asked, slice(4, 6)), stored(other, slice(2, 4)))
    hear(index, BlockRemoved((last,)))
    assert found(index, asked) == 6
    hear(index, BlockRemoved((last,)))
    assert (found(index, asked), found(index, other), index.blocks(0)) == (0, 4, 3)
    hear(index, AllBlocksCleared())
    assert (found(index, other), index.blocks(0)) == (0, 0)


def test_what_is_in_flight_counts_at_once(index: PrefixIndex) -> None:
    """As soon as it is known what kind of rank this is."""
    hear(index, stored(prompt(3), slice(1, 3)))
    asked = prompt(6, first=300)
    index.promise(0, keys(asked), prompt_tokens=len(asked))
    assert found(index, asked) == 6
    assert found(index, asked[: 4 * BLOCK + 1]) == 0


def test_no_more_is_known_than_may_be() -> None:
    """The longest known blocks are forgotten, and with them their names."""
    index = PrefixIndex(block_tokens=BLOCK, max_blocks=4)
    index.add_rank(0, domain="engine")
    asked = [prompt(3, first=1000 * number) for number in range(3)]
    hear(index, *(stored(each, slice(1, 3)) for each in asked))
    assert [found(index, each) for each in asked] == [0, 3, 3]
    assert (index.blocks(0), index.evicted_blocks) == (4, 2)
    index.sweep()
    hear(index, BlockRemoved(tuple(names(asked[0])[1:])), BlockRemoved(tuple(names(asked[1])[1:])))
    assert (index.blocks(0), [found(index, each) for each in asked]) == (2, [0, 0, 3])


def test_a_dense_group_may_turn_up_later(index: PrefixIndex) -> None:
    """Who listens from the middle on may hear of a window alone first; then full attention bounds what is found."""
    asked = prompt(6)
    hear(index, stored(asked, slice(4, 6)))
    dense = names(asked)
    hear(index, BlockStored(tuple(dense[:3]), None, asked[: 3 * BLOCK], BLOCK, group=1, kind="full_attention"))
    assert found(index, asked) == 0
    hear(index, BlockStored(tuple(dense[3:]), dense[2], asked[3 * BLOCK : 6 * BLOCK], BLOCK, group=1))
    assert found(index, asked) == 6
