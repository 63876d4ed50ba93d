"""The queue of a shared pool (``core/shared_pool``) as requests will take from it and give back to it.

Nothing is copied: what has been given up is known by one number, of what has changed places there is a note.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.core.block_queue import Block, Copy, Front, Tail

if TYPE_CHECKING:
    from router.core.shared_pool import SharedPool


class ForetoldQueue:
    """Good as long as nothing changes in the pool."""

    def __init__(self, pool: SharedPool, *, room: int, free: int) -> None:
        """``room`` blocks are not cached and free, fewer than none where some went of which no event told yet; ``free``
        are, cached or not.
        """
        self._pool = pool
        self._room = room
        self._free = free
        self._front = Front(pool.queue)
        self._spans: list[Tail] = []  # of the dense group: touched
        self._moved: set[Copy] = set()  # of the others: touched
        self._moved_numbers: list[int] = []
        self._named: dict[Block, list[Copy]] = {}  # of the others: stored since
        self._block_of: dict[Copy, Block] = {}  # of those
        self._pins: dict[Copy, int] = {}  # of the others, where they are no more those of the pool
        self._lost: set[Copy] = set()  # given up after having been let go of
        self._tail: OrderedDict[Copy | Tail, None] = OrderedDict()  # let go of since
        self._serial = 0

    def _found(self, block: Block) -> Copy | None:
        """The copy of a block of another group than the dense one that a request would find."""
        pool = self._pool
        for copy in pool.queue.copies(block):
            is_left = pool.queue.order[copy] >= self._front.number or copy in pool.queue.pins or copy in self._moved
            if is_left and copy not in self._lost:
                return copy
        return next(iter(self._named.get(block, ())), None)

    # --- blocks of the other groups -----------------------------------------------------------------------

    def _name(self, blocks: Sequence[Block]) -> Sequence[Copy]:
        """Blocks that somebody holds are cached from now on."""
        copies = range(-self._serial - 1, -self._serial - len(blocks) - 1, -1)
        self._serial += len(blocks)
        for copy, block in zip(copies, blocks, strict=True):
            self._named.setdefault(block, []).append(copy)
        self._block_of.update(zip(copies, blocks, strict=True))
        self._pins.update(dict.fromkeys(copies, 1))
        return copies

    def _pins_of(self, copy: Copy) -> int:
        pins = self._pins.get(copy)
        return self._pool.queue.pins.get(copy, 0) if pins is None else pins

    def _pin(self, copy: Copy) -> None:
        pins = self._pins_of(copy)
        self._pins[copy] = pins + 1
        if pins:
            return
        self._free -= 1
        if copy in self._tail:
            del self._tail[copy]
        else:
            self._moved.add(copy)
            insort(self._moved_numbers, self._pool.queue.order[copy])

    def _let_go(self, copies: Sequence[Copy | None]) -> None:
        """The first goes first."""
        nameless = copies.count(None)
        self._free += nameless
        self._room += nameless
        for copy in copies if nameless < len(copies) else ():
            if copy is None:
                continue
            pins = self._pins_of(copy)
            self._pins[copy] = max(0, pins - 1)
            if pins == 1:
                self._free += 1
                self._tail[copy] = None

    # --- the queue ----------------------------------------------------------------------------------------

    def _take(self, count: int) -> None:
        """Take free blocks, of the cached ones those first that were let go of longest ago."""
        self._free -= count
        self._room -= count
        if self._room >= 0:
            return
        lacking = self._front.give_up(-self._room, touched=self._touched)
        self._room = 0
        self._take_let_go(lacking)

    def _touched(self) -> int:
        """Of the blocks that lie before the front so many have been touched before it came to them."""
        return bisect_left(self._moved_numbers, self._front.number) + sum(map(self._touched_of, self._spans))

    def _touched_of(self, span: Tail) -> int:
        keys, number, front = span.keys, self._pool.queue.number, self._front.number
        passed = bisect_left(range(span.stop), True, lo=span.start, key=lambda at: number(keys[at]) < front)
        return span.stop - passed

    def _take_let_go(self, count: int) -> None:
        """Nothing is left of what was free at first."""
        while count and self._tail:
            tail = next(iter(self._tail))
            if isinstance(tail, Tail):
                stop = max(tail.start, tail.stop - count)
                self._lost.update(tail.keys[stop : tail.stop])
                count -= tail.stop - stop
                tail.stop = stop
                if tail.start < stop:
                    return
            else:
                count -= 1
                if (block := self._block_of.get(tail)) is not None:
                    self._named[block].remove(tail)
                else:
                    self._lost.add(tail)
            del self._tail[tail]
