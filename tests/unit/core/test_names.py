"""One rank's names never change what another's stand for, and none outlives the process that gave it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

FULL = "full_attention"
WINDOW = "sliding_window"


def keys(text: str) -> list[int]:
    return block_keys([ord(letter) for letter in text], block_tokens=1, parent=namespace_seed("", ""))


def reusable(index: PrefixIndex, text: str) -> dict[int, int]:
    return index.reusable_tokens(keys(text), prompt_tokens=len(text) + 1)


def store(index: PrefixIndex, slot: int, names: tuple[int, ...], text: str, *, parent: int | None = None) -> None:
    index.apply(slot, BlockStored(names, parent, [ord(letter) for letter in text], 1, kind=FULL))
    index.end_batch(slot)


def names_held(index: PrefixIndex) -> int:
    own = [rank.names.own for rank in index._ranks.values() if rank.names.own is not None]
    return sum(map(len, (*index._names.values(), *own)))


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(block_tokens=1)
    for slot in (0, 1):
        index.add_rank(slot, domain="engine")
    return index


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_gives_names_another_meaning_hurts_nobody_else(index: PrefixIndex, first: int) -> None:
    """Two engines that count their blocks: whoever spoke first, each goes on behind its own and loses its own."""
    texts = ("aabb", "ccdd")
    for slot in (first, 1 - first):
        store(index, slot, (1, 2), texts[slot][:2])
    for slot in (0, 1):
        store(index, slot, (3, 4), texts[slot][2:], parent=2)
    assert [reusable(index, text) for text in texts] == [{0: 4}, {1: 4}]
    assert [reusable(index, text) for text in ("aadd", "ccbb")] == [{0: 2}, {1: 2}]

    index.apply(0, BlockRemoved((3,)))
    index.apply(0, BlockRemoved((4,)))
    assert [reusable(index, text) for text in texts] == [{0: 2}, {1: 4}]
    index.apply(1, BlockRemoved((2, 3, 4)))
    assert [reusable(index, text) for text in texts] == [{0: 2}, {1: 1}]


def test_a_rank_with_names_of_its_own_means_nothing_by_those_of_others(index: PrefixIndex) -> None:
    """What rank 1 calls 3 nobody has heard of, or it is gone: it is not what rank 0 calls so."""
    store(index, 0, (1, 2, 3), "aab")
    store(index, 1, (1, 2), "cc")
    store(index, 1, (9,), "x", parent=3)
    assert reusable(index, "aabx") == {0: 3}
    index.apply(1, BlockRemoved((3, 9)))
    assert [reusable(index, text) for text in ("aab", "cc")] == [{0: 3}, {1: 2}]


def test_a_rank_with_names_of_its_own_keeps_those_from_before(index: PrefixIndex) -> None:
    """What it stored before its names were found to be others goes on, and goes, by the same name."""
    store(index, 1, (5,), "z")
    store(index, 0, (1, 2), "aa")
    store(index, 1, (1, 2), "cc")
    store(index, 1, (6,), "y", parent=5)
    assert reusable(index, "zy") == {1: 2}
    index.apply(1, BlockRemoved((6, 5)))
    assert [reusable(index, text) for text in ("zy", "cc")] == [{}, {1: 2}]
    assert names_held(index) == 4


def test_what_was_taken_over_has_the_name_that_another_rank_tells(index: PrefixIndex) -> None:
    """Rank 0 reused six blocks that it had not told of; rank 1 tells of them. Rank 0 goes on behind the last by that
    name, and takes all away by these names."""
    for slot in (0, 1):
        store(index, slot, (900 + slot,), "xy"[slot])
    index.reused(0, keys("abcdef"), tokens=6)
    store(index, 1, (11, 12, 13, 14, 15, 16), "abcdef")
    store(index, 0, (17,), "g", parent=16)
    assert reusable(index, "abcdefg")[0] == 7

    index.apply(0, BlockRemoved((17, 16, 15, 14, 13, 12, 11)))
    index.end_batch(0)
    assert 0 not in reusable(index, "abcdefg")


def test_engines_of_another_kind_name_blocks_in_their_own_way() -> None:
    """The names of three ranks of one kind agree, whatever the fourth calls the same blocks: they share a table."""
    index = PrefixIndex(block_tokens=1)
    for slot, domain in enumerate(("vllm", "sglang", "sglang", "sglang")):
        index.add_rank(slot, domain=domain)
        store(index, slot, (1, 2) if slot == 0 else (21, 22), "ab")

    assert names_held(index) == 4
    index.apply(2, BlockRemoved((22, 21)))
    index.end_batch(2)
    assert reusable(index, "ab") == {0: 2, 1: 2, 3: 2}


def test_windows_alone_are_kept_apart_as_well(index: PrefixIndex) -> None:
    """Names of blocks without full attention."""
    for slot, text in enumerate(("ab", "cd")):
        tokens = [ord(letter) for letter in text]
        index.apply(slot, BlockStored((1, 2), None, tokens, 1, kind=WINDOW, window_tokens=3))
        index.end_batch(slot)
    assert (reusable(index, "ab"), reusable(index, "cd")) == ({0: 2}, {1: 2})
    index.apply(0, BlockRemoved((2,)))
    assert (reusable(index, "ab"), reusable(index, "cd")) == ({0: 1}, {1: 2})


def test_names_end_with_the_process_that_gave_them(index: PrefixIndex) -> None:
    """An engine whose hashes have another seed after each restart, beside one that keeps holding the same blocks."""
    text = "abcdefgh"
    store(index, 0, tuple(range(8)), text)
    for restart in range(1, 30):
        store(index, 1, tuple(range(100 * restart, 100 * restart + 8)), text)
        assert reusable(index, text) == {0: 8, 1: 8}
        assert names_held(index) == 16
        index.apply(1, AllBlocksCleared())
    assert names_held(index) == 8
    index.apply(0, BlockRemoved(tuple(range(8))))
    assert (names_held(index), len(index)) == (0, 0)


def test_equal_names_are_kept_once(index: PrefixIndex) -> None:
    """Hashes of content under one seed: a further holder adds no name; ranks go on behind each other's."""
    store(index, 0, (1, 2), "ab")
    store(index, 1, (1, 2), "ab")
    store(index, 1, (3,), "c", parent=2)
    store(index, 0, (3, 4), "cd", parent=2)
    assert all(rank.names.own is None for rank in index._ranks.values())
    assert names_held(index) == 4
    assert reusable(index, "abcd") == {0: 4, 1: 3}


TEXTS = ("aaaa", "aabb", "bbbb", "abab")


class TwoNamers(RuleBasedStateMachine):
    """Ranks whose names are the same few numbers for whatever they store: each is judged by its own events alone."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(block_tokens=1)
        self.named: dict[int, dict[int, str]] = {0: {}, 1: {}, 2: {}}
        self.held: dict[int, Counter[str]] = {slot: Counter() for slot in self.named}
        for slot in self.named:
            self.index.add_rank(slot, domain="engine")

    @rule(slot=st.integers(0, 2), text=st.sampled_from(TEXTS), first=st.integers(0, 30), length=st.integers(1, 4))
    def store(self, slot: int, text: str, first: int, length: int) -> None:
        """A text from its start, what is held of it left out; a rank uses a name for one block at a time."""
        named, held = self.named[slot], self.held[slot]
        start = next((at for at in range(4) if not held[text[: at + 1]]), 4)
        parent = next((name for name, known in named.items() if known == text[:start]), None) if start else None
        blocks = [text[: at + 1] for at in range(start, min(4, start + length))]
        names = tuple(range(first, first + len(blocks)))
        if not blocks or (start and parent is None) or not named.keys().isdisjoint(names):
            return
        if any(held[block] for block in blocks):
            return
        store(self.index, slot, names, text[start : start + len(blocks)], parent=parent)
        named.update(zip(names, blocks, strict=True))
        held.update(blocks)

    @rule(slot=st.integers(0, 2), number=st.integers(0, 5))
    def remove(self, slot: int, number: int) -> None:
        """A block that nothing is behind."""
        named, held = self.named[slot], self.held[slot]
        ends = [name for name, text in named.items() if not any(held[text + letter] for letter in "ab")]
        if ends:
            name = ends[number % len(ends)]
            held[named.pop(name)] -= 1
            self.index.apply(slot, BlockRemoved((name,)))
            self.index.end_batch(slot)

    @rule(slot=st.integers(0, 2))
    def clear(self, slot: int) -> None:
        self.index.apply(slot, AllBlocksCleared())
        self.named[slot].clear()
        self.held[slot].clear()

    @invariant()
    def each_is_judged_by_its_own_events(self) -> None:
        if not hasattr(self, "held"):
            return
        for text in TEXTS:
            depths = {
                slot: next((at for at in range(4) if not held[text[: at + 1]]), 4) for slot, held in self.held.items()
            }
            assert reusable(self.index, text) == {slot: depth for slot, depth in depths.items() if depth}
        assert {slot: self.index.blocks(slot) for slot in self.held} == {
            slot: sum(held.values()) for slot, held in self.held.items()
        }


TestTwoNamers = TwoNamers.TestCase
TestTwoNamers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
