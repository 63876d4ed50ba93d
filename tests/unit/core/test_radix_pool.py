"""What a full radix cache will have given up, case by case, by the rules of SGLang 0.5.23.

Pages are single letters; a chain is a word, and a page's key stands for the word up to it.
"""

from __future__ import annotations

from router.core.forecast import Allocation
from router.core.radix_pool import RadixPool
from router.core.radix_requests import Want


def keys(word: str) -> list[int]:
    return [int.from_bytes(word[: end + 1].encode(), "big") for end in range(len(word))]


def serve(pool: RadixPool, word: str, *, start: int = 0) -> None:
    """A request for ``word`` comes, stores its pages from ``start`` on, and ends; all of it is heard."""
    allocation = pool.sent(keys(word), blocks=len(word) + 1)
    pool.begun(allocation)
    pool.stored(keys(word)[start - 1] if start else None, keys(word)[start:])
    pool.ended(allocation, keys(word))


def running(pool: RadixPool, word: str, *, start: int = 0, want: Want | None = None) -> Allocation:
    """A request that generates, whose prompt has been heard of."""
    allocation = pool.sent(keys(word), blocks=len(word) + 1, want=want)
    pool.begun(allocation)
    pool.stored(keys(word)[start - 1] if start else None, keys(word)[start:])
    return allocation


def pool_of(blocks: int, *words: str, page_tokens: int = 16) -> RadixPool:
    pool = RadixPool(blocks, page_tokens=page_tokens)
    for word in words:
        serve(pool, word)
    return pool


def kept(pool: RadixPool, word: str, *, copies: int) -> int:
    return pool.kept(keys(word), len(word), copies=copies)


def test_whole_nodes_are_given_up() -> None:
    """Of nine pages six are cached and three free. A prompt of two takes three, with the page that it begins; but room
    is made for a fourth, and what was stored together goes together.
    """
    pool = pool_of(9, "abc", "xyz")
    pool.sent(keys("uv"), blocks=3)

    assert kept(pool, "abc", copies=6) == 0
    assert kept(pool, "xyz", copies=6) == 3


def test_with_pages_of_one_token_room_is_made_exactly() -> None:
    """The same prompt takes just what is free."""
    pool = pool_of(9, "abc", "xyz", page_tokens=1)
    pool.sent(keys("uv"), blocks=3)

    assert kept(pool, "abc", copies=6) == 3


def test_answers_push_out_what_they_need_before_the_next_prompt_is_looked_up() -> None:
    """Six of twelve pages are cached beside a prompt's two. An answer of two tokens has four, with one that is being
    computed and the next: all there is. With three one too many, so that the leaf used longest ago goes; with its bound
    of four tokens it takes three pages, since nothing follows its last one.
    """
    for tokens, most_tokens, left in ((2, 0, 3), (3, 0, 0), (3, 4, 3)):
        pool = pool_of(12, "abc", "xyz", page_tokens=1)
        want = Want(2, most_tokens=most_tokens, is_whole=True)
        pool.grows(running(pool, "uv", want=want), lambda tokens=tokens: tokens)  # type: ignore[misc]
        assert kept(pool, "abc", copies=8) == left


def test_a_node_that_is_cut_counts_as_used_in_both_its_parts() -> None:
    """A prompt that found its first page alone makes the node that it cut newer than another one."""
    pool = pool_of(8, "abc", "xyz")
    allocation = pool.sent(keys("a"), blocks=2)
    pool.begun(allocation)
    pool.ended(allocation, keys("a"))
    pool.sent(keys("uv"), blocks=3)

    assert kept(pool, "abc", copies=6) == 3
    assert kept(pool, "xyz", copies=6) == 0


def test_prompts_that_are_scheduled_together_take_nothing_from_one_another() -> None:
    """While an answer is generated two prompts come at once: the second still finds what the first would push out."""
    pool = pool_of(12, "abc", "xyz")
    running(pool, "r")
    pool.sent(keys("uvw"), blocks=4)
    assert kept(pool, "abc", copies=7) == 3

    pool.begun(pool.sent(keys("q"), blocks=2))  # something is heard, so time has passed
    assert kept(pool, "abc", copies=7) == 0


def test_a_batch_before_the_next_takes_what_all_its_prompts_need() -> None:
    """Of fourteen pages five are free: either of two prompts would fit, both do not."""
    pool = pool_of(14, "abc", "xyz")
    running(pool, "r")
    pool.sent(keys("uv"), blocks=3)
    pool.begun(pool.sent(keys("r"), blocks=2))
    assert kept(pool, "abc", copies=7) == 3

    pool = pool_of(14, "abc", "xyz")
    running(pool, "r")
    pool.sent(keys("uv"), blocks=3)
    pool.sent(keys("st"), blocks=3)
    pool.begun(pool.sent(keys("r"), blocks=2))
    assert kept(pool, "abc", copies=7) == 0


def test_the_first_prompt_on_an_idle_rank_is_a_batch_by_itself() -> None:
    """Those that come while it is computed wait for each other, not for nothing."""
    pool = pool_of(14, "abc", "xyz", "ghijk")
    pool.sent(keys("uv"), blocks=3)
    assert kept(pool, "abc", copies=11) == 0

    pool.sent(keys("mnop"), blocks=5)
    assert kept(pool, "xyz", copies=11) == 3


def test_an_answer_takes_pages_as_it_grows_and_for_each_token_a_page_is_kept_free() -> None:
    """Of twelve pages seven are cached. The answer that ended had three, and began one more; a prompt that comes then
    finds one node less.
    """
    pool = pool_of(12, "abc", "xyz")
    pool.ended(running(pool, "r"), keys("rstu"))

    assert kept(pool, "abc", copies=7) == 3
    assert pool.pending

    pool = pool_of(11, "abc", "xyz")
    pool.ended(running(pool, "r"), keys("rstu"))
    assert kept(pool, "abc", copies=7) == 0
    assert kept(pool, "xyz", copies=7) == 3
    assert kept(pool, "rstu", copies=7) == 4


def test_room_for_an_answer_is_made_before_it_takes_its_last_page() -> None:
    """Of ten pages seven are cached. Behind the 16 tokens of its prompt an answer has two pages until its 33rd token is
    computed on, and a page is free for that one; for the 34th none would be. The last token is computed on by nobody.
    """
    for tokens, left in ((33, 3), (34, 3), (35, 0)):
        pool = pool_of(10, "abc", "xyz")
        allocation = running(pool, "r", want=Want(16))
        pool.grows(allocation, lambda tokens=tokens: tokens)  # type: ignore[misc]
        pool.ended(allocation, keys("rst"))
        assert kept(pool, "abc", copies=7) == left


def test_of_pages_that_two_answers_have_in_common_one_is_kept() -> None:
    """Of fourteen pages four are cached. Two answers to one prompt end with three pages each, of which three are free
    again once both are in the tree: the next prompt takes five of seven. Had they nothing in common four would be free.
    """
    pool = pool_of(14, "abc")
    one, other = running(pool, "r"), pool.sent(keys("r"), blocks=2)
    pool.begun(other)
    pool.ended(one, keys("rstu"))
    pool.ended(other, keys("rstu"))
    pool.sent(keys("vwxy"), blocks=5)
    assert kept(pool, "abc", copies=4) == 3

    pool = pool_of(14, "abc")
    one, other = running(pool, "r"), pool.sent(keys("r"), blocks=2)
    pool.begun(other)
    pool.ended(one, keys("rstu"))
    pool.ended(other, keys("rxyz"))
    pool.sent(keys("vwxy"), blocks=5)
    assert kept(pool, "abc", copies=4) == 0


def test_of_answers_that_are_alike_one_event_tells() -> None:
    """The second has nothing new to store: after the event of the first nothing is due."""
    pool = pool_of(14, "abc")
    one, other = running(pool, "r"), pool.sent(keys("r"), blocks=2)
    pool.begun(other)
    pool.ended(one, keys("rst"))
    pool.ended(other, keys("rst"))
    assert len(pool.pending) == 2

    pool.stored(keys("r")[0], keys("rst")[1:])
    assert not pool.pending


def test_a_rank_that_does_not_say_how_many_pages_it_has_shows_it_as_it_gives_some_up() -> None:
    """Six pages were cached and two more in use, and of an answer of three tokens three: eleven, and it was full. Had
    there been others that nobody knows, they would have gone before.
    """
    pool = RadixPool(None, page_tokens=1)
    for word in ("abc", "xyz"):
        serve(pool, word)
    pool.grows(running(pool, "uv"), lambda: 3)
    pool.removed((), copies=8)
    assert pool.blocks is None

    pool.removed(keys("abc"), copies=8)
    pool.removed(keys("xyz")[2:], copies=5)
    assert pool.blocks == 11
    assert pool.anew().blocks is None


def test_a_prompt_that_waits_finds_what_those_before_it_have_computed() -> None:
    """Of twelve pages three are cached. A prompt of five pages and a half, and an answer of up to four more, leave
    no room for the next one until that answer ends: by then its pages are there.
    """
    pool = pool_of(12, "abc")
    pool.sent(keys("uvwxy"), blocks=6, want=Want(88, 64, 64))

    assert pool.may_bring(keys("u")[0])
    assert not pool.may_bring(keys("a")[0])
    assert pool.kept(keys("uvwz"), 0, copies=3, want=Want(72, 16)) == 3


def test_a_prompt_for_which_no_seat_is_left_finds_what_those_before_it_have_computed() -> None:
    """There is room for all, but two run at once: the third waits until one ends, which both have been computed by."""
    seated, free = (RadixPool(100, page_tokens=16, seats=seats) for seats in (2, 3))
    for pool in (seated, free):
        pool.sent(keys("abcd"), blocks=5)
        pool.sent(keys("abxy"), blocks=5)

    assert [pool.kept(keys("abxz"), 0, copies=0) for pool in (seated, free)] == [3, 0]


def test_a_prompt_that_does_not_wait_finds_nothing_of_what_is_being_computed() -> None:
    """With forty pages both are let in, one after the other."""
    pool = pool_of(40, "abc")
    pool.sent(keys("uvwxy"), blocks=6, want=Want(88, 64, 64))

    assert pool.kept(keys("uvwz"), 0, copies=3, want=Want(72, 16)) == 0


def test_what_a_running_answer_has_by_now_is_not_free() -> None:
    """Forty tokens behind a prompt of one page and eight tokens are three pages that no event has told of."""
    pool = pool_of(14, "abc", "xyz")
    allocation = running(pool, "r", want=Want(24))
    pool.grows(allocation, lambda: 1)
    pool.begun(pool.sent(keys("r"), blocks=2))
    pool.sent(keys("uv"), blocks=3)
    pool.begun(pool.sent(keys("r"), blocks=2))
    assert kept(pool, "abc", copies=7) == 3

    pool.grows(allocation, lambda: 40)
    assert kept(pool, "abc", copies=7) == 0


def test_running_prompts_are_held_on_to_whole_though_told_of_after_their_first_token() -> None:
    """What was used longest ago is in use: another node goes."""
    pool = RadixPool(12, page_tokens=16)
    allocation = pool.sent(keys("abcd"), blocks=5)
    pool.begun(allocation)
    pool.stored(None, keys("abcd"))
    serve(pool, "xyz")
    pool.sent(keys("uv"), blocks=3)
    pool.begun(pool.sent(keys("a"), blocks=2))

    assert kept(pool, "abcd", copies=7) == 4
    assert kept(pool, "xyz", copies=7) == 0


def test_a_prompt_that_does_not_fit_waits_for_an_answer_to_end() -> None:
    """Of eleven pages a running request has four, its answer will take two more, and four are cached. A prompt that
    finds those is let in at once, if its answer takes little; if it may take much, it waits, and so it does behind one
    that lacks five pages and gets them once the running request is over: then what was cached is gone.
    """
    pool = pool_of(11, "wxyz")
    running(pool, "abc", want=Want(56, 32, 32, is_whole=True))

    def found(answer_tokens: int) -> int:
        return pool.kept(keys("wxyz"), 4, copies=7, want=Want(72, answer_tokens, answer_tokens, is_whole=True))

    assert found(1) == found(64) == 4
    pool.sent(keys("mnop"), blocks=5, want=Want(72, 32, 32, is_whole=True))
    assert found(1) == 0
