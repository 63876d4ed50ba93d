"""Promised blocks: how long they count, what ends them, and which namespace they belong to. Blocks of two tokens."""

from __future__ import annotations

import pytest

from router.core.index import PrefixIndex
from router.core.provisional import Ticket
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

TOKENS = tuple(range(100, 112))  # six blocks
PLAIN = namespace_seed("", "")


def keys(tokens: tuple[int, ...] = TOKENS, *, seed: int = PLAIN) -> list[int]:
    return block_keys(tokens, block_tokens=2, parent=seed)


def stored(first: int, last: int) -> BlockStored:
    """Blocks first..last of TOKENS; block n is named n."""
    tokens = TOKENS[2 * first : 2 * last + 2]
    return BlockStored(tuple(range(first, last + 1)), first - 1 if first else None, tokens, 2)


def window(span: tuple[int, int], kept: tuple[int, ...]) -> BlockStored:
    """A window group's event over blocks span[0]..span[1], of which it keeps only some."""
    first, last = span
    tokens = TOKENS[2 * first : 2 * last + 2]
    return BlockStored(kept, first - 1 if first else None, tokens, 2, group=1, kind="sliding_window", window_tokens=5)


def reusable(index: PrefixIndex, tokens: tuple[int, ...] = (*TOKENS, 1), *, seed: int = PLAIN) -> int:
    return index.reusable_tokens(keys(tokens, seed=seed), prompt_tokens=len(tokens)).get(0, 0)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine")
    return index


def promise(index: PrefixIndex, tokens: tuple[int, ...] = TOKENS, *, seed: int = PLAIN) -> Ticket:
    return index.promise(0, keys(tokens, seed=seed), prompt_tokens=len(tokens) + 1)


def test_from_its_event_on_a_block_is_the_events_own(index: PrefixIndex) -> None:
    """Stored, then removed: gone at once, though the request still runs."""
    promise(index)
    index.apply(0, stored(0, 5))
    index.apply(0, BlockRemoved((4, 5)))

    assert reusable(index) == 8


def test_what_the_prompts_own_events_did_not_bring_was_promised_wrongly(index: PrefixIndex) -> None:
    """The window's tail is promised at the prompt's end; the batch that stored the prompt kept nothing of it."""
    index.apply(0, window((0, 0), ()))
    promise(index)
    assert reusable(index) == 12

    index.apply(0, stored(0, 5))
    assert reusable(index) == 12  # the batch may go on
    index.provisional.settle()
    assert reusable(index) == 0


def test_a_prefix_that_only_the_full_group_holds_is_kept_by_who_finds_it(index: PrefixIndex) -> None:
    """vLLM's junction: the second prompt with a head reuses nothing and leaves a window there, for the third."""
    index.apply(0, window((0, 5), (4, 5)))
    index.apply(0, stored(0, 5))
    fork = (*TOKENS[:6], 1, 2, 3, 4)
    assert reusable(index, (*fork, 9)) == 0
    assert index.stored_tokens(keys(fork), prompt_tokens=len(fork)) == {0: 6}

    promise(index, fork)
    assert reusable(index, (*TOKENS[:6], 7, 8, 9)) == 6


def test_generated_blocks_are_kept_whole_by_the_full_group_only(index: PrefixIndex) -> None:
    """A window group that thins out keeps nothing of an answer; one that keeps all does."""
    index.apply(0, window((0, 0), ()))
    index.promise(0, keys()[:3], prompt_tokens=7)
    ticket = index.promise_more(0, keys(), start=3)
    assert reusable(index) == 6

    index.provisional.drop(ticket)
    index.apply(0, AllBlocksCleared())
    other = PrefixIndex(block_tokens=2)
    other.add_rank(0, domain="engine")
    other.apply(0, window((0, 5), (0, 1, 2, 3, 4, 5)))
    other.promise(0, keys()[:3], prompt_tokens=7)
    other.promise_more(0, keys(), start=3)
    assert reusable(other) == 12


def test_a_group_that_keeps_what_was_generated_keeps_all(index: PrefixIndex) -> None:
    """However short the prompts are that were heard of: blocks behind a prompt's end are before no other's."""
    index.promise(0, keys()[:3], prompt_tokens=7)
    index.apply(0, window((0, 2), (0, 1, 2)))
    index.apply(0, stored(0, 2))
    assert index._ranks[0].segment_tokens == {}

    index.apply(0, window((3, 3), (3,)))
    assert index._ranks[0].segment_tokens == {1: 1}


def test_the_workers_word_on_what_is_kept_is_not_learned_anew() -> None:
    """An event may name all blocks that it covers by chance."""
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine", retention_tokens=0)
    index.apply(0, window((0, 5), (0, 1, 2, 3, 4, 5)))

    assert index._ranks[0].segment_tokens == {1: 0}


def test_a_clear_takes_what_ended_requests_left(index: PrefixIndex) -> None:
    """What a running request will store is still to come."""
    ended, running = (200, 201), (300, 301)
    index.provisional.end(promise(index, ended))
    promise(index, running)
    index.apply(0, AllBlocksCleared())

    assert (reusable(index, (*ended, 1)), reusable(index, (*running, 1))) == (0, 2)


def test_nothing_is_left_of_a_rank_that_is_forgotten(index: PrefixIndex) -> None:
    """Its tickets are void, and dropping them later touches nothing."""
    ticket = promise(index)
    index.provisional.forget(0)
    again = promise(index)
    index.provisional.drop(ticket)
    assert reusable(index) == 12

    index.provisional.drop(again)
    assert (len(index.provisional), index.provisional.dense) == (0, {})


def test_events_without_the_extra_key_go_to_the_tenant_that_waits(index: PrefixIndex) -> None:
    """SGLang names both tenants' blocks alike: what arrives is of the one who asked, and each removal takes one."""
    tenant = namespace_seed("", "", "tenant")
    index.namespaces.learn(keys(), keys(seed=tenant), seed=tenant)
    promise(index, seed=tenant)
    index.apply(0, stored(0, 5))
    assert (reusable(index, seed=tenant), reusable(index)) == (12, 0)

    promise(index)
    index.apply(0, stored(0, 5))
    assert (reusable(index, seed=tenant), reusable(index)) == (12, 12)

    index.apply(0, BlockRemoved((5,)))
    assert sorted((reusable(index, seed=tenant), reusable(index))) == [10, 12]


def test_groups_of_other_block_sizes_agree_at_a_common_multiple() -> None:
    """Dense blocks of two units, window blocks of one: no hit ends inside a dense block."""
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine")
    index.apply(0, BlockStored((1, 3, 5), None, TOKENS, 4))
    index.apply(0, BlockStored((), None, TOKENS[:2], 2, group=1, kind="sliding_window", window_tokens=3))
    index.provisional.sparse[1] = dict.fromkeys(keys()[:3], 1)  # the window lies before units 1, 2 and 3

    assert reusable(index) == 4


def test_an_adapters_blocks_are_its_own(index: PrefixIndex) -> None:
    """vLLM repeats the adapter's name in every block's extra keys; the prompt's chain begins with it once."""
    event = stored(0, 5)
    named = BlockStored(event.hashes, None, event.token_ids, 2, lora_name="a", extra_keys=(("a",),) * 6)
    index.apply(0, named)

    assert set(index.adapters) == {"a"}
    assert reusable(index, seed=namespace_seed("a", "")) == 12
    assert reusable(index) == 0


def test_an_event_that_overtakes_its_first_token_goes_to_who_sent_the_text(index: PrefixIndex) -> None:
    """Nothing is promised yet, but the text has been sent under one extra key only."""
    tenant = namespace_seed("", "", "tenant")
    index.namespaces.learn(keys(), keys(seed=tenant), seed=tenant)
    index.apply(0, stored(0, 5))

    assert (reusable(index, seed=tenant), reusable(index)) == (12, 0)
