"""What of a prompt will still be there in a full vLLM whose groups of layers share one pool of blocks.

Requests of which no event has come are gone through as the engine would: those that have answered in the order in
which they did, then those that wait. Each touches what it finds in all groups, takes blocks of every group for the
rest, never cached ones first, and lets go of what has left its windows one step later. A request that does not fit
waits until those before it have done that, then until one ends: the one that runs longest is taken to be it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.core.usable import Mask, boundary

if TYPE_CHECKING:
    from router.core.shared_pool import SharedAllocation, SharedPool

#: A block by group and chain key.
Block = tuple[int, int]
#: One of several copies of a block. The one that was there before is number 0.
Copy = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Run:
    """A running request: what each group holds from block ``first[group]`` on, None for what is not cached."""

    allocation: SharedAllocation
    tables: dict[int, list[Copy | None]]
    first: dict[int, int]
    is_prefilled: bool = False


class SharedForecast:
    """A pool once all requests under way have their blocks."""

    def __init__(self, pool: SharedPool, due: Iterable[tuple[SharedAllocation, bool]], *, room: int, free: int) -> None:
        """``room`` blocks are not cached and free; ``free`` are, cached or not."""
        self._pool = pool
        self._room = room
        self._free = free
        self._copies: dict[Block, list[int]] = {}  # of blocks that had been touched, oldest first
        self._pins: dict[Copy, int] = {}
        self._tail: OrderedDict[Copy, None] = OrderedDict()  # let go of since
        self._moved: set[Block] = set()  # no longer where the pool's order has it
        self._victims = iter(pool.order)
        self._serial = 0
        self._runs: dict[SharedAllocation, _Run] = {}
        self._waiting_to_end = deque(pool.running)
        for allocation, ends in due:
            if ends:
                self._end(allocation)
            else:
                self._begin(allocation)

    def holds(self, group: int, key: int) -> bool | None:
        """Whether a block will be there. None: as now."""
        copies = self._copies.get((group, key))
        return None if copies is None else bool(copies)

    def depth(self, keys: Sequence[int], depth: int) -> int:
        """How many of the first ``depth`` blocks of the dense group will be there."""
        dense = self._pool.dense_group
        return next((at for at in range(depth) if self.holds(dense, keys[at]) is False), depth)

    # --- requests -------------------------------------------------------------------------------------

    def _begin(self, allocation: SharedAllocation) -> None:
        pool = self._pool
        for run in self._runs.values():
            if run.allocation.begun_at is not None and run.allocation.begun_at < allocation.sent_at:
                self._slide(run)
        keys = allocation.keys[: allocation.prompt_blocks]
        blocks = allocation.prompt_blocks + 1
        while True:
            known = next((at for at, key in enumerate(keys) if not self._alive((pool.dense_group, key))), len(keys))
            found = boundary(keys, known, bit=1, groups={g: self._mask(g) for g in pool.rules}, rules=pool.rules)
            first = {group: pool.first_held(group, found) for group in pool.groups}
            tables: dict[int, list[Copy | None]] = {
                group: [(group, key, self._alive((group, key))[0]) for key in keys[first[group] : found]]
                for group in pool.groups
            }
            idle = sum(not self._pins_of(copy) for table in tables.values() for copy in table if copy is not None)
            if idle + len(pool.groups) * (blocks - found) <= self._free or not self._wait():
                break
        for table in tables.values():
            for copy in table:
                if copy is not None:
                    self._pin(copy)
        for group in pool.groups:
            self._take(blocks - found)
            tables[group] += [None] * (blocks - found)
        ends = {len(keys), known} if known > found else {len(keys)}
        for group in pool.groups:
            kept: Iterable[int] = range(found, len(keys))
            if group in pool.rules:
                keeps_all = pool.keeps_all.get(group, False)
                kept = pool.rules[group].kept(found, len(keys), ends=ends, keeps_all=keeps_all)
            for at in kept:
                tables[group][at - first[group]] = self._name((group, keys[at]))
        self._runs[allocation] = _Run(allocation, tables, first)
        self._waiting_to_end.append(allocation)

    def _wait(self) -> bool:
        """What an engine does until there is more room. False: nothing more will come of it."""
        begun = [run for run in self._runs.values() if not run.is_prefilled]
        if begun:
            for run in begun:
                self._slide(run)
            return True
        if self._waiting_to_end:
            self._end(self._waiting_to_end[0])
            return True
        return False

    def _slide(self, run: _Run, *, end: int | None = None) -> None:
        """A step is done: windows let go of what they have left."""
        if run.is_prefilled and end is None:
            return
        run.is_prefilled = True
        for group in self._pool.rules:
            first = self._pool.first_held(group, run.allocation.prompt_blocks if end is None else end)
            left = max(0, first - run.first[group])
            gone, run.tables[group] = run.tables[group][:left], run.tables[group][left:]
            run.first[group] += left
            self._let_go(gone)

    def _end(self, allocation: SharedAllocation) -> None:
        """It fills the blocks of its answer, as far as they are known, and ends."""
        pool, keys = self._pool, allocation.keys
        if allocation not in self._waiting_to_end:  # what did not fit
            return
        self._waiting_to_end.remove(allocation)
        run = self._runs.pop(allocation, None) or self._known(allocation)
        self._slide(run)
        dense = run.tables[pool.dense_group]
        for at in range(len(dense) - 1, len(keys)):
            dense[at] = self._name((pool.dense_group, keys[at]))
            for group, rule in pool.rules.items():
                if rule.kept(at, at + 1, ends=(), keeps_all=pool.keeps_all.get(group, False)):
                    run.tables[group][-1] = self._name((group, keys[at]))
            self._slide(run, end=at + 1)
            for group in pool.groups:
                self._take(1)
                run.tables[group].append(None)
        for group in pool.groups:
            self._let_go(run.tables[group])

    def _known(self, allocation: SharedAllocation) -> _Run:
        """A request that has been heard of."""
        pool = self._pool
        heard = allocation.prompt_blocks if allocation in pool.pending else len(allocation.keys)
        first = {group: pool.first_held(group, heard) for group in pool.groups}
        tables: dict[int, list[Copy | None]] = {
            group: [
                (group, key, 0) if (group, key) in pool.order and self._alive((group, key)) else None
                for key in allocation.keys[first[group] : heard]
            ]
            for group in pool.groups
        }
        for table in tables.values():
            table.append(None)
        return _Run(allocation, tables, first, is_prefilled=True)

    # --- blocks ---------------------------------------------------------------------------------------

    def _alive(self, block: Block) -> list[int]:
        copies = self._copies.get(block)
        if copies is None:
            copies = self._copies[block] = [0] if block in self._pool.order else []
        return copies

    def _mask(self, group: int) -> Mask:
        return lambda key: bool(self._alive((group, key)))

    def _name(self, block: Block) -> Copy:
        """A block that somebody holds is cached from now on."""
        copies = self._alive(block)
        self._serial += 1
        copies.append(self._serial)
        copy = (*block, self._serial)
        self._pins[copy] = 1
        return copy

    def _pins_of(self, copy: Copy) -> int:
        group, key, number = copy
        pins = self._pins.get(copy)
        if pins is None:
            pins = 0 if number else self._pool.pins.get((group, key), 0)
        return pins

    def _pin(self, copy: Copy) -> None:
        pins = self._pins_of(copy)
        self._pins[copy] = pins + 1
        if not pins:
            self._free -= 1
            self._tail.pop(copy, None)
            if not copy[2]:
                self._moved.add(copy[:2])

    def _let_go(self, table: Sequence[Copy | None]) -> None:
        """The last goes first."""
        for copy in reversed(table):
            pins = 1 if copy is None else self._pins_of(copy)
            if copy is not None:
                self._pins[copy] = max(0, pins - 1)
            if pins != 1:
                continue
            self._free += 1
            if copy is None:
                self._room += 1
            else:
                self._tail[copy] = None
                if not copy[2]:
                    self._moved.add(copy[:2])

    def _take(self, count: int) -> None:
        """Take free blocks, of the cached ones those first that were let go of longest ago."""
        self._free -= count
        self._room -= count
        while self._room < 0:
            self._room += 1
            block = next((each for each in self._victims if self._is_idle(each)), None)
            if block is not None:
                self._alive(block).remove(0)
            elif self._tail:
                (group, key, number), _ = self._tail.popitem(last=False)
                self._alive((group, key)).remove(number)
            else:
                return

    def _is_idle(self, block: Block) -> bool:
        return block not in self._moved and not self._pins_of((*block, 0))
