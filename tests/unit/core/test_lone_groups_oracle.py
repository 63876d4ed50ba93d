"""Ranks whose layers all attend within a window, against engines that keep the texts of their blocks.

Two engines name equal blocks alike. Each stores, as vLLM does, the blocks before the last place where a prompt can be
resumed, once more where it computed them again, and gives any copy up at any time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.core.index import PrefixIndex
from router.core.provisional import Ticket
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event

BLOCK = 2
#: Texts are blocks, one a letter; some begin alike.
TEXTS = st.text("ab", min_size=1, max_size=7)
SLOTS = st.sampled_from([0, 1])
ALL_TEXTS = ("aaaaaaa", "aabbaab", "abababa", "bbbbbbb", "baaabba")


def name_of(text: str) -> int:
    return int.from_bytes(text.encode(), "big")


def tokens_of(text: str) -> list[int]:
    return [token for letter in text for token in (ord(letter), 9)]


def keys_of(text: str) -> list[int]:
    return block_keys(tokens_of(text), block_tokens=BLOCK, parent=namespace_seed("", ""))


@dataclass
class Engine:
    """``copies`` counts the cached blocks by the text up to their end."""

    needed: int
    copies: Counter[str] = field(default_factory=Counter)

    def hit(self, text: str, *, ends_with_block: bool) -> int:
        """Blocks of a prompt that are reused: the last ``needed`` before the place are there, or all of them."""
        most = len(text) - ends_with_block
        return max(
            end
            for end in range(most + 1)
            if all(self.copies[text[: at + 1]] for at in range(max(0, end - self.needed), end))
        )

    def serve(self, text: str, *, ends_with_block: bool) -> BlockStored | None:
        """A prompt of these blocks, and of a token more unless it ends with the last of them."""
        found = self.hit(text, ends_with_block=ends_with_block)
        if found == len(text):
            return None
        end = len(text) - ends_with_block
        kept = [text[: at + 1] for at in range(max(found, end - self.needed), end)]
        self.copies.update(kept)
        return BlockStored(
            tuple(map(name_of, kept)),
            name_of(text[:found]) if found else None,
            tokens_of(text)[BLOCK * found :],
            BLOCK,
            kind="sliding_window",
            window_tokens=BLOCK * self.needed + 1,
        )


class LoneGroupsMachine(RuleBasedStateMachine):
    """Events come a batch at a time, those of prompts in flight while they are."""

    @initialize(needed=st.integers(1, 3))
    def start(self, needed: int) -> None:
        self.engines = [Engine(needed), Engine(needed)]
        self.index = PrefixIndex(block_tokens=BLOCK)
        for slot in (0, 1):
            self.index.add_rank(slot, domain="engine")
            self.serve(slot, "bab", ends_with_block=False)

    def apply(self, slot: int, *events: Event) -> None:
        for event in events:
            self.index.apply(slot, event)
        self.index.end_batch(slot)

    @rule(slot=SLOTS, text=TEXTS, ends_with_block=st.booleans())
    def serve(self, slot: int, text: str, *, ends_with_block: bool) -> None:
        tokens = len(tokens_of(text)) + (not ends_with_block)
        ticket: Ticket = self.index.promise(slot, keys_of(text), prompt_tokens=tokens)
        if (event := self.engines[slot].serve(text, ends_with_block=ends_with_block)) is not None:
            self.apply(slot, event)
        self.index.provisional.drop(ticket)

    @rule(slot=SLOTS, place=st.integers(0, 30))
    def give_up(self, slot: int, place: int) -> None:
        held = sorted(self.engines[slot].copies.elements())
        if held:
            text = held[place % len(held)]
            self.engines[slot].copies -= Counter([text])
            self.apply(slot, BlockRemoved((name_of(text),)))

    @rule(slot=SLOTS)
    def clear(self, slot: int) -> None:
        self.engines[slot].copies.clear()
        self.apply(slot, AllBlocksCleared())

    @rule(slot=SLOTS)
    def restart(self, slot: int) -> None:
        """Another process takes the rank's place; what kind it is shows with its first event."""
        self.index.remove_rank(slot)
        self.index.provisional.forget(slot)
        self.engines[slot].copies.clear()
        self.index.add_rank(slot, domain="engine")
        self.serve(slot, "bab", ends_with_block=False)

    @invariant()
    def agree(self) -> None:
        """Any prompt is found on each rank as far as its engine would resume it; blocks are those it holds."""
        for text in ALL_TEXTS:
            for rest in (0, 1):
                found = self.index.reusable_tokens(keys_of(text), prompt_tokens=len(tokens_of(text)) + rest)
                for slot, engine in enumerate(self.engines):
                    assert found.get(slot, 0) == BLOCK * engine.hit(text, ends_with_block=not rest), (text, rest, slot)
        for slot, engine in enumerate(self.engines):
            assert self.index.blocks(slot) == len(+engine.copies)


TestLoneGroups = LoneGroupsMachine.TestCase
TestLoneGroups.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
