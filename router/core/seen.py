"""What has been asked before: the reuse an endless cache would have, and the approximate index without tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.core.usable import slots_of


class SeenPrefixes:
    """Keys of all earlier prompts, the oldest forgotten beyond ``max_keys``."""

    def __init__(self, *, max_keys: int = 2_000_000) -> None:
        self.max_keys = max_keys
        self._keys: dict[int, None] = {}

    def blocks_seen(self, keys: Sequence[int]) -> int:
        """How many blocks from the start have been in an earlier prompt (by bisection: keys are chained)."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._keys:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, keys: Sequence[int]) -> None:
        """Remember the blocks of a prompt."""
        self._keys.update(dict.fromkeys(keys))
        excess = len(self._keys) - self.max_keys
        if excess > 0:
            for key in [key for key, _ in zip(self._keys, range(excess), strict=False)]:
                del self._keys[key]


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
