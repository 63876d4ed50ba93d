"""Block ids to chat messages, so that shared blocks are shared text.

A prompt of ``input_tokens`` becomes ``ceil(input_tokens * scale)`` words, each about one token; two at least (where
that makes it one more than its share, nothing continues it). The words of a block are drawn from (namespace, block id)
alone, so equal blocks read equal wherever they stand. At small scales a block has few words, or none in some places;
where its words begin follows from its place, which a shared prefix shares.

Words are then cut into messages: tools and system prompt first, then user and assistant in turn. The recorded
answer's length is the length of the assistant's message: live answers are discarded (unless told otherwise), so that
two runs send the same requests whatever the engines said. A turn that extends an earlier one keeps all its
messages and adds the answer and a new user message; one that breaks with it keeps the messages before the break.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise
from typing import Literal

from loadtest.types import BlockRuns, Conversation, Turn, common_blocks, count_blocks, drop_blocks

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class TextScale:
    """Where the words of block ``n`` begin, and how many a prompt has. Exact at any ratio."""

    block_tokens: int
    words_per_token: Fraction

    def words(self, tokens: int) -> int:
        """Words that stand for so many tokens, rounded up."""
        return -(-tokens * self.words_per_token.numerator // self.words_per_token.denominator)

    def first_word(self, block: int) -> int:
        """Position of the first word of the block at this place of the prompt."""
        return self.words(block * self.block_tokens)

    def block_at(self, word: int) -> int:
        """The last block that begins at or before this word: the one it belongs to."""
        ratio = self.words_per_token
        return word * ratio.denominator // (self.block_tokens * ratio.numerator)


def block_words(namespace: str, block_id: int, *, count: int, vocabulary: Sequence[str]) -> list[str]:
    """The first ``count`` words of a block's text."""
    material = f"{namespace}\0{block_id}".encode()
    digest = hashlib.shake_128(material, usedforsecurity=False).digest(2 * count)
    size = len(vocabulary)
    return [vocabulary[(digest[at] | digest[at + 1] << 8) % size] for at in range(0, 2 * count, 2)]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt as it was cut: message ``i`` holds the words up to ``ends[i]``."""

    blocks: BlockRuns
    words: int
    answer_words: int
    ends: tuple[int, ...]
    messages: tuple[Message, ...]


class Script:
    """What one conversation says, turn by turn. Ask for the turns in order."""

    def __init__(
        self, conversation: Conversation, *, namespace: str, scale: TextScale, vocabulary: Sequence[str]
    ) -> None:
        self._namespace = namespace
        self._scale = scale
        self._vocabulary = vocabulary
        first_words = max(2, scale.words(conversation.turns[0].input_tokens))
        self._head_words = min(scale.words(conversation.head_tokens), first_words - 1)
        self._said: list[_Prompt] = []
        self._answers: dict[int, str] = {}

    def messages(self, turn: Turn) -> tuple[Message, ...]:
        """The whole prompt of the conversation's next turn. The last message is the user's."""
        words = max(2, self._scale.words(turn.input_tokens))
        blocks = turn.prompt_blocks
        base, shared_words = self._closest(blocks, words)
        ends = self._cut(base, shared_words=shared_words, words=words)
        messages: list[Message] = []
        if base is not None:
            before = self._said[base]
            for message, old_end, end in zip(before.messages, before.ends, ends, strict=False):
                if old_end != end or end > shared_words:
                    break
                messages.append(message)
        kept = len(messages)
        live_answer = self._answers.get(base) if base is not None and kept == len(before.messages) else None
        for place, (start, end) in enumerate(pairwise((0, *ends))):
            if place == kept and live_answer is not None:
                messages.append(Message("assistant", live_answer))
            elif place >= kept:
                messages.append(Message(self._role(place), self._text(blocks, start, end)))
        answer_words = max(1, self._scale.words(turn.output_tokens))
        self._said.append(_Prompt(blocks, words, answer_words, ends, tuple(messages)))
        return tuple(messages)

    def record_answer(self, content: str) -> None:
        """Let the following turns quote this as the answer to the latest one, in place of recorded text."""
        if content:
            self._answers[len(self._said) - 1] = content

    def _closest(self, blocks: BlockRuns, words: int) -> tuple[int | None, int]:
        """The earlier turn that shares the longest beginning with these blocks, and its length in words.

        The latest of equals; nearly always the turn before, whose length then rules the others out.
        """
        best: int | None = None
        best_words = 0
        for place in range(len(self._said) - 1, -1, -1):
            said = self._said[place]
            if said.words <= best_words:
                continue
            shared = min(self._scale.first_word(common_blocks(said.blocks, blocks)), said.words, words)
            if shared > best_words:
                best, best_words = place, shared
        return best, best_words

    def _cut(self, base: int | None, *, shared_words: int, words: int) -> tuple[int, ...]:
        """Ends of the messages of a prompt that shares so many words with an earlier one."""
        before = () if base is None else self._said[base].ends
        if base is not None and shared_words == before[-1] <= words - 2:
            answer_words = min(self._said[base].answer_words, words - shared_words - 1)
            return (*before, shared_words + answer_words, words)
        # A break, or an addition too short for two messages: the message it falls in takes the rest.
        ends = [end for end in before if end <= shared_words and end < words]
        if self._role(len(ends)) == "system":
            ends = [min(self._head_words, words - 1)]
        elif self._role(len(ends)) == "assistant" and ends[-1] < shared_words < words:
            ends.append(shared_words)
        elif self._role(len(ends)) == "assistant":
            ends.pop()
        return (*ends, words)

    def _role(self, place: int) -> Role:
        if self._head_words > 0:
            place -= 1
        return "system" if place < 0 else "assistant" if place % 2 else "user"

    def _text(self, blocks: BlockRuns, start: int, end: int) -> str:
        """Words ``start`` to ``end`` of the prompt, each after a space."""
        words: list[str] = []
        place = min(self._scale.block_at(start), count_blocks(blocks) - 1)
        rest = count_blocks(blocks) - place
        for block_id in chain.from_iterable(drop_blocks(blocks, place)):
            first, beyond = self._scale.first_word(place), self._scale.first_word(place + 1)
            rest -= 1
            if rest == 0:  # the tail's, which has whatever the prompt's rounding up left to it
                beyond = end
            if first >= end:
                break
            count = min(beyond, end) - first
            drawn = block_words(self._namespace, block_id, count=count, vocabulary=self._vocabulary)
            words += drawn[max(0, start - first) :]
            place += 1
        return " " + " ".join(words)
