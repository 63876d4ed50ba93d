"""Who holds which block of a sparse group: slot bits by chain key, with copies counted.

Engines store the same block twice (concurrent twins, recomputation after a window miss) and remove each copy with an
event of its own: the first copy sets a rank's bit, the last one's removal clears it.
"""

from __future__ import annotations

from router.core.holders import Holdings
from router.core.usable import slots_of


class CopyTable:
    """``masks[key]`` has the bit of every slot that holds at least one copy. Keys nobody holds are absent."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._more: dict[int, dict[int, int]] = {}  # copies beyond the first, by slot and key
        self._own = Holdings[int](lambda slot, key: bool(self.masks.get(key, 0) >> slot & 1))

    def gain(self, slot: int, key: int) -> bool:
        """Add a copy; True if it is the rank's first."""
        mask = self.masks.get(key, 0)
        bit = 1 << slot
        if mask & bit:
            more = self._more.setdefault(slot, {})
            more[key] = more.get(key, 0) + 1
            return False
        self.masks[key] = mask | bit
        self._own.add(slot, key)
        return True

    def lose(self, slot: int, key: int) -> bool:
        """Take a copy away; True if it was the rank's last."""
        if (more := self._more.get(slot)) is not None and key in more:
            more[key] -= 1
            if not more[key]:
                self._drop_copies(slot, key)
            return False
        held = bool(self.masks.get(key, 0) & (1 << slot))
        drop_bit(self.masks, key, 1 << slot)
        return held

    def clear(self, slot: int) -> int:
        """Forget all a rank held. Takes time in what that was, and returns how much it may have been."""
        bit, held = 1 << slot, self._own.take(slot)
        for key in held:
            drop_bit(self.masks, key, bit)
        self._more.pop(slot, None)
        return len(held)

    def extra_copies(self) -> int:
        """How often one rank has a block more than once: what these take besides the keys."""
        return sum(map(len, self._more.values()))

    def _drop_copies(self, slot: int, key: int) -> None:
        more = self._more.get(slot)
        if more is not None and more.pop(key, None) is not None and not more:
            del self._more[slot]

    def discard(self, key: int) -> int:
        """Forget a block on every rank. Returns the slots that held it, as bits."""
        mask = self.masks.pop(key, 0)
        if self._more:
            for slot in slots_of(mask):
                self._drop_copies(slot, key)
        return mask

    def __contains__(self, key: int) -> bool:
        return key in self.masks

    def keys_of(self, slot: int) -> frozenset[int]:
        """What one rank holds."""
        return frozenset(key for key, mask in self.masks.items() if mask >> slot & 1)


def drop_bit(masks: dict[int, int], key: int, bit: int) -> None:
    """Clear a bit; a mask without bits goes."""
    mask = masks.get(key, 0) & ~bit
    if mask:
        masks[key] = mask
    else:
        masks.pop(key, None)
