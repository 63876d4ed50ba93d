"""Drafts out of the request's own text: where its last tokens stood before, what followed then may follow again.

Source: Saxena, Prompt Lookup Decoding (2023); vLLM's "ngram". Costs one pass over the known tokens, in numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from engine_shim.types import Chunk, Request

if TYPE_CHECKING:
    from torch import Tensor

    from engine_shim.attention.plan import Plan

#: So many last tokens have to have stood together before; of more matches, up to the longest, the latest is taken.
SHORTEST, LONGEST = 2, 4


class NgramDrafter:
    """Keeps the tokens of living requests as arrays, so that a step costs what it adds, beside the search."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Request, array[int]] = WeakKeyDictionary()

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """See ``Drafter``."""
        return ()

    def propose(self, chunks: Sequence[Chunk]) -> list[tuple[int, ...]]:
        """See ``Drafter``."""
        return [self._propose(chunk.request, chunk.room) for chunk in chunks]

    def observe(self, plan: Plan, hidden: Tensor, ends: Sequence[int]) -> None:
        """See ``Drafter``. The text is all there is to know."""

    def _propose(self, request: Request, room: int) -> tuple[int, ...]:
        known = self._known.setdefault(request, array("q"))
        known.extend(request.tokens[len(known) :])
        return lookup(known, room)


def lookup(tokens: array[int], count: int) -> tuple[int, ...]:
    """The ``count`` tokens that followed when the last ones stood together before; nothing if they never did.

    A match that overlaps the end, as in a text that repeats itself, is followed around.
    """
    text = np.frombuffer(tokens, dtype=np.int64)
    ends = np.flatnonzero(text[:-1] == text[-1])
    length = 1
    while length < LONGEST:
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[-1 - length]] if length < len(text) else longer[:0]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < SHORTEST:
        return ()
    begin = int(ends[-1]) + 1
    period = len(text) - begin
    return tuple(int(text[begin + place % period]) for place in range(count))
