"""The order in which a rank's cache would give its blocks up, kept by stretches of chains rather than by blocks.

A stretch is a run of blocks that were stored together and have been used together since; where a use ends inside one,
it is cut there. So a use costs the stretches on its path, however long the prompt is. SGLang's radix cache keeps the
same tree; vLLM's queue of free blocks yields the same order block by block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class Stretch:
    """Blocks one behind the other, by their chain keys; ``pins`` counts the running requests that use them all."""

    __slots__ = ("keys", "pins")

    def __init__(self, keys: Sequence[int], pins: int = 0) -> None:
        self.keys = array("Q", keys)
        self.pins = pins

    def common(self, keys: Sequence[int], at: int) -> int:
        """How many blocks are those of ``keys`` from ``at`` on. A chain key stands for all before it: halving does."""
        own = self.keys
        low, high = 0, min(len(own), len(keys) - at)
        if high and own[high - 1] == keys[at + high - 1]:
            return high
        while low < high:
            middle = (low + high) >> 1
            if own[middle] == keys[at + middle]:
                low = middle + 1
            else:
                high = middle
        return low


class Recency:
    """All stretches of one rank, the one to go first first.

    With ``is_merged``, as in vLLM's queue, what is stored right behind the stretch used last becomes part of it: an
    answer that grows block by block stays one stretch; and where a use ends inside a stretch, the rest keeps its place.
    In SGLang's tree such a rest counts as used, too (``UnifiedTreeCore._split_node``).
    """

    def __init__(self, *, is_merged: bool) -> None:
        self._is_merged = is_merged
        self._order: OrderedDict[Stretch, None] = OrderedDict()
        self._by_first: dict[int, Stretch] = {}
        self._by_last: dict[int, Stretch] = {}
        self._gone: set[int] = set()  # out of turn: let go of with the block behind it

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Stretch]:
        return iter(self._order)

    def add(self, parent: int | None, keys: Sequence[int], *, new: int) -> None:
        """Blocks were stored behind ``parent``, which is a use. The last ``new`` of them the rank did not have."""
        if self._gone and (back := self._gone.intersection(keys)):  # they stand in their stretches still
            self._gone -= back
            new -= len(back)
        if new <= 0:
            self.use(keys)
            return
        known = self.use(keys) if keys[0] in self._by_first else len(keys) - new
        if known == len(keys):
            return
        if known:
            parent, keys = keys[known - 1], keys[known:]
        before = self._by_last.get(parent) if parent is not None and self._is_merged else None
        if before is not None and not before.pins and next(reversed(self._order)) is before:
            del self._by_last[before.keys[-1]]
            before.keys.extend(keys)
            self._by_last[before.keys[-1]] = before
        else:
            self._enter(Stretch(keys))

    def path(self, keys: Sequence[int]) -> list[tuple[Stretch, int]]:
        """The stretches that a chain leads through, each with how many of its blocks are the chain's."""
        found: list[tuple[Stretch, int]] = []
        at = 0
        while at < len(keys) and (stretch := self._by_first.get(keys[at])) is not None:
            count = stretch.common(keys, at)
            found.append((stretch, count))
            at += count
        return found

    def use(self, keys: Sequence[int], *, pins: int = 0) -> int:
        """These blocks are used; ``pins`` is 1 as a request takes hold of them, -1 as it lets go. Returns how many are
        known. Of one use the last block is the first to go.
        """
        path = self.path(keys)
        for stretch, count in reversed(path):
            used = stretch
            if count < len(stretch.keys):
                used = self._cut(stretch, count)
                if not self._is_merged:
                    self._order.move_to_end(stretch)
            used.pins = max(0, used.pins + pins)
            self._order.move_to_end(used)
        known = sum(count for _, count in path)
        if pins < 0 and known < len(keys):  # some that it held on to went all the same: those behind them are let go of
            for key in keys[known:]:
                if (behind := self._by_first.get(key)) is not None:
                    behind.pins = max(0, behind.pins - 1)
        return known

    def remove(self, key: int) -> None:
        """The rank gave up a block that it had. Tails go first; one that went out of turn is let go of with the block
        behind it.
        """
        stretch = self._by_last.pop(key, None)
        if stretch is None:
            self._gone.add(key)
            return
        first = stretch.keys[0]
        stretch.keys.pop()
        while stretch.keys and stretch.keys[-1] in self._gone:
            self._gone.remove(stretch.keys.pop())
        if stretch.keys:
            self._by_last[stretch.keys[-1]] = stretch
        else:
            del self._order[stretch]
            if self._by_first.get(first) is stretch:
                del self._by_first[first]

    def clear(self) -> None:
        """Nothing is held."""
        self._order.clear()
        self._by_first.clear()
        self._by_last.clear()
        self._gone.clear()

    def _cut(self, stretch: Stretch, count: int) -> Stretch:
        """Make the first blocks a stretch of their own and return it."""
        head = Stretch(stretch.keys[:count], stretch.pins)
        del stretch.keys[:count]
        self._by_first[stretch.keys[0]] = stretch
        self._enter(head)
        return head

    def _enter(self, stretch: Stretch) -> None:
        self._order[stretch] = None
        self._by_first[stretch.keys[0]] = stretch
        self._by_last[stretch.keys[-1]] = stretch
