"""The indexes of a fleet: one for the ranks that serve the same models in blocks of the same size, in one bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.core.budget import Budget
from router.core.index import PrefixIndex

IndexKey = tuple[frozenset[str], int]


class Indexes:
    """Indexes come with their first rank and go with their last."""

    def __init__(self, max_blocks: int, *, on_failed_forecast: Callable[[int, Exception], None]) -> None:
        """``on_failed_forecast``: see ``Blocks.on_failed_forecast``."""
        self.budget = Budget(max_blocks)
        self._on_failed_forecast = on_failed_forecast
        self._by_key: dict[IndexKey, PrefixIndex] = {}
        self._left: list[PrefixIndex] = []  # without ranks, with something to let go of
        self._evicted_before = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def serving(self, model: str) -> Sequence[PrefixIndex]:
        """Those whose ranks serve a model: one a block size."""
        return [index for (models, _), index in self._by_key.items() if model in models]

    def of(self, models: frozenset[str], *, block_tokens: int) -> PrefixIndex:
        """The index for a rank that is about to be added to it."""
        index = self._by_key.get((models, block_tokens))
        if index is None:
            index = self._by_key[models, block_tokens] = PrefixIndex(block_tokens=block_tokens, budget=self.budget)
            index.on_failed_forecast = self._on_failed_forecast
        return index

    def leave(self, index: PrefixIndex, slot: int) -> None:
        """A rank is gone from an index."""
        index.remove_rank(slot)
        index.provisional.forget(slot)
        if not index.has_ranks:
            self._by_key = {key: each for key, each in self._by_key.items() if each is not index}
            self._left.append(index)
            self.tidy()

    def tidy(self) -> None:
        """Let go of a slice of what indexes without ranks had."""
        for index in [index for index in self._left if not index.tidy()]:
            self._left.remove(index)
            self.budget.leave(index)
            self._evicted_before += index.evicted_blocks

    def let_go(self) -> bool:
        """Let go of a slice of what is to go. False: nothing is left."""
        self.tidy()
        return any(index.tidy() for index in self._by_key.values()) or bool(self._left)

    def blocks(self) -> int:
        """Distinct blocks of dense groups."""
        return sum(map(len, self._by_key.values()))

    def used(self) -> int:
        """What is held in all, in units of the budget."""
        return sum(index.held for index in (*self._by_key.values(), *self._left))

    def evicted_blocks(self) -> int:
        """Blocks forgotten for want of room so far."""
        return self._evicted_before + sum(index.evicted_blocks for index in (*self._by_key.values(), *self._left))
