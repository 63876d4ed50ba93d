"""What is known of requests in a pool that groups share: when they are heard of, what they hold, what they will take.

By vLLM's scheduler: a prompt is stored step by step, blocks of it that were found are not stored, and where it ends
with a block that block is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.core.shared_allocation import SharedAllocation
from router.core.shared_pool import SharedPool
from router.core.usable import Kind, Rule

BLOCK = 16
WINDOW, FULL = 0, 1
BLOCKS = 20


def a_pool(rule: Rule) -> SharedPool:
    return SharedPool({WINDOW: rule}, {}, dense_group=FULL, block_tokens=BLOCK, blocks=BLOCKS)


@pytest.fixture
def pool() -> SharedPool:
    """A window of two blocks beside full attention."""
    return a_pool(Rule(Kind.WINDOW, needed=2, window_tokens=2 * BLOCK + 1))


def sent(pool: SharedPool, keys: Sequence[int], *, begun_tokens: int = 1) -> SharedAllocation:
    return pool.sent(keys, blocks=len(keys) + 1, begun_tokens=begun_tokens)


def stored(pool: SharedPool, keys: Sequence[int], start: int, *, window: Sequence[int] = ()) -> None:
    """Full attention stores a chain from block ``start`` on, the window some of it; its events come first."""
    for key in window:
        pool.gained(WINDOW, key)
    pool.stored(keys[start - 1] if start else None, keys[start:])


def depth(pool: SharedPool, keys: Sequence[int]) -> int:
    """How much of a chain will be there in full attention, all of which is there now."""
    foretold = pool.forecast(copies=sum(key < 1000 for key in pool.queue.order))
    return len(keys) if foretold is None else foretold.depth(keys, len(keys))


def test_a_prompt_that_is_stored_in_pieces_holds_the_first_of_them(pool: SharedPool) -> None:
    """What is computed of it is no more given up than due: it runs from its first piece on."""
    keys = [1, 2, 3, 4, 5, 6]
    asked = sent(pool, keys)
    stored(pool, keys[:3], 0)
    assert (asked in pool.running, asked in pool.pending, asked.heard) == (True, True, 3)
    assert [key for key in keys if key in pool.queue.pins] == [1, 2, 3]
    stored(pool, keys, 3, window=(5, 6))
    assert (asked in pool.pending, asked.heard) == (False, 6)
    assert [key for key in keys if key in pool.queue.pins] == keys


def test_blocks_that_are_another_prompts_are_no_piece_of_it(pool: SharedPool) -> None:
    """A piece is told by its keys, each of which stands for all before it."""
    asked = sent(pool, [1, 2, 3, 4])
    stored(pool, [1, 12, 13], 0)
    assert asked not in pool.running


def test_those_that_find_all_of_a_prompt_are_heard_of_with_the_one_that_stores_it(pool: SharedPool) -> None:
    """Of identical prompts sent at once the first stores, the others have nothing to tell."""
    keys = [1, 2, 3]
    twins = [sent(pool, keys) for _ in range(3)]
    for twin in twins:
        twin.begun()
    stored(pool, keys, 0, window=(2, 3))
    assert [twin in pool.pending for twin in twins] == [False] * 3
    assert pool.queue.pins[3] == 3


def test_a_first_token_does_not_mean_that_all_was_found_where_a_window_lacks_blocks(pool: SharedPool) -> None:
    """Full attention has the prompt, but it is computed again from where the window had been resumed: its events, late,
    are due still.
    """
    keys = [1, 2, 3, 4]
    stored(pool, keys, 0, window=(3, 4))
    pool.lost(WINDOW, 4)
    asked = sent(pool, keys)
    asked.begun()
    assert asked in pool.pending
    stored(pool, keys, 0, window=(3, 4))
    assert asked not in pool.pending


def test_a_first_token_does_not_mean_that_what_was_there_was_found(pool: SharedPool) -> None:
    """It comes before the events of the step: by them a prompt before this one took two of its blocks."""
    keys = [1, 2, 3, 4]
    stored(pool, keys, 0, window=(1, 2, 3, 4))
    asked = sent(pool, keys)
    asked.begun()
    assert not pool.queue.pins
    pool.removed([4], copies=4)
    pool.removed([3], copies=3)
    stored(pool, keys, 2, window=(3, 4))
    assert (asked.heard, pool.queue.nameless) == (4, 0)


def test_of_who_found_all_the_answers_first_block_tells(pool: SharedPool) -> None:
    """No event of its prompt ever comes: with the first of its answer it holds what it had found."""
    keys = [1, 2, 3]
    stored(pool, keys, 0, window=(2, 3))
    asked = sent(pool, keys)
    asked.begun()
    stored(pool, [*keys, 9], 3, window=(9,))
    assert (asked in pool.pending, asked.heard) == (False, 4)
    assert 1 in pool.queue.pins


def test_a_prompt_that_ends_with_a_block_begins_none(pool: SharedPool) -> None:
    """Nine blocks in each group leave two of twenty, and with a tenth in each none: the third prompt's are given up."""
    kept = [101]
    stored(pool, kept, 0, window=(101,))
    sent(pool, list(range(1, 10)), begun_tokens=0)
    assert depth(pool, kept) == 1
    pool.forget(next(iter(pool.pending)))
    sent(pool, list(range(1, 10)), begun_tokens=1)
    assert depth(pool, kept) == 0


def test_of_a_prompt_beside_recurrent_state_one_step_is_taken_at_a_time() -> None:
    """Twelve of 20 blocks are cached. A prompt of eight blocks takes eight and a state, so that one goes; the last step
    of it takes a block more of each group, but only once it has begun.
    """
    pool = a_pool(Rule(Kind.WINDOW, needed=1))
    kept = list(range(101, 113))
    stored(pool, kept, 0)
    asked = sent(pool, list(range(1, 9)))
    assert depth(pool, kept) == len(kept) - 1
    asked.begun()
    assert depth(pool, kept) == len(kept) - 3


def test_with_eagle_the_last_block_that_is_found_is_computed_again() -> None:
    """17 of 20 blocks are cached, two of them of the window. Who finds a prompt's four blocks takes one of them anew in
    each group beside what is begun, so that one goes of those that nobody uses.
    """
    rules = [Rule(Kind.WINDOW, needed=2, window_tokens=BLOCK + 1, behind=behind) for behind in (0, 1)]
    pools = [
        SharedPool(
            {WINDOW: rule}, {}, dense_group=FULL, block_tokens=BLOCK, blocks=BLOCKS, recomputed_blocks=rule.behind
        )
        for rule in rules
    ]
    others, keys = list(range(101, 112)), [1, 2, 3, 4]
    for pool in pools:
        stored(pool, others, 0)
        stored(pool, keys, 0, window=(3, 4))
        sent(pool, keys)
    assert [depth(pool, others) for pool in pools] == [11, 10]


def test_what_was_given_up_before_its_prompt_is_stored_is_not_held(pool: SharedPool) -> None:
    """A window's block that was told of and removed is none of those that a request has, or lets go of."""
    keys = [1, 2]
    asked = sent(pool, keys)
    pool.gained(WINDOW, 2)
    pool.lost(WINDOW, 2)
    stored(pool, keys, 0)
    assert pool.queue.nameless == 2  # of the window, as no event of this prompt names them
    assert sorted(pool.queue.pins) == keys
    asked.ended(keys)
    pool.batch_ended()
    assert (pool.queue.nameless, pool.queue.pins) == (0, {})
