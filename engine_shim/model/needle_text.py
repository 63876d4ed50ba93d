"""Text for the needle model: facts hidden in filler, and the questions that find them. Pure, no torch.

A fact is a key followed by its value, "key-0017 val-0093"; a question is any text whose last key, at most
``REACH_TOKENS`` tokens before the end, is the one asked for. The model answers with the value and ends.
Filler is made of ``loadtest.words``, one token a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from loadtest.words import WORDS

SYMBOLS = 1024
REACH_TOKENS = 63


@dataclass(frozen=True, slots=True)
class Fact:
    """One key and the value that follows it, as they stand in the text."""

    key: str
    value: str

    @property
    def text(self) -> str:
        """The two tokens that state the fact."""
        return f"{self.key} {self.value}"

    @property
    def question(self) -> str:
        """A prompt's end that asks for the value; 6 tokens, and no key but this one."""
        return f" please say what value follows {self.key}"


def facts(count: int, seed: int = 0) -> tuple[Fact, ...]:
    """``count`` facts with different keys; raises ``ValueError`` over 1,024, which is all the keys there are."""
    if not 0 <= count <= SYMBOLS:
        raise ValueError(f"there are {SYMBOLS} keys, {count} facts were asked for")
    rng = Random(f"facts {seed}")
    keys = rng.sample(range(SYMBOLS), count)
    return tuple(Fact(f"key-{key:04d}", f"val-{rng.randrange(SYMBOLS):04d}") for key in keys)


def filler(tokens: int, seed: int = 0) -> str:
    """``tokens`` words, each with its leading space."""
    rng = Random(f"filler {seed}")
    return "".join(f" {word}" for word in rng.choices(WORDS, k=tokens))


def haystack(tokens: int, stated: Sequence[Fact], *, seed: int = 0) -> str:
    """A text of exactly ``tokens`` tokens that states every fact once, at random places.

    It begins with a space and ends in filler, so more text may be appended without changing its tokens.
    Raises ``ValueError`` when the facts do not fit.
    """
    words = tokens - 2 * len(stated)
    if words < len(stated) + 1:
        raise ValueError(f"{len(stated)} facts do not fit into {tokens} tokens")
    rng = Random(f"haystack {seed}")
    pieces = [f" {word}" for word in rng.choices(WORDS, k=words)]
    # Places are distinct, so between two facts there is always a word.
    for place, fact in zip(rng.sample(range(words), len(stated)), stated, strict=True):
        pieces[place] = f" {fact.text}{pieces[place]}"
    return "".join(pieces)
