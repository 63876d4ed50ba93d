"""The index, case by case. Blocks of two tokens; engine names are small numbers made up by the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.index import PrefixIndex
from router.core.rank_state import MAX_ALIKE, MAX_ORPHANS
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

TOKENS = tuple(range(100, 112))  # six blocks


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(block_tokens=2)
    for slot in range(3):
        index.add_rank(slot, domain="engine")
    return index


def stored(first: int, last: int, *, parent: int | None = None, tokens: Sequence[int] = TOKENS) -> BlockStored:
    """Blocks first..last of TOKENS; block n is named n."""
    return BlockStored(
        hashes=tuple(range(first, last + 1)),
        parent=parent if parent is not None else (first - 1 if first else None),
        token_ids=tokens[2 * first : 2 * (last + 1)],
        block_tokens=2,
    )


def reusable(index: PrefixIndex, tokens: Sequence[int] = (*TOKENS, 1), *, salt: str = "") -> dict[int, int]:
    keys = block_keys(tokens, block_tokens=2, parent=namespace_seed("", salt))
    return index.reusable_tokens(keys, prompt_tokens=len(tokens))


def loadable(index: PrefixIndex) -> dict[int, int]:
    keys = block_keys((*TOKENS, 1), block_tokens=2, parent=namespace_seed("", ""))
    return index.loadable_tokens(keys, prompt_tokens=13)


def test_each_rank_is_as_deep_as_it_holds(index: PrefixIndex) -> None:
    """Three ranks with one, three and six blocks."""
    for slot, last in enumerate((0, 2, 5)):
        index.apply(slot, stored(0, last))

    assert reusable(index) == {0: 2, 1: 6, 2: 12}


def test_the_last_token_is_always_computed(index: PrefixIndex) -> None:
    """A prompt of exactly six whole blocks reuses five."""
    index.apply(0, stored(0, 5))

    assert reusable(index, TOKENS) == {0: 10}


def test_a_third_copy_outlives_two_removals(index: PrefixIndex) -> None:
    """Engines remove each copy with an event of its own."""
    for _ in range(3):
        index.apply(0, stored(0, 0))
    for expected in ({0: 2}, {0: 2}, {}):
        index.apply(0, BlockRemoved(hashes=(0,)))
        assert reusable(index) == expected


def test_a_hole_cuts_the_prefix_until_it_is_filled(index: PrefixIndex) -> None:
    """Blocks behind a hole are resident, useless, and useful again once the hole is filled."""
    index.apply(0, stored(0, 2))
    index.apply(0, stored(3, 5))
    index.apply(0, BlockRemoved(hashes=(2,)))
    assert reusable(index) == {0: 4}

    index.apply(0, stored(2, 2))
    assert reusable(index) == {0: 12}


def test_what_is_stored_behind_a_hole_stays_useless(index: PrefixIndex) -> None:
    """A new tail behind a hole lengthens nothing."""
    index.apply(0, stored(0, 2))
    index.apply(0, BlockRemoved(hashes=(1,)))
    index.apply(0, stored(3, 5))

    assert reusable(index) == {0: 2}


def test_a_child_that_comes_first_waits_for_its_parent(index: PrefixIndex) -> None:
    """Late joiners see tails whose head they have not seen; nothing is guessed."""
    index.apply(0, stored(4, 5))
    index.apply(0, stored(2, 3))
    assert reusable(index) == {}
    assert index.orphans(0) == 4

    index.apply(0, stored(0, 1))
    assert reusable(index) == {0: 12}
    assert index.orphans(0) == 0


def test_orphans_are_bounded(index: PrefixIndex) -> None:
    """A stream of tails without heads does not grow for ever."""
    for number in range(MAX_ORPHANS + 10):
        index.apply(0, BlockStored(hashes=(number,), parent=10**6 + number, token_ids=(1, 2), block_tokens=2))

    assert index.orphans(0) == MAX_ORPHANS


def test_tenants_with_one_text_do_not_share(index: PrefixIndex) -> None:
    """A salt roots a chain of its own, whichever field carries it."""
    event = stored(0, 5)
    index.apply(0, BlockStored(event.hashes, None, event.token_ids, 2, extra_keys=(("a",),) + (None,) * 5))
    index.apply(1, BlockStored(tuple(range(50, 56)), None, event.token_ids, 2, cache_salt="a"))
    index.apply(2, event)

    assert reusable(index, salt="a") == {0: 12, 1: 12}
    assert reusable(index) == {2: 12}
    assert reusable(index, salt="b") == {}


def test_adapters_do_not_share_with_their_base(index: PrefixIndex) -> None:
    """Blocks made under an adapter serve no request to the base model."""
    event = stored(0, 5)
    index.apply(0, BlockStored(event.hashes, None, event.token_ids, 2, lora_name="adapter"))

    assert reusable(index) == {}


def test_an_image_inside_a_prompt_divides_what_follows(index: PrefixIndex) -> None:
    """Extra keys of an inner block enter the chain there: the head is shared, the rest is not."""
    event = stored(0, 5)
    extra = (None, None, ("image-1", 0), None, None, None)
    index.apply(0, BlockStored(event.hashes, None, event.token_ids, 2, extra_keys=extra))

    assert reusable(index) == {0: 4}


def test_a_window_that_comes_before_the_dense_blocks_is_joined_by_name(index: PrefixIndex) -> None:
    """vLLM sends a step's window group first: its hashes name blocks that no dense event has named yet."""
    window = BlockStored((4, 5), 3, TOKENS[8:], 2, group=0, kind="sliding_window", window_tokens=5)
    index.apply(0, window)
    dense = stored(0, 5)
    index.apply(0, BlockStored(dense.hashes, None, dense.token_ids, 2, group=1, kind="full_attention"))
    assert reusable(index) == {0: 12}

    index.apply(0, BlockRemoved(hashes=(5,), group=0))
    assert reusable(index) == {}


def test_a_recurrent_state_counts_at_its_very_end(index: PrefixIndex) -> None:
    """A hit needs the checkpoint at the boundary itself."""
    dense = stored(0, 5)
    index.apply(0, BlockStored(dense.hashes, None, dense.token_ids, 2, group=1, kind="full_attention"))
    index.apply(0, BlockStored((2,), 1, TOKENS[4:6], 2, group=0, kind="mamba"))

    assert reusable(index) == {0: 6}


def test_what_lies_on_another_machine_is_neither_held_nor_lost(index: PrefixIndex) -> None:
    """A host copy here, and one elsewhere that its owner announces through the same stream."""
    index.apply(0, replace(stored(0, 2), medium="CPU"))
    index.apply(0, replace(stored(3, 5), medium="CPU", locality="REMOTE"))
    index.apply(0, BlockRemoved((2,), medium="CPU", locality="REMOTE"))

    keys = block_keys(TOKENS, block_tokens=2, parent=namespace_seed("", ""))
    assert index.loadable_tokens(keys, prompt_tokens=13) == {0: 6}


def test_clearing_one_rank_leaves_the_others(index: PrefixIndex) -> None:
    """A reset is one rank's matter."""
    for slot in (0, 1):
        index.apply(slot, stored(0, 5))
    index.apply(0, AllBlocksCleared())

    assert reusable(index) == {1: 12}
    assert (index.blocks(0), index.blocks(1), len(index)) == (0, 6, 6)


def test_what_a_cleared_rank_stores_below_counts_again(index: PrefixIndex) -> None:
    """Names it used before are known, their places are not: a rank that starts with what its disk has kept."""
    keys = block_keys(TOKENS, block_tokens=2, parent=namespace_seed("", ""))
    for _ in range(2):
        index.apply(0, replace(stored(0, 2), medium="STORAGE"))
        assert index.loadable_tokens(keys, prompt_tokens=13) == {0: 6}
        index.apply(0, AllBlocksCleared())


def test_the_index_never_outgrows_its_bound() -> None:
    """The longest known tails go first: what remains of each chain is a prefix, and new blocks find room."""
    index = PrefixIndex(block_tokens=2, max_blocks=6)
    index.add_rank(0, domain="engine")
    index.apply(0, stored(0, 5))
    other = (7, 7, 8, 8)
    index.apply(0, BlockStored((50, 51), None, other, 2))

    assert (len(index), index.blocks(0), index.evicted_blocks) == (6, 6, 2)
    assert reusable(index) == {0: 8}
    assert reusable(index, (*other, 1)) == {0: 4}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=40), st.integers(4, 20))
def test_eviction_never_leaves_a_block_without_those_before_it(steps: list[tuple[int, int]], max_blocks: int) -> None:
    """Random chains on two ranks under a small bound: every block left has its parent, and the bound holds."""
    index = PrefixIndex(block_tokens=1, max_blocks=max_blocks)
    for slot in (0, 1):
        index.add_rank(slot, domain="engine")
    parents: dict[int, int | None] = {}
    for number, (chain, length) in enumerate(steps):
        tokens = [chain] * min(length, 3) + [chain + 10] * max(0, length - 3)
        keys = block_keys(tokens, block_tokens=1, parent=namespace_seed("", ""))
        parents.update(zip(keys, (None, *keys), strict=False))
        index.apply(number % 2, BlockStored(tuple(keys), None, tokens, 1))
        held = {slot: index.residency(slot)[-1] for slot in (0, 1)}
        assert len(index) <= max(max_blocks, length)
        for slot, own in held.items():
            assert index.blocks(slot) == len(own)
            assert all(parents[key] is None or parents[key] in own for key in own)


def test_a_request_in_flight_is_found_at_once_and_forgotten_after(index: PrefixIndex) -> None:
    """Provisional blocks count on their rank from dispatch until dropped; each request's own entry."""
    keys = block_keys(TOKENS, block_tokens=2, parent=namespace_seed("", ""))
    first = index.promise(1, keys, prompt_tokens=13)
    second = index.promise(1, keys, prompt_tokens=13)
    assert reusable(index) == {1: 12}

    index.provisional.drop(first)
    assert reusable(index) == {1: 12}
    index.provisional.drop(second)
    assert reusable(index) == {}


def test_a_provisional_window_counts_at_the_prompts_end_only(index: PrefixIndex) -> None:
    """A prompt in flight leaves its window at its end: a fork from its middle finds none."""
    index.apply(0, BlockStored((90,), None, (7, 7), 2, group=0, kind="sliding_window", window_tokens=5))
    keys = block_keys(TOKENS, block_tokens=2, parent=namespace_seed("", ""))
    index.promise(0, keys, prompt_tokens=13)

    assert reusable(index) == {0: 12}
    assert reusable(index, (*TOKENS[:6], 1, 1)) == {}


def test_a_late_block_that_another_rank_has_named_is_dropped_where_it_goes(index: PrefixIndex) -> None:
    """Its name is known by then, and still it only waits on the first rank: removed, it must not turn up later."""
    index.apply(0, stored(1, 1))
    index.apply(1, stored(0, 1))
    index.apply(0, BlockRemoved(hashes=(1,)))
    index.apply(0, stored(0, 0))

    assert reusable(index) == {0: 2, 1: 4}


def test_a_late_window_that_another_rank_has_named_is_dropped_where_it_goes(index: PrefixIndex) -> None:
    """The same for blocks of sparse groups."""
    window = BlockStored((0,), None, TOKENS[:2], 2, group=0, kind="sliding_window", window_tokens=3)
    dense = BlockStored((0,), None, TOKENS[:2], 2, group=1, kind="full_attention")
    index.apply(0, window)
    for event in (window, dense):
        index.apply(1, event)
    index.apply(0, BlockRemoved(hashes=(0,), group=0))
    index.apply(0, dense)

    assert reusable(index) == {1: 2}


def test_blocks_that_are_told_of_again_are_no_second_copies(index: PrefixIndex) -> None:
    """``kv_cache_report_mode: full``: what a prompt found is named once more; two blocks of the last event are new."""
    told = replace(stored(0, 3), kind="full_attention")
    index.apply(0, told)
    index.apply(0, told)
    index.apply(0, replace(stored(0, 5), kind="full_attention"))
    assert reusable(index) == {0: 12}

    index.apply(0, BlockRemoved(hashes=(5, 4, 3, 2, 1, 0)))
    assert reusable(index) == {}
    assert index.blocks(0) == 0


def test_a_window_that_tells_of_all_blocks_tells_what_was_found(index: PrefixIndex) -> None:
    """It keeps one block before a prompt's end; a report names them all, those it has long let go of too."""
    window = replace(stored(0, 5), kind="sliding_window", window_tokens=3, group=1)
    dense = replace(stored(0, 5), kind="full_attention")
    for event in (replace(window, hashes=()), dense, replace(window, hashes=(5,))):
        index.apply(0, event)
    for event in (window, dense):
        index.apply(0, event)
    assert reusable(index) == {0: 12}
    assert index.residency(0)[1] == {block_keys(TOKENS, block_tokens=2, parent=namespace_seed("", ""))[-1]}

    index.apply(0, BlockRemoved(hashes=(5,)))
    assert reusable(index) == {}


def test_an_event_without_blocks_says_nothing(index: PrefixIndex) -> None:
    """Behind a block that others stand behind, too."""
    index.apply(0, stored(0, 5))
    index.apply(0, BlockStored(hashes=(), parent=2, token_ids=(), block_tokens=2))
    assert reusable(index) == {0: 12}


def test_a_copy_that_leaves_one_tier_stays_in_the_other(index: PrefixIndex) -> None:
    """On disk there are six blocks; host memory, whose copies nobody has heard of, gives two of them up."""
    index.apply(0, stored(0, 5))
    index.apply(0, replace(stored(0, 5), medium="DISK"))
    index.apply(0, BlockRemoved(hashes=(5, 4), medium="CPU"))
    index.apply(0, AllBlocksCleared())
    assert loadable(index) == {}

    index.apply(0, replace(stored(0, 5), medium="DISK"))
    index.apply(0, BlockRemoved(hashes=(5, 4), medium="CPU"))
    assert loadable(index) == {0: 12}


def test_host_memory_is_one_tier_pinned_or_not(index: PrefixIndex) -> None:
    """SGLang stores into pinned memory, and removes from the CPU's."""
    index.apply(0, replace(stored(0, 5), medium="CPU_PINNED"))
    assert loadable(index) == {0: 12}
    index.apply(0, BlockRemoved(hashes=(5, 4), medium="CPU"))
    assert loadable(index) == {0: 8}


def test_a_lower_tier_that_is_heard_of_first_tells_the_size_of_blocks() -> None:
    """Blocks of four tokens in units of two; the device's own may be of another size."""
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine")
    index.apply(0, BlockStored((1, 2, 3), None, TOKENS, 4, medium="CPU"))
    assert loadable(index) == {0: 12}

    index.apply(0, stored(0, 2))
    assert loadable(index) == reusable(index) == {0: 6}
    assert len(index) == 3


def test_a_removal_of_a_group_that_nobody_has_met_takes_nothing(index: PrefixIndex) -> None:
    """Engines' groups name equal blocks equally: a window's block that goes is none of full attention."""
    index.apply(0, stored(0, 5))
    index.apply(0, BlockRemoved(hashes=(2,), group=1))

    assert reusable(index) == {0: 12}


def test_what_lies_on_another_machine_is_not_on_the_device(index: PrefixIndex) -> None:
    """Whatever medium it lies in there."""
    event = stored(0, 5)
    index.apply(0, BlockStored(event.hashes, None, event.token_ids, 2, locality="REMOTE"))

    assert reusable(index) == {}


def test_nothing_that_waits_grows_without_bound(index: PrefixIndex) -> None:
    """One parent, or one name, that never comes."""
    for number in range(3 * MAX_ALIKE):
        index.apply(0, BlockStored((10**6 + number,), 10**7, (1, number), 2))
        index.apply(0, BlockStored((5,), None, (1, 2), 2, group=7, kind="mamba"))

    assert index.orphans(0) == MAX_ALIKE
    assert len(index._ranks[0].unnamed[5]) == MAX_ALIKE


def test_lower_tiers_and_long_events_keep_the_bound() -> None:
    """What does not fit whole does not come in."""
    index = PrefixIndex(block_tokens=2, max_blocks=4)
    index.add_rank(0, domain="engine")
    index.apply(0, stored(0, 5))
    assert len(index) == 0

    for first in range(10):
        tokens = (first, first, first, first)
        index.apply(0, BlockStored((10 * first, 10 * first + 1), None, tokens, 2, medium="CPU"))
    assert len(index) == 4


def test_blocks_go_in_any_order_and_one_copy_each(index: PrefixIndex) -> None:
    """Six blocks, the first three stored twice: all are removed head first, then the copies that are left, shuffled."""
    index.apply(0, stored(0, 5))
    index.apply(0, stored(0, 2))
    index.apply(1, stored(0, 5))
    index.apply(0, BlockRemoved((0, 1, 2, 3, 4, 5)))
    assert reusable(index) == {0: 6, 1: 12}
    assert index.blocks(0) == 3

    index.apply(0, BlockRemoved((1, 0, 2)))
    index.apply(1, BlockRemoved((3, 5, 4, 5)))
    assert reusable(index) == {1: 6}
    assert index.blocks(0) == 0
    assert len(index) == 3
