"""What has been asked before: the reuse an endless cache would have, and the approximate index without tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.core.usable import slots_of


class SeenPrefixes:
    """Keys of earlier prompts, at least the last ``max_keys / 2`` of them.

    Two generations: when the young one is full, it becomes the old one and what was old is forgotten. A prompt enters
    as a whole, so each generation holds whole prefixes.
    """

    def __init__(self, *, max_keys: int = 2_000_000) -> None:
        self.max_keys = max_keys
        self._young: set[int] = set()
        self._old: set[int] = set()

    def blocks_seen(self, keys: Sequence[int]) -> int:
        """How many blocks from the start have been in an earlier prompt (by bisection: keys are chained)."""
        return _depth(keys, self._young, self._old)

    def add(self, keys: Sequence[int]) -> None:
        """Remember all blocks of a prompt, those seen before too: what is asked for again stays young."""
        self._young.update(keys[_depth(keys, self._young) :])
        if 2 * len(self._young) >= self.max_keys:
            self._old, self._young = self._young, set()


def _depth(keys: Sequence[int], *generations: set[int]) -> int:
    """How many keys from the start are in one of the generations."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if any(keys[middle] in generation for generation in generations):
            low = middle + 1
        else:
            high = middle
    return low


class TextIndex:
    """Which ranks have been sent which text, for models without a tokenizer. Approximate: no event corrects it.

    Least recently used keys go first; a prompt's head is refreshed with its tail, so heads outlive tails.
    """

    def __init__(self, *, max_keys: int = 1_000_000) -> None:
        self.max_keys = max_keys
        self._slots: OrderedDict[int, int] = OrderedDict()

    def blocks_sent(self, keys: Sequence[int]) -> dict[int, int]:
        """For each slot, how many blocks from the start it has been sent."""
        depths: dict[int, int] = {}
        alive = -1
        for depth, key in enumerate(keys):
            mask = self._slots.get(key, 0) & alive
            for slot in slots_of(alive & ~mask) if depth else ():
                depths[slot] = depth
            alive = mask
            if not alive:
                return depths
        depths.update(dict.fromkeys(slots_of(alive), len(keys)) if keys else {})
        return depths

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """A prompt was sent to ``slot``."""
        for key in reversed(keys):
            self._slots[key] = self._slots.get(key, 0) | 1 << slot
            self._slots.move_to_end(key)
        while len(self._slots) > self.max_keys:
            self._slots.popitem(last=False)

    def forget(self, slot: int) -> None:
        """The rank is gone or empty."""
        keep = ~(1 << slot)
        self._slots = OrderedDict((key, mask & keep) for key, mask in self._slots.items() if mask & keep)
