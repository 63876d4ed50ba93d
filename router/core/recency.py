"""The order in which a rank's cache would give its blocks up, kept by stretches of chains rather than by blocks.

A stretch is a run of blocks that were stored together and have been used together since; where a use ends inside one,
it is cut there. So a use costs the stretches on its path, however long the prompt is. SGLang's radix cache keeps the
same tree; vLLM's queue of free blocks yields the same order block by block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


class Stretch:
    """Blocks one behind the other, by their chain keys, and the key before them. ``pins`` counts the running requests
    that use them all, ``branches`` the stretches right behind them.
    """

    __slots__ = ("branches", "keys", "parent", "pins")

    def __init__(self, keys: Sequence[int], pins: int = 0, *, parent: int | None = None) -> None:
        self.keys = array("Q", keys)
        self.parent = parent
        self.pins = pins
        self.branches = 0

    def common(self, keys: Sequence[int], at: int) -> int:
        """How many blocks are those of ``keys`` from ``at`` on."""
        return common_blocks(self.keys, keys, min(len(self.keys), len(keys) - at), at=at)


def common_blocks(one: Sequence[int], other: Sequence[int], most: int, *, at: int = 0) -> int:
    """How many blocks, ``most`` at most, a chain has in common with another from the other's block ``at`` on.

    A chain key stands for all before it: halving does.
    """
    low, high = 0, min(most, len(one), len(other) - at)
    if high > 0 and one[high - 1] == other[at + high - 1]:
        return high
    while low < high:
        middle = (low + high) >> 1
        if one[middle] == other[at + middle]:
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
        self.pinned_blocks = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Stretch]:
        return iter(self._order)

    def add(self, parent: int | None, keys: Sequence[int], *, new: int) -> None:
        """Blocks were stored behind ``parent``, which is a use. The last ``new`` of them the rank did not have."""
        if self._gone and (back := self._gone.intersection(keys)):  # they stand in their stretches still
            self._gone -= back
            new -= len(back)
            if keys[0] not in self._by_first:
                keys = [key for key in keys if key not in back]
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
            self._branch(parent, by=1)
            self._enter(Stretch(keys, parent=parent))
            if not self._is_merged:
                self._touch(parent)

    def _touch(self, key: int | None) -> None:
        """What is stored is a use of all that it is stored behind."""
        while key is not None and (stretch := self._by_last.get(key)) is not None:
            self._order.move_to_end(stretch)
            key = stretch.parent

    def _branch(self, key: int | None, *, by: int) -> None:
        if key is not None and (stretch := self._by_last.get(key)) is not None:
            stretch.branches += by

    def first_to_go(self, keys: Iterable[int]) -> int | None:
        """Of single blocks the one that could go now: nothing is behind it, and nobody holds on to it."""
        ends = ((key, self._by_last.get(key)) for key in keys)
        return next((key for key, end in ends if end is not None and not end.branches and not end.pins), None)

    def path(self, keys: Sequence[int]) -> list[tuple[Stretch, int]]:
        """The stretches that a chain leads through, each with how many of its blocks are the chain's."""
        found: list[tuple[Stretch, int]] = []
        at = 0
        while at < len(keys) and (stretch := self._by_first.get(keys[at])) is not None:
            count = stretch.common(keys, at)
            found.append((stretch, count))
            at += count
        return found

    def knows(self, keys: Sequence[int]) -> bool:
        """Whether all of a chain is there."""
        return sum(count for _, count in self.path(keys)) == len(keys)

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
            if pins:
                self._pin(used, by=pins)
            self._order.move_to_end(used)
        known = sum(count for _, count in path)
        if pins < 0:
            self._let_go_behind(keys[known:])
        return known

    def let_go(self, keys: Sequence[int]) -> None:
        """A request no longer holds on to these blocks, which is no use of them."""
        path = self.path(keys)
        for stretch, _ in path:
            self._pin(stretch, by=-1)
        self._let_go_behind(keys[sum(count for _, count in path) :])

    def _let_go_behind(self, keys: Sequence[int]) -> None:
        """Some that a request held on to went all the same: those behind them are let go of, too."""
        for key in keys:
            if (stretch := self._by_first.get(key)) is not None:
                self._pin(stretch, by=-1)

    def _pin(self, stretch: Stretch, *, by: int) -> None:
        before, stretch.pins = stretch.pins, max(0, stretch.pins + by)
        if bool(before) is not bool(stretch.pins):
            self.pinned_blocks += len(stretch.keys) if stretch.pins else -len(stretch.keys)

    def remove(self, key: int) -> None:
        """The rank gave up a block that it had. Tails go first; one that went out of turn is let go of with the block
        behind it.
        """
        stretch = self._by_last.pop(key, None)
        if stretch is None:
            self._gone.add(key)
            return
        first, before = stretch.keys[0], len(stretch.keys)
        stretch.keys.pop()
        while stretch.keys and stretch.keys[-1] in self._gone:
            self._gone.remove(stretch.keys.pop())
        if stretch.pins:
            self.pinned_blocks -= before - len(stretch.keys)
        if stretch.keys:
            self._by_last[stretch.keys[-1]] = stretch
        else:
            del self._order[stretch]
            self._branch(stretch.parent, by=-1)
            if self._by_first.get(first) is stretch:
                del self._by_first[first]

    def clear(self) -> None:
        """Nothing is held."""
        self._order.clear()
        self._by_first.clear()
        self._by_last.clear()
        self._gone.clear()
        self.pinned_blocks = 0

    def _cut(self, stretch: Stretch, count: int) -> Stretch:
        """Make the first blocks a stretch of their own and return it."""
        head = Stretch(stretch.keys[:count], stretch.pins, parent=stretch.parent)
        del stretch.keys[:count]
        stretch.parent = head.keys[-1]
        head.branches = 1
        self._by_first[stretch.keys[0]] = stretch
        self._enter(head)
        return head

    def _enter(self, stretch: Stretch) -> None:
        self._order[stretch] = None
        self._by_first[stretch.keys[0]] = stretch
        self._by_last[stretch.keys[-1]] = stretch
