"""How long answers are: what clients allow (``max_tokens``) is a ceiling that few answers reach."""

from __future__ import annotations

import math
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
_DECAY: Final = 0.5 ** (1 / _HALVE)


class OutputLengths:
    """Learns the lengths of each model's answers; ``model`` is one that the router knows."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, float]] = {}

    def observe(self, model: str, tokens: int) -> None:
        """An answer of so many tokens has ended by itself."""
        seen = self._seen.setdefault(model, {_step(_PRIOR_TOKENS): _PRIOR_ANSWERS})
        for step in seen:
            seen[step] *= _DECAY
        seen[_step(tokens)] = seen.get(_step(tokens), 0.0) + 1.0

    def expected(self, model: str, *, most_tokens: int | None) -> int:
        """Tokens of the next answer that are seldom exceeded, within the client's ceiling."""
        seen = self._seen.get(model, {_step(_PRIOR_TOKENS): _PRIOR_ANSWERS})
        beyond = (1.0 - _QUANTILE) * sum(seen.values())
        tokens = 1
        for step in sorted(seen, reverse=True):
            tokens = math.ceil(2.0 ** (step / _STEPS_AN_OCTAVE))
            beyond -= seen[step]
            if beyond < 0.0:
                break
        return tokens if most_tokens is None else min(tokens, most_tokens)


def _step(tokens: int) -> int:
    """The number of the smallest length that holds so many."""
    return math.ceil(_STEPS_AN_OCTAVE * math.log2(max(1, tokens)))
