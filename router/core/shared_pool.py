"""The blocks of a vLLM whose groups of layers share one pool: sliding windows and full attention.

All groups take their blocks from one queue of free ones (``BlockPool``), cached ones in the order in which they were
let go of. A request lets go of what has left a window as it goes on, and of all else as it ends: group by group, of
each its tail first (``KVCacheCoordinator.free``). ``core/shared_forecast`` goes on from here.

How many blocks there are no worker tells (the tokens that vLLM tells are those of contexts of the greatest length): it
is the most that were in use when one had to go.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from router.core.forecast import MAX_PENDING, Allocation
from router.core.shared_forecast import Block, SharedForecast
from router.core.usable import Rule

#: With more blocks than this to be taken, nothing is foretold: it would take more than some milliseconds.
MAX_TAKEN = 2048


@dataclass(slots=True, eq=False)
class SharedAllocation:
    """The blocks of one request: ``keys`` of the whole ones, the first ``prompt_blocks`` of its prompt; in each group
    it has one more, which is begun. ``sent_at``, ``begun_at`` and ``ended_at`` count what has happened in the pool.
    """

    pool: SharedPool
    keys: array[int]
    prompt_blocks: int
    sent_at: int
    begun_at: int | None = None
    ended_at: int | None = None
    awaited: list[int] = field(default_factory=list)

    def begun(self) -> None:
        """It has its blocks."""
        self.pool.begun(self)

    def ended(self, keys: Sequence[int]) -> None:
        """It is over, and leaves these blocks."""
        self.pool.ended(self, keys)

    def forget(self) -> None:
        """It failed, or its events did not come in time."""
        self.pool.forget(self)


class SharedPool:
    """Who uses the blocks of a rank, and in which order it would give them up. Mutated by its owner, on one thread."""

    def __init__(
        self,
        rules: Mapping[int, Rule],
        keeps_all: Mapping[int, bool],
        *,
        dense_group: int,
        cached: Iterable[int] = (),
    ) -> None:
        """``rules`` and ``keeps_all`` are of the window groups, ``cached`` the blocks of the dense one."""
        self.rules: dict[int, Rule] = {}
        self.keeps_all = keeps_all
        self.dense_group = dense_group
        self.is_radix = False
        #: The groups in the order in which a request takes and frees their blocks.
        self.groups: list[int] = []
        #: Cached blocks, those let go of longest ago first; and how many running requests hold a block, cached or not.
        self.order: OrderedDict[Block, None] = OrderedDict.fromkeys((dense_group, key) for key in cached)
        self.pins: dict[Block, int] = {}
        self.running: dict[SharedAllocation, None] = {}
        #: Requests of which events are due.
        self.pending: dict[SharedAllocation, None] = {}
        self._blocks: int | None = None
        self._sparse_copies = 0
        self._nameless = 0  # held, not cached
        self._left: list[tuple[int, Sequence[int]]] = []  # by windows just now, whose names may still be to come
        self._awaited: dict[int, list[SharedAllocation]] = {}
        self._tips: dict[int, SharedAllocation] = {}  # running requests, by their last whole block
        self._clock = 0
        self._forecast: SharedForecast | None = None  # holds until something changes
        self.meet(rules)

    def meet(self, rules: Mapping[int, Rule]) -> None:
        """These are all window groups there are, with blocks as large as the dense one's."""
        self.rules = {group: replace(rule, stride=1) for group, rule in rules.items()}
        self.groups = sorted((*rules, self.dense_group))
        self._forecast = None

    @property
    def blocks(self) -> int | None:
        """How many blocks of the dense group there are is not known: the others take from the same."""
        return None

    # --- requests -------------------------------------------------------------------------------------

    def sent(self, keys: Sequence[int], *, blocks: int) -> SharedAllocation:
        """A request of so many ``blocks`` in each group, with the one begun, is on its way to the rank."""
        allocation = SharedAllocation(self, array("Q", keys), blocks - 1, self._tick())
        self.pending[allocation] = None
        self._await(allocation)
        return allocation

    def begun(self, allocation: SharedAllocation) -> None:
        """It has its blocks. Where it stores none, no event ever will say so."""
        if allocation.begun_at is not None or allocation not in self.pending:
            return
        allocation.begun_at = self._tick()
        if all((self.dense_group, key) in self.order for key in reversed(allocation.keys)):
            self._hear(allocation, len(allocation.keys))

    def ended(self, allocation: SharedAllocation, keys: Sequence[int]) -> None:
        """It is over, and leaves these blocks."""
        if allocation.ended_at is not None:
            return
        allocation.ended_at = self._tick()
        if allocation.begun_at is None:
            allocation.begun_at = allocation.ended_at
        if len(keys) > len(allocation.keys):
            self._untip(allocation)
            allocation.keys = array("Q", keys)
        if allocation in self.running:
            self._finish_if_heard(allocation)

    def forget(self, allocation: SharedAllocation) -> None:
        """It failed, or its events did not come in time."""
        self._tick()
        self._settle(allocation)
        if allocation in self.running:
            self._finish(allocation)

    def _tick(self) -> int:
        self._changes()
        self._clock += 1
        return self._clock

    def _await(self, allocation: SharedAllocation) -> None:
        if allocation.keys:
            allocation.awaited.append(allocation.keys[-1])
            self._awaited.setdefault(allocation.keys[-1], []).append(allocation)

    def _settle(self, allocation: SharedAllocation) -> None:
        """No event of it is due any more."""
        self.pending.pop(allocation, None)
        for key in allocation.awaited:
            waiting = self._awaited[key]
            waiting.remove(allocation)
            if not waiting:
                del self._awaited[key]
        allocation.awaited.clear()

    def _hear(self, allocation: SharedAllocation, found: int) -> None:
        """Its prompt is stored, ``found`` blocks of which were there."""
        self._settle(allocation)
        if allocation.begun_at is None:
            allocation.begun_at = self._tick()
        self.running[allocation] = None
        keys = allocation.keys[: allocation.prompt_blocks]
        for group in self.groups:
            first = self.first_held(group, len(keys))
            for key in keys[first:]:
                self._pin((group, key))
            self._left.append((group, keys[self.first_held(group, found) : first]))
        if keys and allocation.ended_at is None:
            self._tips[keys[-1]] = allocation
        if allocation.ended_at is not None:
            self._finish_if_heard(allocation)

    def _grow(self, allocation: SharedAllocation, start: int) -> None:
        """Its answer has filled the blocks from ``start`` on."""
        for group in self.groups:
            for key in allocation.keys[start:]:
                self._pin((group, key))
            left = allocation.keys[self.first_held(group, start) : self.first_held(group, len(allocation.keys))]
            for key in reversed(left):
                self._unpin((group, key))

    def _finish_if_heard(self, allocation: SharedAllocation) -> None:
        if len(allocation.keys) == allocation.prompt_blocks or (self.dense_group, allocation.keys[-1]) in self.order:
            self._finish(allocation)
        else:
            self.pending[allocation] = None
            self._await(allocation)

    def _finish(self, allocation: SharedAllocation) -> None:
        self._settle(allocation)
        self._untip(allocation)
        del self.running[allocation]
        for group in self.groups:
            for key in reversed(allocation.keys[self.first_held(group, len(allocation.keys)) :]):
                self._unpin((group, key))

    def _untip(self, allocation: SharedAllocation) -> None:
        if allocation.keys and self._tips.get(allocation.keys[-1]) is allocation:
            del self._tips[allocation.keys[-1]]

    def first_held(self, group: int, end: int) -> int:
        """Of a context of so many blocks, the first that a group holds on to."""
        return self.rules[group].first_needed(end) if group in self.rules else 0

    # --- blocks ---------------------------------------------------------------------------------------

    def _pin(self, block: Block) -> None:
        pins = self.pins.get(block, 0)
        self.pins[block] = pins + 1
        if not pins and block not in self.order:
            self._nameless += 1

    def _unpin(self, block: Block) -> None:
        pins = self.pins.pop(block, 0)
        if pins > 1:
            self.pins[block] = pins - 1
        elif block in self.order:
            self.order.move_to_end(block)
        elif pins:
            self._nameless -= 1

    def _changes(self) -> None:
        """Something else than a block of a window group comes."""
        self._forecast = None
        for group, keys in self._left:
            for key in reversed(keys):
                if (group, key) in self.order and (group, key) not in self.pins:
                    self.order.move_to_end((group, key))
        self._left.clear()

    def _enter(self, block: Block) -> None:
        if block in self.order:
            self.order.move_to_end(block)
            return
        self.order[block] = None
        if block in self.pins:
            self._nameless -= 1

    def _leave(self, block: Block) -> None:
        if block in self.order:
            del self.order[block]
            if block in self.pins:
                self._nameless += 1

    # --- events ---------------------------------------------------------------------------------------

    def stored(self, parent: int | None, keys: Sequence[int], *, new: int | None = None) -> None:
        """The rank stored blocks of the dense group behind ``parent``. ``new`` does not matter here."""
        if not keys:
            return
        self._changes()
        for key in reversed(keys):
            self._enter((self.dense_group, key))
        heard = self._awaited and not self._awaited.keys().isdisjoint(keys)
        if heard:
            for at, key in enumerate(keys):
                waiting = self._awaited.get(key)
                if waiting and (key == keys[-1] or waiting[0].ended_at is not None):
                    self._heard_of(waiting[0], at + 1)
        elif parent is not None and (allocation := self._tips.pop(parent, None)) is not None:
            start = len(allocation.keys)
            allocation.keys.extend(keys)
            self._tips[keys[-1]] = allocation
            self._grow(allocation, start)

    def _heard_of(self, allocation: SharedAllocation, stored: int) -> None:
        if allocation in self.running:  # the last of its answer
            self._settle(allocation)
            self._grow(allocation, allocation.prompt_blocks)
            self._finish(allocation)
        else:
            self._hear(allocation, max(0, allocation.prompt_blocks - stored))

    def gained(self, group: int, key: int) -> None:
        """The rank stored a copy of a block of a window group."""
        self._forecast = None
        self._sparse_copies += 1
        self._enter((group, key))

    def lost(self, group: int, key: int, *, is_last: bool) -> None:
        """The rank gave a copy of a block of a window group up."""
        self._changes()
        self._sparse_copies = max(0, self._sparse_copies - 1)
        if is_last:
            self._leave((group, key))

    def removed(self, keys: Sequence[int], *, copies: int) -> None:
        """The rank gave up blocks of the dense group, of which it held so many ``copies`` before."""
        self._changes()
        if copies:
            full = copies + self._sparse_copies + sum(not self.keeps_all.get(group, False) for group in self.rules)
            self._blocks = max(self._blocks or 0, full)  # a window's block that is not kept is held as it is filled
        for key in keys:
            self._leave((self.dense_group, key))

    def cleared(self) -> None:
        """The rank's cache was emptied."""
        self._changes()
        self._sparse_copies = 0
        for block in list(self.order):
            self._leave(block)

    # --- the forecast -----------------------------------------------------------------------------------

    def forecast(self, *, copies: int) -> SharedForecast | None:
        """What will be there, or None where all will. The rank holds so many ``copies`` of the dense group's blocks."""
        if not self.pending or self._blocks is None or len(self.pending) > MAX_PENDING:
            return None
        groups = len(self.groups)
        taken = groups * sum(len(allocation.keys) + 1 for allocation in self.pending)
        room = max(0, self._blocks - copies - self._sparse_copies - self._nameless - groups * len(self.running))
        if room >= taken or taken > MAX_TAKEN:
            return None
        if self._forecast is None:
            self._changes()
            free = self._blocks - len(self.pins) - groups * len(self.running)
            self._forecast = SharedForecast(self, self._due(), room=room, free=free)
        return self._forecast

    def _due(self) -> Iterable[tuple[SharedAllocation, bool]]:
        """The requests of which events are due as they begin, and (True) end: first those that have answered."""
        happened: list[tuple[int, SharedAllocation, bool]] = []
        for allocation in self.pending:
            if allocation.begun_at is not None and allocation not in self.running:
                happened.append((allocation.begun_at, allocation, False))
            if allocation.ended_at is not None:
                happened.append((allocation.ended_at, allocation, True))
        yield from ((allocation, ends) for _, allocation, ends in sorted(happened, key=lambda each: (each[0], each[2])))
        yield from ((allocation, False) for allocation in self.pending if allocation.begun_at is None)


#: What a request takes of either pool.
AnyAllocation = Allocation | SharedAllocation
