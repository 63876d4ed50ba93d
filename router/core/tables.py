"""Who holds which block: slot bits by chain key, with copies counted; and what chains add to that.

Engines store the same block twice (concurrent twins, recomputation after a window miss) and remove each copy with an
event of its own: the first copy sets a rank's bit, the last one's removal clears it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from router.core.usable import slots_of


class CopyTable:
    """``masks[key]`` has the bit of every slot that holds at least one copy. Keys nobody holds are absent."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        #: Copies by slot, blocks held more than once counted as often.
        self.copies: defaultdict[int, int] = defaultdict(int)
        self._more: dict[tuple[int, int], int] = {}

    def gain(self, slot: int, key: int) -> bool:
        """Add a copy; True if it is the rank's first."""
        mask = self.masks.get(key, 0)
        bit = 1 << slot
        self.copies[slot] += 1
        if mask & bit:
            self._more[slot, key] = self._more.get((slot, key), 0) + 1
            return False
        self.masks[key] = mask | bit
        return True

    def lose(self, slot: int, key: int) -> bool:
        """Take a copy away; True if it was the rank's last."""
        more = self._more.get((slot, key))
        if more is not None:
            self.copies[slot] -= 1
            if more == 1:
                del self._more[slot, key]
            else:
                self._more[slot, key] = more - 1
            return False
        held = bool(self.masks.get(key, 0) & (1 << slot))
        self.copies[slot] -= held
        drop_bit(self.masks, key, 1 << slot)
        return held

    def clear(self, slot: int) -> None:
        """Forget all a rank held. Takes time in the size of the table."""
        bit = 1 << slot
        for key in [key for key, mask in self.masks.items() if mask & bit]:
            drop_bit(self.masks, key, bit)
        for copy in [copy for copy in self._more if copy[0] == slot]:
            del self._more[copy]
        self.copies.pop(slot, None)

    def discard(self, key: int) -> int:
        """Forget a block on every rank. Returns the slots that held it, as bits."""
        mask = self.masks.pop(key, 0)
        for slot in slots_of(mask):
            self.copies[slot] -= 1 + self._more.pop((slot, key), 0)
        return mask

    def __contains__(self, key: int) -> bool:
        return key in self.masks

    def holds(self, slot: int) -> Callable[[int], bool]:
        """Whether a rank holds a block, as a function of its key."""
        masks, bit = self.masks, 1 << slot
        return lambda key: bool(masks.get(key, 0) & bit)

    def keys_of(self, slot: int) -> frozenset[int]:
        """What one rank holds."""
        return frozenset(key for key, mask in self.masks.items() if mask >> slot & 1)


class ChainTable(CopyTable):
    """Blocks of dense groups, which are worth something only behind their whole prefix.

    Engines evict tails first, so what a rank holds nearly always is a prefix. Where it is not (an inner block left
    before its children), the bits of the blocks behind the hole stand in ``stranded``. What remains is sound:
    downward closed along every chain, so that depths can be found by bisection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stranded: dict[int, int] = {}
        self._children: dict[int, int | set[int]] = {}

    def sound(self, key: int) -> int:
        """Slots that hold this block and all before it."""
        return self.masks.get(key, 0) & ~self.stranded.get(key, 0)

    def extend(self, slot: int, parent: int | None, keys: Sequence[int]) -> int:
        """A rank stored blocks one after another behind ``parent`` (None: at the start). Returns how many are new."""
        bit = 1 << slot
        if not self.stranded and self.masks.keys().isdisjoint(keys) and (parent is None or self.sound(parent) & bit):
            # The usual case, at the speed of dict.update: a new tail of a sound prefix. Without holes no block that
            # nobody holds has children, so no link is lost.
            self.masks.update(zip(keys, itertools.repeat(bit)))
            self._children.update(itertools.pairwise(keys))
            self.copies[slot] += len(keys)
            if parent is not None and keys:
                self._link(parent, keys[0])
            return len(keys)
        new = 0
        for key in keys:
            sound = True
            if parent is not None:
                self._link(parent, key)
                sound = bool(self.sound(parent) & bit)
            if self.gain(slot, key):
                new += 1
                if not sound:
                    self.stranded[key] = self.stranded.get(key, 0) | bit
                elif self.stranded:
                    self._heal(key, bit)
            parent = key
        return new

    def lose(self, slot: int, key: int) -> bool:
        """Take a copy away; where it was the last, the rank's blocks behind it are stranded."""
        last = super().lose(slot, key)
        if last:
            bit = 1 << slot
            drop_bit(self.stranded, key, bit)
            todo = list(self._children_of(key))
            while todo:
                child = todo.pop()
                if self.sound(child) & bit:
                    self.stranded[child] = self.stranded.get(child, 0) | bit
                    todo.extend(self._children_of(child))
        return last

    def clear(self, slot: int) -> None:
        """Forget all a rank held."""
        super().clear(slot)
        bit = 1 << slot
        for key in [key for key, mask in self.stranded.items() if mask & bit]:
            drop_bit(self.stranded, key, bit)

    def evict(self, count: int) -> list[tuple[int, int]]:
        """Forget up to ``count`` blocks, tails of the longest known chains first, never a block before one behind it.

        Returns each with the slots that held it. Takes time in what it forgets and one walk down each chain.
        """
        evicted: list[tuple[int, int]] = []
        path: list[int] = []
        while len(evicted) < count and self.masks:
            if not path:
                path.append(next(iter(self.masks)))
            child = next((child for child in self._children_of(path[-1]) if child in self.masks), None)
            if child is not None:
                path.append(child)
                continue
            key = path.pop()
            evicted.append((key, self.discard(key)))
            self.stranded.pop(key, None)
            self._children.pop(key, None)
        return evicted

    def forget_links(self, key: int) -> None:
        """A block nobody holds keeps its links only while somebody holds a block behind it."""
        if key not in self.masks and not self._has_held_child(key):
            self._children.pop(key, None)

    def sweep(self) -> None:
        """Let go of links that lead to nothing."""
        for key in [key for key in self._children if not self._has_held_child(key)]:
            del self._children[key]

    def _heal(self, key: int, bit: int) -> None:
        """The hole at ``key`` is filled: blocks behind it are sound again, up to the next hole."""
        todo = list(self._children_of(key))
        while todo:
            child = todo.pop()
            if self.stranded.get(child, 0) & bit:
                drop_bit(self.stranded, child, bit)
                todo.extend(self._children_of(child))

    def _link(self, parent: int, child: int) -> None:
        known = self._children.get(parent)
        if known is None:
            self._children[parent] = child
        elif isinstance(known, set):
            known.add(child)
            if len(known) >= 64 and len(known).bit_count() == 1:  # now and then: children come and go
                known.intersection_update(self.masks.keys())
                known.add(child)
        elif known != child:
            self._children[parent] = {known, child}

    def _children_of(self, key: int) -> Collection[int]:
        known = self._children.get(key)
        if known is None:
            return ()
        return known if isinstance(known, set) else (known,)

    def _has_held_child(self, key: int) -> bool:
        return any(child in self.masks for child in self._children_of(key))


def drop_bit(masks: dict[int, int], key: int, bit: int) -> None:
    """Clear a bit; a mask without bits goes."""
    mask = masks.get(key, 0) & ~bit
    if mask:
        masks[key] = mask
    else:
        masks.pop(key, None)
