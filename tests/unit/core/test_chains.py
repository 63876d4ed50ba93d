"""Chains of runs against an oracle that counts, for each rank, copies of token prefixes."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.chains import Chains
from router.core.holders import Holders
from router.core.runs import Runs
from router.wire.block_keys import block_keys

#: Conversations of one block a token: they share heads of every length, and fork and stop everywhere.
TEXTS = ("aaaaaaaa", "aaaabbbb", "aabbbbbb", "baaa", "aaaabbaa")
SLOTS = (0, 1, 70)
PREFIXES = st.tuples(st.sampled_from(TEXTS), st.integers(1, 8)).map(lambda pair: pair[0][: pair[1]])
TIERS = ("GPU", "CPU", "DISK")
TIER = st.sampled_from(TIERS)


def keys_of(text: str) -> list[int]:
    return block_keys([ord(letter) for letter in text], block_tokens=1, parent=7)


class ChainsMachine(RuleBasedStateMachine):
    """Stores at known places, twins, removals of any copy, clears and evictions, on three tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs()
        self.chains = Chains(self.runs)
        self.held: Counter[tuple[int, str, str]] = Counter()
        self.places: dict[str, int] = {}

    def known(self, prefix: str) -> bool:
        """Blocks without holders may be known still, where others stand behind them."""
        return prefix in self.places and self.runs.key(self.places[prefix]) is not None

    def holders(self, prefix: str) -> set[tuple[int, str]]:
        return {(slot, tier) for slot in SLOTS for tier in TIERS if self.held[slot, tier, prefix] > 0}

    @rule(slot=st.sampled_from(SLOTS), tier=TIER, text=PREFIXES, data=st.data())
    def store(self, slot: int, tier: str, text: str, data: st.DataObject) -> None:
        """Blocks behind any known one, or from the start."""
        starts = [0, *(start for start in range(1, len(text)) if self.known(text[:start]))]
        start = data.draw(st.sampled_from(starts), label="start")
        parent = self.places[text[:start]] if start else None
        new, places = self.chains.extend(slot, parent, keys_of(text)[start:], tier=tier)
        stored = [text[:end] for end in range(start + 1, len(text) + 1)]
        assert new == sum(self.held[slot, tier, prefix] == 0 for prefix in stored)
        for prefix, place in zip(stored, places, strict=True):
            assert not self.known(prefix) or self.places[prefix] == place
            self.places[prefix] = place
            self.held[slot, tier, prefix] += 1

    @rule(slot=st.sampled_from(SLOTS), tier=TIER, prefix=PREFIXES)
    def gain(self, slot: int, tier: str, prefix: str) -> None:
        """A copy of one block, known by name alone."""
        if self.known(prefix):
            assert self.chains.gain(slot, self.places[prefix], tier=tier) == (self.held[slot, tier, prefix] == 0)
            self.held[slot, tier, prefix] += 1

    @rule(data=st.data())
    @precondition(lambda self: any(self.held.values()))
    def lose(self, data: st.DataObject) -> None:
        """A copy of any block goes, inner ones too."""
        slot, tier, prefix = data.draw(
            st.sampled_from(sorted(each for each, n in self.held.items() if n)), label="copy"
        )
        self.held[slot, tier, prefix] -= 1
        lost = self.chains.lose(slot, self.places[prefix], tier=tier)
        assert lost == (self.held[slot, tier, prefix] == 0)

    @rule(slot=st.sampled_from(SLOTS), texts=st.sets(PREFIXES, max_size=4))
    def lose_some(self, slot: int, texts: set[str]) -> None:
        """One copy of each on the device, whether it is held there or not."""
        known = {prefix: self.places[prefix] for prefix in texts if self.known(prefix)}
        lost = self.chains.lose_all(slot, known.values())
        gone = {prefix for prefix in known if self.held[slot, "GPU", prefix] == 1}
        assert set(lost) == {known[prefix] for prefix in gone}
        for prefix in known:
            self.held[slot, "GPU", prefix] -= self.held[slot, "GPU", prefix] > 0

    @rule(slot=st.sampled_from(SLOTS), tier=TIER, prefix=PREFIXES)
    def lose_what_is_not_there(self, slot: int, tier: str, prefix: str) -> None:
        """Nothing happens."""
        if prefix in self.places and not self.held[slot, tier, prefix]:
            assert not self.chains.lose(slot, self.places[prefix], tier=tier)

    @rule(slot=st.sampled_from(SLOTS))
    def clear(self, slot: int) -> None:
        """A rank holds nothing any more."""
        self.chains.trim(self.chains.clear(slot))
        for each in [each for each in self.held if each[0] == slot]:
            del self.held[each]

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        """Tails go; of what is left, no block is without those before it that were there."""
        by_key = {key: text[: at + 1] for text in TEXTS for at, key in enumerate(keys_of(text))}
        before = self.runs.blocks
        gone: set[str] = set()
        for keys, lost in self.chains.evict(count):
            stretch = [by_key[key] for key in keys]
            for slot in SLOTS:
                held = [self.held[slot, "GPU", prefix] > 0 for prefix in stretch]
                assert [bool(lost.get(slot, 0) >> at & 1) for at in range(len(stretch))] == held
            for prefix in stretch:
                assert not any(self.known(longer) for longer in self.places if longer[:-1] == prefix)
            gone.update(stretch)
        assert len(gone) <= count
        assert self.runs.blocks <= max(0, before - count)
        for each in [each for each in self.held if each[2] in gone]:
            del self.held[each]

    @invariant()
    def depths_are_right(self) -> None:
        """Blocks without a gap, on the device and on whatever tier, for every text and limit."""
        for text in TEXTS:
            keys = keys_of(text)
            for limit in (len(text), 3):
                path = self.chains.path(keys, limit=limit)
                for below in (False, True):
                    expected = {}
                    for slot in SLOTS:
                        depth = 0
                        while depth < limit and any(
                            self.held[slot, tier, text[: depth + 1]] for tier in (TIERS if below else TIERS[:1])
                        ):
                            depth += 1
                        if depth:
                            expected[slot] = depth
                    assert self.chains.depths(path, below=below) == expected

    @invariant()
    def single_blocks_are_right(self) -> None:
        """Who holds what, gaps or not; and nothing is known that nobody holds, but for what stands before others."""
        for text in TEXTS:
            path = self.chains.path(keys_of(text), limit=len(text))
            for at in range(len(text)):
                prefix = text[: at + 1]
                for slot in SLOTS:
                    assert self.chains.holds_at(path, slot, at) == (self.held[slot, "GPU", prefix] > 0)
                    either = any(self.held[slot, tier, prefix] > 0 for tier in TIERS)
                    assert self.chains.holds_at(path, slot, at, below=True) == either
                if prefix in self.places:
                    assert self.runs.is_held(self.places[prefix]) == bool(self.holders(prefix))
                    for slot, tier in self.holders(prefix):
                        assert self.runs.holds(slot, self.places[prefix], tier=tier)
        for slot in SLOTS:
            expected = {keys_of(prefix)[-1] for s, tier, prefix in +self.held if s == slot and tier == "GPU"}
            assert self.chains.keys_of(slot) == expected
        held = {prefix for _, _, prefix in +self.held}
        needed = {text[:end] for text in held for end in range(1, len(text) + 1)}
        assert len(held) <= self.runs.blocks <= len(needed)
        assert self.runs.blocks == len(self.chains.all_keys())


ChainsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestChainsMachine = ChainsMachine.TestCase


def test_the_longest_holder_is_known_after_it_has_gone() -> None:
    """What the length of a run rests on is looked for anew once it shrinks."""
    holders = Holders()
    for slot, stop in ((1, 4), (2, 6), (3, 5)):
        holders.gain(slot, 0, stop)
    assert holders.length() == 6

    holders.lose(2, 5)
    holders.lose(2, 4)
    assert holders.length() == 5
    holders.lose(3, 0)  # odd now, and as long as before
    assert holders.length() == 5
    holders.drop(3)
    assert (holders.length(), holders.any_holds(3), holders.any_holds(4)) == (4, True, False)


def test_a_place_in_chains_of_other_blocks_is_no_parent_and_has_no_copies() -> None:
    """Runs are shared by chains of all block lengths; each keeps its own."""
    runs = Runs()
    short, long = Chains(runs), Chains(runs)
    _, places = short.extend(0, None, keys_of("aa"))
    last = [*places][-1]
    new, (behind,) = long.extend(1, last, [1234])
    assert (new, len(short.all_keys()), len(long.all_keys())) == (1, 2, 1)
    assert not long.gain(1, last)

    assert short.lose(0, last)
    assert long.lose(1, behind)
    assert (len(short.all_keys()), len(long.all_keys())) == (1, 0)


def test_of_branches_that_begin_at_one_place_the_first_stored_is_forgotten_first() -> None:
    """Whatever the machine: the order is that of events."""
    chains = Chains(Runs())
    _, (stem,) = chains.extend(0, None, keys_of("s"))
    leaves = "etaoinshrdlu"
    for letter in leaves:
        chains.extend(0, stem, keys_of("s" + letter)[1:])
    forgotten = [key for _ in leaves for keys, _ in chains.evict(1) for key in keys]
    assert forgotten == [keys_of("s" + letter)[1] for letter in leaves]
