"""A rank that was warm before anybody listened: what is believed of it against an engine that keeps token sequences."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored

#: Conversations of two tokens a block; they share heads. No two blocks of equal text stand behind different heads.
CONVERSATIONS = ("abcd", "abef", "ghij")
TEXTS = st.tuples(st.sampled_from(CONVERSATIONS), st.integers(1, 4)).map(lambda pair: pair[0][: pair[1]])


def tokens_of(text: str) -> list[int]:
    return [token for letter in text for token in (ord(letter), 9)]


def keys_of(text: str) -> list[int]:
    return block_keys(tokens_of(text), block_tokens=2, parent=namespace_seed("", ""))


def name_of(text: str) -> int:
    """An engine's name for the block that ends a text."""
    return int.from_bytes(text.encode())


class LateJoinMachine(RuleBasedStateMachine):
    """Requests: the engine tells what it stores and what it has reused. Blocks that it gives up, tails first."""

    @initialize(warm=st.lists(TEXTS, max_size=4))
    def start(self, warm: list[str]) -> None:
        self.held = {text[:end] for text in warm for end in range(1, len(text) + 1)}
        self.unknown = set(self.held)
        self.index = PrefixIndex(block_tokens=2)
        self.index.add_rank(0, domain="engine")

    def depth(self, text: str) -> int:
        return next((at for at in range(len(text)) if text[: at + 1] not in self.held), len(text))

    def believed(self, text: str) -> int:
        return self.index.reusable_tokens(keys_of(text), prompt_tokens=2 * len(text) + 1).get(0, 0) // 2

    @rule(text=TEXTS)
    def ask(self, text: str) -> None:
        """A prompt with one token more than its blocks, whose answer fills no block."""
        found = self.depth(text)
        ticket = self.index.promise(0, keys_of(text), prompt_tokens=2 * len(text) + 1)
        if found < len(text):
            names = tuple(name_of(text[:end]) for end in range(found + 1, len(text) + 1))
            parent = name_of(text[:found]) if found else None
            self.index.apply(0, BlockStored(names, parent, tokens_of(text)[2 * found :], 2))
            self.index.provisional.settle()
            self.held.update(text[:end] for end in range(found + 1, len(text) + 1))
        self.index.provisional.drop(ticket)
        if found and self.index.has_gaps(0):
            self.index.reused(0, keys_of(text), tokens=2 * found)
        if self.index._ranks[0].dense_group is not None and (found < len(text) or self.index.has_gaps(0)):
            assert self.believed(text) == len(text)

    @rule(text=TEXTS)
    def give_up(self, text: str) -> None:
        """The last block of what is there of a conversation. Nobody knows the names of those from before: of
        such blocks those go that only named ones had vouched for, which went first.
        """
        end = text[: self.depth(text)]
        is_inner = any(other != end and other.startswith(end) for other in self.held)
        rank = self.index._ranks[0]
        is_vouched_for = end in self.unknown and (rank.dense_group is None or bool(rank.adopted.nameless))
        if end and not is_inner and not is_vouched_for:
            self.index.apply(0, BlockRemoved((name_of(end),)))
            self.held.discard(end)
            self.unknown.discard(end)

    @invariant()
    def nothing_is_believed_that_is_not_there(self) -> None:
        """Whatever was taken over, for every conversation."""
        if hasattr(self, "held"):
            for text in CONVERSATIONS:
                assert self.believed(text) <= self.depth(text)


LateJoinMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
TestLateJoinMachine = LateJoinMachine.TestCase
