"""How long answers are: what clients allow (``max_tokens``) is a ceiling that few answers reach."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

#: Nine of ten answers are no longer than what is expected.
_QUANTILE: Final = 0.9
#: Answers of a model over which its past fades to half.
_HALVE: Final = 200
#: Lengths are told apart by a quarter of their octave.
_STEPS_AN_OCTAVE: Final = 4
#: What is taken for granted before answers have been seen: so many of such a length.
_PRIOR_ANSWERS: Final = 5.0
_PRIOR_TOKENS: Final = 512
#: So many answers at once are taken into account, at first each: it is the path of every request.
_BATCH: Final = 16


@dataclass(slots=True)
class _Lengths:
    """Of one model's answers: how many by step, those not counted yet, and what is expected of the next."""

    seen: dict[int, float] = field(default_factory=lambda: {_step(_PRIOR_TOKENS): _PRIOR_ANSWERS})
    news: list[int] = field(default_factory=list)
    counted: int = 0
    expected_tokens: int = _PRIOR_TOKENS

    def count(self) -> None:
        """Take the news into account."""
        fade = 0.5 ** (len(self.news) / _HALVE)
        self.counted += len(self.news)
        for step in self.seen:
            self.seen[step] *= fade
        for step in map(_step, self.news):
            self.seen[step] = self.seen.get(step, 0.0) + 1.0
        self.news.clear()
        beyond = (1.0 - _QUANTILE) * sum(self.seen.values())
        for step in sorted(self.seen, reverse=True):
            beyond -= self.seen[step]
            if beyond < 0.0:
                self.expected_tokens = math.ceil(2.0 ** (step / _STEPS_AN_OCTAVE))
                return


class OutputLengths:
    """Learns the lengths of each model's answers; ``model`` is one that the router knows."""

    def __init__(self) -> None:
        self._models: dict[str, _Lengths] = {}

    def observe(self, model: str, tokens: int) -> None:
        """An answer of so many tokens has ended by itself."""
        lengths = self._models.get(model)
        if lengths is None:
            lengths = self._models[model] = _Lengths()
        lengths.news.append(tokens)
        if len(lengths.news) >= min(_BATCH, lengths.counted):
            lengths.count()

    def expected(self, model: str, *, most_tokens: int | None) -> int:
        """Tokens of the next answer that are seldom exceeded, within the client's ceiling."""
        lengths = self._models.get(model)
        tokens = _PRIOR_TOKENS if lengths is None else lengths.expected_tokens
        return tokens if most_tokens is None else min(tokens, most_tokens)


def _step(tokens: int) -> int:
    """The number of the smallest length that holds so many."""
    return math.ceil(_STEPS_AN_OCTAVE * math.log2(max(1, tokens)))
