"""A prompt told from its start once more: found (vLLM's ``kv_cache_report_mode: full``), or stored once more.

Blocks of one token, named by it. The window needs two blocks, and keeps those before two places of a prompt at most.
"""

from __future__ import annotations

import pytest

from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored

WINDOW, FULL = 0, 1
PROMPT = (1, 2, 3, 4, 5, 6)


def tell(index: PrefixIndex, group: int, names: tuple[int, ...], tokens: tuple[int, ...] = PROMPT) -> None:
    window_tokens = 3 if group == WINDOW else None
    kind = "sliding_window" if group == WINDOW else "full_attention"
    index.apply(0, BlockStored(names, None, tokens, 1, group=group, kind=kind, window_tokens=window_tokens))


def index_of() -> PrefixIndex:
    """The prompt is stored, and of the window the two blocks before its end."""
    index = PrefixIndex(block_tokens=1)
    index.add_rank(0, domain="engine")
    tell(index, WINDOW, ())
    tell(index, FULL, PROMPT)
    tell(index, WINDOW, PROMPT[-2:])
    return index


def reusable(index: PrefixIndex) -> int:
    keys = block_keys(PROMPT, block_tokens=1, parent=namespace_seed("", ""))
    return index.reusable_tokens(keys, prompt_tokens=len(PROMPT) + 1).get(0, 0)


@pytest.mark.parametrize(("told", "kept"), [(3, 5), (4, 6), (5, 2), (6, 2)])
def test_more_than_a_window_keeps_was_found(told: int, kept: int) -> None:
    """Up to twice two blocks from the start may have been stored; more than that is a report."""
    index = index_of()
    tell(index, WINDOW, PROMPT[:told], PROMPT[:told])
    assert len(index.residency(0)[WINDOW]) == kept


@pytest.mark.parametrize("is_report", [True, False])
def test_what_the_window_did_not_report_was_stored_once_more(is_report: bool) -> None:
    """Then there are two copies of each block, and one outlives a removal."""
    index = index_of()
    if is_report:
        tell(index, WINDOW, PROMPT)
    tell(index, FULL, PROMPT)
    assert index.blocks(0) == len(PROMPT)
    index.apply(0, BlockRemoved(PROMPT, group=FULL))
    assert reusable(index) == (0 if is_report else len(PROMPT))


def test_a_report_of_another_prompt_says_nothing_of_this_one() -> None:
    """It names other blocks."""
    index = index_of()
    tell(index, WINDOW, (11, 12, 13, 14, 15, 16), (11, 12, 13, 14, 15, 16))
    tell(index, FULL, PROMPT)
    index.apply(0, BlockRemoved(PROMPT, group=FULL))
    assert reusable(index) == len(PROMPT)
