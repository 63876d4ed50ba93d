"""What a full pool will have given up: the cases that differ between engines, and those where nothing is foretold.

Blocks are single letters; a chain is a word, and a block's key stands for the word up to it.
"""

from __future__ import annotations

from router.core.forecast import MAX_PENDING, Pool


def keys(word: str) -> list[int]:
    return [int.from_bytes(word[: end + 1].encode(), "big") for end in range(len(word))]


def serve(pool: Pool, word: str, *, start: int = 0) -> None:
    """A request for ``word`` comes, stores its blocks from ``start`` on, and ends."""
    allocation = pool.sent(keys(word), blocks=len(word) + 1)
    pool.stored(keys(word)[start - 1] if start else None, keys(word)[start:])
    pool.ended(allocation, keys(word))


def kept(pool: Pool, word: str, *, copies: int) -> int:
    return pool.kept(keys(word), len(word), copies=copies)


def test_vllm_gives_up_block_by_block_what_was_used_longest_ago_tails_first() -> None:
    """Of eight blocks six are cached and two free; a prompt of three and the block it begins need two more."""
    pool = Pool(8)
    serve(pool, "abc")
    serve(pool, "xyz")
    assert kept(pool, "abc", copies=6) == 3

    pool.sent(keys("uvw"), blocks=4)
    assert kept(pool, "abc", copies=6) == 1
    assert kept(pool, "xyz", copies=6) == 3


def test_what_a_waiting_request_will_find_is_kept_for_it() -> None:
    """The oldest chain is its own: the next oldest goes instead."""
    pool = Pool(8)
    serve(pool, "abc")
    serve(pool, "xyz")
    pool.sent(keys("abcuvw"), blocks=7)

    assert kept(pool, "abc", copies=6) == 3
    assert kept(pool, "xyz", copies=6) == 1


def test_an_answer_whose_events_are_due_has_taken_its_blocks() -> None:
    """Three blocks of prompt and two of answer, of which no event has come: they are where the oldest was."""
    pool = Pool(8)
    serve(pool, "abc")
    serve(pool, "xyz")
    pool.ended(pool.sent(keys("uvw"), blocks=4), keys("uvwrs"))

    assert kept(pool, "abc", copies=6) == 0
    assert kept(pool, "uvwrs", copies=6) == 5


def test_the_first_token_of_a_request_whose_event_is_due_takes_no_other_block() -> None:
    """The four blocks that it was sent for are those that it has."""
    pool = Pool(8)
    serve(pool, "abc")
    serve(pool, "xyz")
    pool.begun(pool.sent(keys("uvw"), blocks=4))

    assert kept(pool, "abc", copies=6) == 1


def test_a_failed_request_takes_nothing() -> None:
    """As long as it was under way it did."""
    pool = Pool(8)
    serve(pool, "abc")
    serve(pool, "xyz")
    allocation = pool.sent(keys("uvw"), blocks=4)
    assert kept(pool, "abc", copies=6) == 1

    pool.forget(allocation)
    assert kept(pool, "abc", copies=6) == 3


def test_an_answer_cut_off_is_heard_of_with_more_than_came_of_it() -> None:
    """The engine had gone on for two blocks: what the request was to store stands inside what was stored."""
    pool = Pool(8)
    pool.ended(pool.sent(keys("uvw"), blocks=4), keys("uvwr"))
    pool.stored(None, keys("uvwrst"))

    assert not pool.pending


def test_a_pool_of_unknown_size_is_known_by_what_it_held_when_it_gave_up_a_block() -> None:
    """Before that nothing is foretold."""
    pool = Pool(None)
    serve(pool, "abc")
    serve(pool, "xyz")
    pool.sent(keys("uv"), blocks=3)
    assert kept(pool, "abc", copies=6) == 3

    pool.removed(keys("abc")[2:], copies=6)
    assert pool.kept(keys("abc"), 2, copies=5) == 0


def test_nothing_is_foretold_of_counts_that_cannot_be() -> None:
    """More copies than blocks: reports of blocks found, say, which some clients ask vLLM for, were taken for stores."""
    pool = Pool(8)
    serve(pool, "abc")
    pool.sent(keys("uvwxyz"), blocks=7)

    assert kept(pool, "abc", copies=8) == 0
    assert kept(pool, "abc", copies=9) == 3


def test_nothing_is_foretold_of_a_long_queue() -> None:
    """One more than is gone through, and the pool is left as it is."""
    pool = Pool(8)
    serve(pool, "abc")
    for number in range(MAX_PENDING):
        pool.sent(keys(chr(0x100 + number)), blocks=2)
    assert kept(pool, "abc", copies=3) == 0

    pool.sent(keys("z"), blocks=2)
    assert kept(pool, "abc", copies=3) == 3
