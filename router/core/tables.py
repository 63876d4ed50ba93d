"""Who holds which block of a sparse group: slot bits by chain key, with copies counted.

Engines store the same block twice (concurrent twins, recomputation after a window miss) and remove each copy with an
event of its own: the first copy sets a rank's bit, the last one's removal clears it.
"""

from __future__ import annotations

from router.core.usable import slots_of


class CopyTable:
    """``masks[key]`` has the bit of every slot that holds at least one copy. Keys nobody holds are absent."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._more: dict[tuple[int, int], int] = {}

    def gain(self, slot: int, key: int) -> bool:
        """Add a copy; True if it is the rank's first."""
        mask = self.masks.get(key, 0)
        bit = 1 << slot
        if mask & bit:
            self._more[slot, key] = self._more.get((slot, key), 0) + 1
            return False
        self.masks[key] = mask | bit
        return True

    def lose(self, slot: int, key: int) -> bool:
        """Take a copy away; True if it was the rank's last."""
        more = self._more.get((slot, key))
        if more is not None:
            if more == 1:
                del self._more[slot, key]
            else:
                self._more[slot, key] = more - 1
            return False
        held = bool(self.masks.get(key, 0) & (1 << slot))
        drop_bit(self.masks, key, 1 << slot)
        return held

    def clear(self, slot: int) -> None:
        """Forget all a rank held. Takes time in the size of the table."""
        bit = 1 << slot
        for key in [key for key, mask in self.masks.items() if mask & bit]:
            drop_bit(self.masks, key, bit)
        for copy in [copy for copy in self._more if copy[0] == slot]:
            del self._more[copy]

    def discard(self, key: int) -> int:
        """Forget a block on every rank. Returns the slots that held it, as bits."""
        mask = self.masks.pop(key, 0)
        if self._more:
            for slot in slots_of(mask):
                self._more.pop((slot, key), None)
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
