"""The queue of a vLLM's cached blocks, in the order in which it would give them up, and who holds which of them.

A block that was stored again while it was there has several copies, each with a place of its own; a request finds the
one that was stored first. vLLM tells of each copy that goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import filterfalse, islice

#: A block of a group: the chain key in the dense group, one made of it in each other. Its first copy has its number.
Block = int
Copy = int
#: In place of the number of a copy that is in use.
HELD = 1 << 62
_TWIN = 0xC2B2AE3D27D4EB4F
_MASK = (1 << 64) - 1


class BlockQueue:
    """Cached blocks, those let go of longest ago first. Mutated by its owner, on one thread."""

    def __init__(self, cached: Iterable[Block] = ()) -> None:
        #: Each copy with a number that grows along the queue; how many running requests hold one; and the copies of
        #: blocks that have, or had, several, in the order in which they were stored.
        self.order: dict[Copy, int] = {}
        self.pins: dict[Copy, int] = {}
        self.twins: dict[Block, list[Copy]] = {}
        #: Held, not cached.
        self.nameless = 0
        self._last = 0
        for block in cached:
            self.use(block)

    def __contains__(self, block: Block) -> bool:
        return block in self.order or block in self.twins

    def copies(self, block: Block) -> Sequence[Copy]:
        """Those cached of a block."""
        return self.twins.get(block) or ((block,) if block in self.order else ())

    def found(self, block: Block) -> Copy | None:
        """The copy that a request finds."""
        return next(iter(self.copies(block)), None)

    def number(self, block: Block) -> int:
        """Where the copy that will go last stands in the order: 0 without one, ``HELD`` while one is in use."""
        if block not in self.twins:
            return HELD if block in self.pins else self.order.get(block, 0)
        return max((HELD if copy in self.pins else self.order[copy] for copy in self.twins[block]), default=0)

    def use(self, copy: Copy) -> None:
        """It will go last of all."""
        self._last += 1
        self.order.pop(copy, None)
        self.order[copy] = self._last

    def pin(self, copy: Copy | None) -> None:
        """A request takes hold of a block; None has no name."""
        if copy is None:
            self.nameless += 1
        else:
            self.pins[copy] = self.pins.get(copy, 0) + 1

    def unpin(self, copy: Copy | None) -> None:
        """A request lets go of it."""
        if copy is None:
            self.nameless -= 1
        elif (pins := self.pins.pop(copy)) > 1:
            self.pins[copy] = pins - 1
        elif copy in self.order:
            self.use(copy)
        else:
            self.nameless -= 1

    def enter(self, block: Block) -> Copy:
        """A block is stored, perhaps once more."""
        copy = block
        if block in self or block in self.pins:
            copy = block ^ (self._last + 1) * _TWIN & _MASK
            self.twins.setdefault(block, [block] if block in self.order else []).append(copy)
        self.use(copy)
        return copy

    def leave(self, block: Block) -> None:
        """A copy is given up: of several the one that nobody holds and was let go of longest ago."""
        copies = self.copies(block)
        if not copies:
            return
        copy = min(copies, key=lambda each: (each in self.pins, self.order[each]))
        del self.order[copy]
        self.nameless += copy in self.pins
        if block in self.twins:
            left = [each for each in copies if each != copy]
            self.twins[block] = left
            if left in ([], [block]):
                del self.twins[block]


@dataclass(slots=True, eq=False)
class Tail:
    """Blocks ``start`` to ``stop`` of a chain that were let go of, the last of which goes first."""

    keys: Sequence[int]
    start: int
    stop: int


class Front:
    """How far into a queue, which does not change meanwhile, blocks have been given up that nobody holds."""

    def __init__(self, queue: BlockQueue) -> None:
        #: Copies that nobody uses and whose number is less are gone, if they have not been touched before.
        self.number = 0
        self._queue = queue
        self._idle = filterfalse(queue.pins.__contains__, queue.order)
        self._passed = 0
        self._given = 0

    def give_up(self, count: int, *, touched: Callable[[], int]) -> int:
        """Go on until so many more are given up; ``touched`` tells how many before the front are not. Returns how many
        lack.
        """
        self._given += count
        while (ahead := self._given + touched() - self._passed) > 0:
            passed = list(islice(self._idle, ahead))
            self._passed += len(passed)
            if passed:
                self.number = self._queue.order[passed[-1]] + 1
            if len(passed) < ahead:
                lacking = self._given + touched() - self._passed
                self._given -= lacking
                return lacking
        return 0
