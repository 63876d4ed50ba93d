"""The index within a bound, against the oracle of ``test_index_oracle``: all it says is true, only less than all."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from tests.unit.core.test_index_oracle import BLOCK, CONVERSATIONS, DENSE_GROUP, IndexMachine, prompts


class CappedIndexMachine(IndexMachine):
    """The same steps; of what the engines hold, up to 20 blocks, the index may know three to nine."""

    #: What is found again is told of blocks that the index has forgotten, and counts as stored.
    tell_what_was_found = None

    @initialize(window=st.sampled_from([2, 3, 4, 5, 7]), is_thinned=st.booleans(), max_blocks=st.integers(3, 9))
    def start(self, window: int, is_thinned: bool, max_blocks: int) -> None:  # type: ignore[override]
        super().start(window=window, is_thinned=is_thinned)
        self.max_blocks = max_blocks
        self.index = PrefixIndex(block_tokens=BLOCK, max_blocks=max_blocks)
        for slot in self.windowed:
            self.index.add_rank(slot, domain="engine")

    @invariant()
    def every_prompt_is_judged_right(self) -> None:
        """No rank is expected to reuse more than it can."""
        if not hasattr(self, "held"):
            return
        for salt, prompt in prompts():
            for slot, tokens in self.reusable(salt, prompt).items():
                assert 0 < tokens <= self.usable(slot, salt, prompt)

    @invariant()
    def residency_is_exact(self) -> None:
        """No block is known that is not held, in any group; and what is counted is what is known."""
        if not hasattr(self, "held"):
            return
        for slot, held in self.held.items():
            true, residency = self.held_keys(slot), self.index.residency(slot)
            for group, known in residency.items():
                assert set(known) <= true.get(group, set())
            assert self.index.blocks(slot) == len(residency[-1])
            assert self.index._copies(slot) <= sum(held[copy] for copy in held if copy[0] == DENSE_GROUP)

    @invariant()
    def it_keeps_within_its_bound(self) -> None:
        """In blocks; none of them is known without the one before it."""
        if not hasattr(self, "held"):
            return
        assert len(self.index) <= self.max_blocks
        known = set[int]().union(*(chains.all_keys() for chains in self.index._chains.values()))
        assert len(known) == len(self.index)
        for salt in ("", "tenant"):
            for conversation in CONVERSATIONS:
                keys = block_keys(conversation, block_tokens=BLOCK, parent=namespace_seed("", salt))
                is_known = [key in known for key in keys]
                assert is_known == sorted(is_known, reverse=True)


CappedIndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestCappedIndexMachine = CappedIndexMachine.TestCase
