"""What waits is bounded and ends: names of sparse blocks, promised chains, names of blocks in lower tiers."""

from __future__ import annotations

from router.core.adoption import Expected
from router.core.index import PrefixIndex
from router.core.provisional import DENSE, Provisional
from router.core.rank_state import MAX_UNNAMED
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored

WINDOW, FULL = 0, 1


def keys_of(*tokens: int) -> list[int]:
    return block_keys(tokens, block_tokens=1, parent=namespace_seed("", ""))


def index_of() -> PrefixIndex:
    """A rank that has told of both its groups, which hold block 1."""
    index = PrefixIndex(block_tokens=1)
    index.add_rank(0, domain="engine")
    store(index, WINDOW, (1,))
    store(index, FULL, (1,))
    return index


def store(
    index: PrefixIndex, group: int, names: tuple[int, ...], *, behind: int | None = None, medium: str = "GPU"
) -> None:
    """Block n is of token n and named n."""
    window = {"kind": "sliding_window", "window_tokens": 2} if group == WINDOW else {"kind": "full_attention"}
    index.apply(0, BlockStored(names, behind, names, 1, group=group, medium=medium, **window))  # type: ignore[arg-type]


def reusable(index: PrefixIndex, *tokens: int) -> int:
    return index.reusable_tokens(keys_of(*tokens), prompt_tokens=len(tokens) + 1).get(0, 0)


def test_names_of_sparse_blocks_wait_up_to_a_bound() -> None:
    """Those that came last: the first of a few too many is found by the dense group alone when that stores it."""
    index = index_of()
    first, last = 1000, 1000 + MAX_UNNAMED + 10
    for name in range(first, last):
        store(index, WINDOW, (name,), behind=1)
    store(index, FULL, (first,), behind=1)
    store(index, FULL, (last - 1,), behind=1)
    assert (reusable(index, 1, first), reusable(index, 1, last - 1)) == (1, 2)


def test_a_promise_that_was_dropped_is_expected_no_more() -> None:
    """Nor is one of a rank that has gone; whichever of them ends first."""
    provisional = Provisional()
    chain = Expected((1, 2))
    first, second = (provisional.add(0, {DENSE: (1, 2)}, expected=chain) for _ in range(2))
    other = provisional.add(1, {DENSE: (1,)}, expected=chain)
    provisional.drop(first)
    assert len([*provisional.expected(0)]) == 1
    provisional.forget(1)
    assert [*provisional.expected(1)] == []
    provisional.drop(other)
    provisional.drop(second)
    assert [*provisional.expected(0)] == []
    assert (provisional.dense, len(provisional)) == ({}, 0)


def test_an_answers_blocks_end_no_prompt() -> None:
    """A chain from where its tokens are generated is no prompt's; a prompt's partial block does not count."""
    provisional = Provisional()
    provisional.add(0, {DENSE: ()}, expected=Expected((1, 2, 3, 4), start=2))
    assert not provisional.ends_prompt(0, 4, stride=1)
    provisional.add(0, {DENSE: ()}, expected=Expected((5, 6, 7), tail=3))
    assert [provisional.ends_prompt(0, key, stride=2) for key in (5, 6, 7)] == [False, True, False]


def test_a_windows_blocks_in_lower_tiers_are_passed_over() -> None:
    """Stored there they make nothing loadable, and what leaves there is not lost on the device."""
    index = index_of()
    store(index, WINDOW, (2,), behind=1)
    store(index, FULL, (2,), behind=1)
    assert reusable(index, 1, 2) == 2
    store(index, WINDOW, (1, 2), medium="CPU")
    assert index.loadable_tokens(keys_of(1, 2), prompt_tokens=3) == {}
    index.apply(0, BlockRemoved((1, 2), medium="CPU", group=WINDOW))
    assert reusable(index, 1, 2) == 2


def test_a_name_ends_with_the_last_group_or_tier_that_has_its_block() -> None:
    """In whichever order they give it up: what is stored behind it then waits for it."""
    for last in ("window", "full", "CPU"):
        index = index_of()
        store(index, WINDOW, (2,), behind=1)
        store(index, FULL, (2,), behind=1)
        store(index, FULL, (2,), behind=1, medium="CPU")
        removals = {
            "window": BlockRemoved((2,), group=WINDOW),
            "full": BlockRemoved((2,), group=FULL),
            "CPU": BlockRemoved((2,), group=FULL, medium="CPU"),
        }
        for which in sorted(removals, key=lambda which, last=last: which == last):  # type: ignore[misc]
            index.apply(0, removals[which])
        assert len(index._ranks[0].names.common) == 1, last
        store(index, FULL, (3,), behind=2)
        assert index.orphans(0) == 1
