"""The endless cache and the text index, against plain sets of whole prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import seen
from router.core.seen import SeenPrefixes, TextIndex

Words = tuple[int, ...]
#: Prompts over a tiny alphabet: they share prefixes and part again.
PROMPTS = st.lists(st.integers(0, 2), max_size=7).map(tuple)


def chain(words: Words) -> list[int]:
    """A key a block that stands for it and all before it."""
    return [hash(words[: end + 1]) for end in range(len(words))]


def common(one: Words, other: Words) -> int:
    """Length of the common start."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


@settings(deadline=None)
@given(prompts=st.lists(PROMPTS, max_size=12), asked=PROMPTS)
def test_seen_is_the_longest_common_start_with_any_earlier_prompt(prompts: Sequence[Words], asked: Words) -> None:
    """Found by bisection over keys; here by comparing word for word."""
    earlier = SeenPrefixes()
    for prompt in prompts:
        earlier.add(chain(prompt))

    assert earlier.blocks_seen(chain(asked)) == max((common(prompt, asked) for prompt in prompts), default=0)


def test_memory_is_bounded_and_keeps_what_is_asked_for() -> None:
    """Over 10,000 prompts of 10 blocks a bound of 1,000 keys keeps the last 50, and a head that comes with each."""
    earlier = SeenPrefixes(max_keys=1000)
    prompts = [(-1, -2, *range(number * 8, number * 8 + 8)) for number in range(10_000)]
    for prompt in prompts:
        assert earlier.blocks_seen(chain(prompt)) == (2 if prompt is not prompts[0] else 0)
        earlier.add(chain(prompt))

    assert all(earlier.blocks_seen(chain(prompt)) == 10 for prompt in prompts[-50:])
    remembered = sum(earlier.blocks_seen(chain(prompt)) == 10 for prompt in prompts)
    assert remembered <= 1000 // 8


# --- text ---------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(sent=st.lists(st.tuples(st.integers(0, 70), PROMPTS), max_size=15), asked=PROMPTS)
def test_each_rank_counts_for_the_longest_start_it_was_sent(sent: Sequence[tuple[int, Words]], asked: Words) -> None:
    """Ranks that were sent nothing of it are not named. Slots reach beyond 64 bits."""
    index = TextIndex()
    for slot, prompt in sent:
        index.add(slot, chain(prompt))
    expected: dict[int, int] = {}
    for slot, prompt in sent:
        if shared := common(prompt, asked):
            expected[slot] = max(expected.get(slot, 0), shared)

    assert index.blocks_sent(chain(asked)) == expected


@settings(deadline=None)
@given(deeds=st.lists(st.tuples(st.integers(0, 3), PROMPTS | st.none()), max_size=40), asked=PROMPTS)
def test_a_rank_that_left_was_sent_nothing(deeds: Sequence[tuple[int, Words | None]], asked: Words) -> None:
    """As if the index had never heard of it, whoever comes after it; keys are rid of it one by one meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen, "_FEWEST_CLEANED", 1)
        patch.setattr(seen, "_SHARD_KEYS", 250_000)
        index, sent = TextIndex(), list[tuple[int, Words]]()
        for slot, prompt in deeds:
            if prompt is None:
                index.forget(slot)
                sent = [(other, words) for other, words in sent if other != slot]
            else:
                index.add(slot, chain(prompt))
                sent.append((slot, prompt))
            expected: dict[int, int] = {}
            for other, words in sent:
                if shared := common(words, asked):
                    expected[other] = max(expected.get(other, 0), shared)
            assert index.blocks_sent(chain(asked)) == expected


def test_ranks_that_come_and_go_leave_nothing() -> None:
    """Neither keys that nobody was sent, nor bits that nobody has."""
    index = TextIndex()
    for number in range(5_000):
        index.add(number, chain((number, 1)))
        index.forget(number)
        index.add(-1, chain((0, 0)))

    masks = [mask for shard in index._shards for mask in shard.values()]
    assert len(masks) < 20_000
    assert max(masks) < 1 << 1_000


def test_the_text_index_is_bounded_and_forgets_tails_before_heads() -> None:
    """Ten keys: a prompt of eight and then one of five leave the first one's first five."""
    index = TextIndex(max_keys=10)
    old, new = tuple(range(8)), tuple(range(100, 105))
    index.add(0, chain(old))
    index.add(1, chain(new))

    assert index.blocks_sent(chain(old)) == {0: 5}
    assert index.blocks_sent(chain(new)) == {1: 5}


def test_a_head_in_use_outlives_newer_text() -> None:
    """A system prompt sent again with each turn stays while the turns between are forgotten."""
    index = TextIndex(max_keys=10)
    head = (7, 7, 7)
    for turn in range(20):
        index.add(0, chain((*head, turn, turn)))

    assert index.blocks_sent(chain((*head, 19, 19))) == {0: 5}
    assert index.blocks_sent(chain((*head, 0, 0))) == {0: 3}
