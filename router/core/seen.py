"""What has been asked before: the reuse an endless cache would have, and the approximate index without tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.core.usable import slots_of

#: Keys that are looked at with each prompt that comes, and two more for each of its own, after a rank was forgotten.
_FEWEST_CLEANED = 64
#: Keys are in shards of about so many: the keys of one are listed in a millisecond or two.
_SHARD_KEYS = 16 * 1024


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

    A key has a bit for each rank that was sent it. A rank that is forgotten gives its bit up at once; keys are rid of
    it little by little, as prompts are added, and then another rank may have it.
    """

    def __init__(self, *, max_keys: int = 1_000_000) -> None:
        self.max_keys = max_keys
        self._shards = [OrderedDict[int, int]() for _ in range(max(1, max_keys // _SHARD_KEYS))]
        self._bits: dict[int, int] = {}  # by slot
        self._slots: dict[int, int] = {}  # by bit
        self._live = 0
        self._free: list[int] = []
        #: Bits given up: those that keys are being rid of, the shards that may still have such keys, the keys of the
        #: last one of these, and the bits that come next.
        self._leaving = 0
        self._waiting: list[OrderedDict[int, int]] = []
        self._unclean: list[int] = []
        self._left = 0

    def blocks_sent(self, keys: Sequence[int]) -> dict[int, int]:
        """For each slot, how many blocks from the start it has been sent."""
        depths: dict[int, int] = {}
        shards, alive = self._shards, self._live
        for depth, key in enumerate(keys):
            mask = shards[key % len(shards)].get(key, 0) & alive
            for bit in slots_of(alive & ~mask) if depth else ():
                depths[self._slots[bit]] = depth
            alive = mask
            if not alive:
                return depths
        if keys:
            depths.update((self._slots[bit], len(keys)) for bit in slots_of(alive))
        return depths

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """A prompt was sent to ``slot``."""
        mine = 1 << self._bit(slot)
        shards = self._shards
        most = self.max_keys // len(shards)
        for key in reversed(keys):
            shard = shards[key % len(shards)]
            shard[key] = shard.get(key, 0) | mine
            shard.move_to_end(key)
            if len(shard) > most:
                shard.popitem(last=False)
        self._clean(_FEWEST_CLEANED + 2 * len(keys))

    def forget(self, slot: int) -> None:
        """The rank is gone or empty."""
        bit = self._bits.pop(slot, None)
        if bit is not None:
            del self._slots[bit]
            self._live ^= 1 << bit
            self._left |= 1 << bit

    def _bit(self, slot: int) -> int:
        bit = self._bits.get(slot)
        if bit is None:
            used = self._live | self._leaving | self._left
            bit = self._bits[slot] = self._free.pop() if self._free else used.bit_length()
            self._slots[bit] = slot
            self._live |= 1 << bit
        return bit

    def _clean(self, most: int) -> None:
        """Rid so many keys of the bits that were given up. Others may have these when the last key is rid of them."""
        if not self._waiting:
            if not self._left:
                return
            self._leaving, self._left = self._left, 0
            self._waiting = list(self._shards)
        shard = self._waiting[-1]
        if not self._unclean:
            self._unclean = list(shard)
        for key in self._unclean[-most:]:
            mask = shard.get(key)
            if mask is not None and mask & self._leaving:
                if kept := mask & ~self._leaving:
                    shard[key] = kept
                else:
                    del shard[key]
        del self._unclean[-most:]
        if not self._unclean:
            self._waiting.pop()
            if not self._waiting:
                self._free += slots_of(self._leaving)
                self._leaving = 0
