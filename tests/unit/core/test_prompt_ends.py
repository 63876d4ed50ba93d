"""Ends of prompts that are found inside a block, by units smaller than it: blocks of six tokens, three units."""

from __future__ import annotations

import pytest

from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored

TOKENS = tuple(range(100, 112))


def keys(tokens: tuple[int, ...]) -> list[int]:
    return block_keys(tokens, block_tokens=2, parent=namespace_seed("", ""))


def name(tokens: tuple[int, ...]) -> int:
    """An engine's name for the block that ends these tokens."""
    return hash(tokens) & (1 << 64) - 1


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine")
    return index


def unit(prompt: tuple[int, ...], end: int, group: int) -> BlockStored:
    """A prompt's end, by its last unit. The unit before it has a name, which nobody has stored."""
    kind = "mamba" if group else "full_attention"
    token_ids = prompt[2 * end - 2 : 2 * end]
    return BlockStored((name(prompt[: 2 * end]),), name(prompt[: 2 * end - 2]), token_ids, 2, group=group, kind=kind)


def block(prompt: tuple[int, ...], group: int) -> BlockStored:
    kind = "mamba" if group else "full_attention"
    return BlockStored((name(prompt[:6]),), None, prompt[:6], 6, group=group, kind=kind)


def test_a_prompts_end_is_found_inside_a_block(index: PrefixIndex) -> None:
    """A prompt of 11: a block of six, then its end after ten tokens, where the state is kept, too."""
    prompt = TOKENS[:11]
    index.apply(0, block(prompt, 1))
    index.apply(0, block(prompt, 0))
    ticket = index.promise(0, keys(prompt), prompt_tokens=11)
    for group in (1, 0):
        index.apply(0, unit(prompt, 5, group))
    index.provisional.drop(ticket)

    def found(tokens: int) -> int:
        return index.reusable_tokens(keys(TOKENS[:tokens]), prompt_tokens=tokens).get(0, 0)

    assert found(12) == 10  # all of the prompt but its last token, which has no unit to itself
    assert found(10) == 6  # the last token is always computed, and between six and ten there is no state
    index.apply(0, BlockRemoved((name(prompt[:10]),), group=1))
    assert found(12) == 6
    index.apply(0, BlockRemoved((name(prompt[:10]),), group=0))
    assert found(12) == 6


def test_a_block_is_known_for_one_though_ends_inside_blocks_were_heard_first(index: PrefixIndex) -> None:
    """Who begins to listen late takes them for blocks, until the first that is larger: then all is as for others."""
    for group in (1, 0):
        index.apply(0, unit(TOKENS[:11], 5, group))
    assert index.stride(0) == 1

    test_a_prompts_end_is_found_inside_a_block(index)
    assert index.stride(0) == 3


def test_a_prompts_end_is_promised_where_such_ends_are_known(index: PrefixIndex) -> None:
    """From the first event of that kind on the next prompt's end counts at once, and is confirmed by its events."""
    test_a_prompts_end_is_found_inside_a_block(index)
    prompt = tuple(range(300, 311))

    ticket = index.promise(0, keys(prompt), prompt_tokens=11)
    assert index.reusable_tokens(keys((*prompt, 1)), prompt_tokens=12) == {0: 10}
    index.provisional.drop(ticket)
    assert index.reusable_tokens(keys((*prompt, 1)), prompt_tokens=12) == {}
