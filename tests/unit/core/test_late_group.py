"""A group of layers that is first heard of while requests run, and a pool that is made anew by a clear."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from router.core.forecast import Pool
from router.core.index import PrefixIndex
from router.core.shared_pool import SharedPool
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockStored

UNIT = 16
FULL = 3
#: Tokens of a window of two blocks.
WINDOW_TOKENS = 2 * UNIT + 1


def tokens(first: int, blocks: int) -> array[int]:
    return array("I", [first] * (UNIT * blocks))


def keys(prompt: Sequence[int]) -> Sequence[int]:
    return block_keys(prompt, block_tokens=UNIT, parent=namespace_seed("", ""))


def stored(prompt: array[int], *groups: int) -> list[BlockStored]:
    """Full attention stores a prompt's blocks, a window its last two."""
    names = tuple(hash((prompt[0], end)) for end in range(len(prompt) // UNIT))
    return [
        BlockStored(names, None, prompt, UNIT, group=group, kind="full_attention")
        if group == FULL
        else BlockStored(
            names[-2:], None, prompt, UNIT, group=group, kind="sliding_window", window_tokens=WINDOW_TOKENS
        )
        for group in groups
    ]


class Rank:
    """One vLLM of 40 blocks; its first events have told of the groups 0 and 3."""

    def __init__(self) -> None:
        self.index = PrefixIndex(block_tokens=UNIT)
        self.index.add_rank(0, domain="engine", pool=Pool(None, all_blocks=40))
        self.hear(tokens(1, 4), 0, FULL)
        pool = self.index.pool(0)
        assert isinstance(pool, SharedPool)
        self.pool = pool

    def hear(self, prompt: array[int], *groups: int) -> None:
        for event in stored(prompt, *groups):
            self.index.apply(0, event)
        self.index.end_batch(0)

    def found(self, prompt: array[int]) -> int:
        return self.index.reusable_tokens(keys(prompt), prompt_tokens=len(prompt) + 1).get(0, 0)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_what_runs_holds_blocks_of_a_group_that_is_heard_of_later(rank: Rank) -> None:
    """Its window of two blocks lies at the prompt's end; as no event tells their names, they are held without."""
    running = tokens(2, 5)
    allocation = rank.pool.sent(keys(running), blocks=6)
    allocation.begun()
    rank.hear(running, 0, FULL)
    rank.hear(tokens(7, 3), 1)
    rank.pool.sent(keys(tokens(5, 20)), blocks=21)
    assert rank.found(tokens(1, 4)) == 0
    assert rank.pool.groups == [0, 1, FULL]
    assert allocation.first[1] == 3
    assert rank.pool.queue.nameless == 2

    allocation.ended(keys(running))
    rank.hear(tokens(8, 3), 0, 1, FULL)
    assert rank.pool.queue.nameless == 0


def test_names_of_the_late_group_may_be_those_of_what_runs(rank: Rank) -> None:
    """Its first event names the window of the request that was heard of last: that is held, with a name."""
    running = tokens(2, 5)
    allocation = rank.pool.sent(keys(running), blocks=6)
    rank.hear(running, 0, FULL, 1)
    assert rank.pool.queue.nameless == 0
    assert allocation.tables[1] == [rank.pool.block(1, key) for key in keys(running)[3:]]


def test_an_end_that_was_heard_of_early_is_done_once(rank: Rank) -> None:
    """The answer was over before its events came, and then another group turns up: later events are applied."""
    prompt = tokens(3, 5)
    allocation = rank.pool.sent(keys(prompt), blocks=6)
    allocation.begun()
    allocation.ended(keys(prompt))
    rank.hear(prompt, 0, FULL)
    rank.hear(tokens(8, 3), 2)
    rank.hear(tokens(9, 2), 0, 2, FULL)
    assert not rank.pool.running
    assert rank.found(tokens(9, 2)) == 2 * UNIT


def test_a_clear_leaves_what_requests_hold_and_mends_the_rest(rank: Rank) -> None:
    """A structure that was damaged does not outlive a clear, which raises nothing, however often it comes."""
    prompt = tokens(2, 5)
    allocation = rank.pool.sent(keys(prompt), blocks=6)
    waiting = rank.pool.sent(keys(tokens(4, 3)), blocks=4)
    rank.hear(prompt, 0, FULL)
    allocation.tables.clear()
    rank.pool.queue.pins.clear()
    for _ in range(2):
        rank.index.apply(0, AllBlocksCleared())

    assert rank.pool.queue.nameless == 5 + 2  # the prompt's whole blocks, and the window's
    assert rank.pool.is_moving
    assert list(rank.pool.pending) == [waiting]
    allocation.ended(keys(prompt))
    waiting.forget()
    assert rank.pool.queue.nameless == 0
    assert not rank.pool.is_moving
