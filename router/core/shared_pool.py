"""The blocks of a vLLM whose groups of layers share one pool: full attention beside windows, chunks, recurrent state.

All groups take their blocks from one queue of free ones (``BlockPool``), cached ones in the order in which they were
let go of. A request lets go of what has left a window as it goes on, and of all else as it ends: group by group, of
each its tail first (``KVCacheCoordinator.free``). ``core/shared_forecast`` goes on from here.

How many blocks there are is the worker's word. Where it says none, it is the most that were in use when one had to go.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from router.core.block_queue import Block, BlockQueue, Copy
from router.core.forecast import MAX_PENDING
from router.core.guard import Guard
from router.core.shared_allocation import SharedAllocation, due_of
from router.core.shared_forecast import SharedForecast
from router.core.usable import Rule

#: With more blocks than this to be taken, nothing is foretold: it would take more than a millisecond.
MAX_TAKEN = 1 << 14
_TAG = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class SharedPool:
    """Who uses the blocks of a rank, and in which order it would give them up. Mutated by its owner, on one thread."""

    def __init__(
        self,
        rules: Mapping[int, Rule],
        keeps_all: Mapping[int, bool],
        *,
        dense_group: int,
        block_tokens: int,
        blocks: int | None = None,
        cached: Iterable[int] = (),
        guard: Guard | None = None,
    ) -> None:
        """``rules`` and ``keeps_all`` are of all other groups, ``cached`` the blocks of the dense one."""
        self.rules: dict[int, Rule] = {}
        self.keeps_all = keeps_all
        self.dense_group = dense_group
        self.block_tokens = block_tokens
        self.is_radix = False
        self.guard = guard or Guard()
        #: The groups in the order in which a request takes and frees their blocks.
        self.groups: list[int] = []
        self.queue = BlockQueue(cached)
        self.running: dict[SharedAllocation, None] = {}
        #: Requests of which events are due.
        self.pending: dict[SharedAllocation, None] = {}
        #: For those that bound the work.
        self.forecasts_made = 0
        self._blocks = blocks
        self._is_known = blocks is not None
        self._sparse_copies = 0
        self._entered: dict[Block, Copy] = {}  # by the events of the request of which is being heard
        self._unnamed: dict[Block, tuple[SharedAllocation, int]] = {}  # of that heard of last: names may be to come
        self._states: dict[int, list[Copy]] = {}  # that it has stored
        self._later: list[Callable[[], None]] = []  # once they have; none of them is tried twice
        self._awaited: dict[int, list[SharedAllocation]] = {}
        self._tips: dict[int, SharedAllocation] = {}  # running requests, by their last whole block
        self._clock = 0
        self._forecast: SharedForecast | None = None  # the last that was made
        self._is_fresh = False  # nothing has changed since
        self._foretold: tuple[int, int] = (0, 0)  # what it was made of: room, and blocks that answers had filled
        self._last_sent: list[SharedAllocation] = []  # of which it does not know yet
        self.meet(rules)

    def meet(self, rules: Mapping[int, Rule]) -> None:
        """These are all groups there are beside the dense one, with blocks as large as its."""
        self.rules = {group: replace(rule, stride=1, unit_tokens=self.block_tokens) for group, rule in rules.items()}
        self.groups = sorted((*rules, self.dense_group))
        self._forecast, self._is_fresh = None, False
        for allocation in self.running:
            for group in self.rules.keys() - allocation.tables.keys():
                first = self._hold_nameless(allocation, group)
                blocks = [self.block(group, key) for key in allocation.keys[first : allocation.heard]]
                self._unnamed.update((block, (allocation, at)) for at, block in enumerate(blocks, first))

    def anew(self) -> SharedPool:
        """One like it, of which nothing is known."""
        blocks, dense, size = self._blocks if self._is_known else None, self.dense_group, self.block_tokens
        return SharedPool(self.rules, self.keeps_all, dense_group=dense, block_tokens=size, blocks=blocks)

    @property
    def blocks(self) -> int | None:
        """How many blocks of the dense group there are is not known: the others take from the same."""
        return None

    @property
    def is_moving(self) -> bool:
        """Whether what is there may be gone when the next prompt is scheduled."""
        return bool(self.pending or self.running)

    def tag(self, group: int) -> int:
        """What a group's blocks differ by from the chain keys."""
        return 0 if group == self.dense_group else (group + 1) * _TAG & _MASK

    def block(self, group: int, key: int) -> Block:
        """One number for a group's block."""
        return key ^ self.tag(group)

    def first_held(self, group: int, tokens: int) -> int:
        """Of a context of so many tokens, the first block that a group holds on to."""
        rule = self.rules.get(group)
        return 0 if rule is None else rule.first_held(tokens, block_tokens=self.block_tokens)

    # --- requests -------------------------------------------------------------------------------------

    def sent(self, keys: Sequence[int], *, blocks: int, begun_tokens: int = 1) -> SharedAllocation:
        """A request of so many ``blocks`` in each group is on its way to the rank, the last of which has so many tokens
        of its prompt.
        """
        tokens = (blocks - 1) * self.block_tokens + begun_tokens
        self._clock += 1
        allocation = SharedAllocation(self, array("Q", keys), blocks - 1, tokens, self._clock)
        self.pending[allocation] = None
        self._await(allocation)
        if self._is_fresh:  # it comes after all others
            self._last_sent.append(allocation)
        return allocation

    def begun(self, allocation: SharedAllocation) -> None:
        """It has its blocks. Where it stores none, no event ever will say so."""
        if allocation.begun_at is not None or allocation not in self.pending:
            return
        allocation.begun_at = self._tick()
        if all(key in self.queue for key in reversed(allocation.keys)):
            self._hear(allocation, len(allocation.keys))

    def grows(self, allocation: SharedAllocation, generated: Callable[[], int]) -> None:
        """Its answer has begun; so many tokens are generated by now."""
        allocation.generated = generated

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
        keys, limit = allocation.keys, allocation.prompt_blocks
        for group in self.groups:
            start = min(limit, self.first_held(group, found * self.block_tokens))
            first = max(start, min(limit, self.first_held(group, allocation.prompt_tokens)))
            blocks = [self.block(group, key) for key in keys[start:limit]]
            is_there = found - start
            table = [self.queue.found(block) for block in blocks[:is_there]]
            table += [self._entered.get(block) for block in blocks[is_there:]]
            if self._is_state(group):  # between the states it begins and ends with there is none
                table = [copy for copy in table if copy is not None]
                start, blocks = limit - len(table), []
            for copy in table:
                self.queue.pin(copy)
            allocation.first[group], allocation.tables[group] = start, table
            if group in self.rules:
                places = zip(range(start, limit), blocks, table, strict=False)
                self._unnamed.update((block, (allocation, at)) for at, block, copy in places if copy is None)
            self._later.append(partial(self._let_go, allocation, group, first))
        allocation.heard = limit
        if limit and allocation.ended_at is None:
            self._tips[keys[limit - 1]] = allocation
        if allocation.ended_at is not None:
            self._later.append(partial(self._finish_if_heard, allocation))

    def _grow(self, allocation: SharedAllocation) -> None:
        """Its answer has filled all blocks that it is known to have, and begins the next."""
        keys = allocation.keys
        for group in self.groups:
            for at in range(allocation.heard, len(keys)):
                block = self.block(group, keys[at])
                copy = self._entered.get(block)
                allocation.tables[group].append(copy)
                self.queue.pin(copy)
                if copy is None:
                    self._unnamed[block] = allocation, at
            first = self.first_held(group, len(keys) * self.block_tokens + 1)
            self._later.append(partial(self._let_go, allocation, group, first))
        allocation.heard = len(keys)

    def _let_go(self, allocation: SharedAllocation, group: int, first: int) -> None:
        """It holds a group's blocks from ``first`` on. State is let go of one after the other."""
        table, left = allocation.tables[group], max(0, first - allocation.first[group])
        gone = table[:left] if self._is_state(group) else table[:left][::-1]
        del table[:left]
        allocation.first[group] += left
        for copy in gone:
            self.queue.unpin(copy)
        for copy in self._states.pop(group, ()):
            if copy not in self.queue.pins:
                self.queue.use(copy)

    def _is_state(self, group: int) -> bool:
        return group in self.rules and self.rules[group].is_state

    def _finish_if_heard(self, allocation: SharedAllocation) -> None:
        if len(allocation.keys) == allocation.heard or allocation.keys[-1] in self.queue:
            self._finish(allocation)
        else:
            self.pending[allocation] = None
            self._await(allocation)

    def _finish(self, allocation: SharedAllocation) -> None:
        self._settle(allocation)
        self._untip(allocation)
        del self.running[allocation]
        for group in self.groups:
            for copy in reversed(allocation.tables[group]):
                self.queue.unpin(copy)

    def _untip(self, allocation: SharedAllocation) -> None:
        if allocation.keys and self._tips.get(allocation.keys[-1]) is allocation:
            del self._tips[allocation.keys[-1]]

    def _changes(self) -> None:
        """Something else than a block of a sparse group comes."""
        self._is_fresh = False
        self._settle_later()

    def _settle_later(self) -> None:
        later, self._later = self._later, []
        for what in later:
            what()
        self._unnamed.clear()
        self._states.clear()

    def _hold_nameless(self, allocation: SharedAllocation, group: int) -> int:
        """A running request holds blocks of a group of which no event has told. Returns the first of them."""
        first = min(allocation.heard, self.first_held(group, allocation.heard_tokens(block_tokens=self.block_tokens)))
        held = allocation.heard - first
        allocation.first[group], allocation.tables[group] = first, [None] * held
        self.queue.nameless += held
        return first

    def _enter(self, block: Block) -> Copy:
        copy = self._entered[block] = self.queue.enter(block)
        return copy

    # --- events ---------------------------------------------------------------------------------------

    def stored(self, parent: int | None, keys: Sequence[int], *, new: int | None = None) -> None:
        """The rank stored blocks of the dense group behind ``parent``. ``new`` does not matter here."""
        if not keys:
            return
        self._changes()
        for key in reversed(keys):
            self._enter(key)
        heard = self._awaited and not self._awaited.keys().isdisjoint(keys)
        if heard:
            for at, key in enumerate(keys):
                waiting = self._awaited.get(key)
                if waiting and (key == keys[-1] or waiting[0].ended_at is not None):
                    self._heard_of(waiting[0], at + 1)
        elif parent is not None and (allocation := self._tips.pop(parent, None)) is not None:
            allocation.keys.extend(keys)
            self._tips[keys[-1]] = allocation
            self._grow(allocation)
        self._entered.clear()

    def _heard_of(self, allocation: SharedAllocation, stored: int) -> None:
        if allocation in self.running:  # the last of its answer
            self._settle(allocation)
            self._grow(allocation)
            self._later.append(partial(self._finish, allocation))
        else:
            self._hear(allocation, max(0, allocation.prompt_blocks - stored))

    def gained(self, group: int, key: int) -> None:
        """The rank stored a copy of a block of a sparse group."""
        self._is_fresh = False
        self._sparse_copies += 1
        block = self.block(group, key)
        copy = self._enter(block)
        if self._is_state(group):
            self._states.setdefault(group, []).append(copy)
        elif (place := self._unnamed.pop(block, None)) is not None:
            allocation, at = place
            if at >= allocation.first[group]:
                allocation.tables[group][at - allocation.first[group]] = copy
                self.queue.pins[copy] = 1
                self.queue.nameless -= 1

    def lost(self, group: int, key: int) -> None:
        """The rank gave a copy of a block of a sparse group up."""
        self._changes()
        self._sparse_copies = max(0, self._sparse_copies - 1)
        self.queue.leave(self.block(group, key))

    def lost_twin(self, key: int) -> None:
        """The rank gave up one of several copies of a block of the dense group."""
        self._changes()
        self.queue.leave(key)

    def removed(self, keys: Sequence[int], *, copies: int) -> None:
        """The rank gave up blocks of the dense group, of which it held so many ``copies`` before (0: not known)."""
        self._changes()
        if copies and not self._is_known:
            full = copies + self._sparse_copies + sum(not self.keeps_all.get(group, False) for group in self.rules)
            self._blocks = max(self._blocks or 0, full)  # a sparse group's block is held as it is filled
        for key in keys:
            self.queue.leave(key)

    def cleared(self) -> None:
        """The rank's cache was emptied; what is held is held. It is made anew from the requests: that cannot fail."""
        self._forecast, self._is_fresh = None, False
        self._sparse_copies = 0
        self.queue = BlockQueue()
        self._entered, self._unnamed, self._states, self._later = {}, {}, {}, []
        self._awaited, self._tips = {}, {}
        for allocation in [each for each in self.running if each.ended_at is not None and each not in self.pending]:
            del self.running[allocation]
        for allocation in self.running:
            for group in self.groups:
                self._hold_nameless(allocation, group)
            if allocation.ended_at is None and allocation.keys:
                self._tips[allocation.keys[-1]] = allocation
        for allocation in self.pending:
            allocation.awaited = []
            self._await(allocation)

    # --- the forecast -----------------------------------------------------------------------------------

    def forecast(self, *, copies: int, is_spared: bool = False) -> SharedForecast | None:
        """What will be there, or None where all will. The rank holds so many ``copies`` of the dense group's blocks.

        A pool that ``is_spared`` the work tells what it last knew.
        """
        if self._blocks is None or len(self.pending) > MAX_PENDING:
            return None
        self._settle_later()
        groups = len(self.groups)
        grown = sum(self.unheard_blocks(each) for each in self.running)
        room = self._blocks - copies - self._sparse_copies - self.queue.nameless - groups * len(self.running)
        if not self._is_known:
            room = max(0, room)
        taken = groups * (grown + sum(len(each.keys) + 1 for each in self.pending))
        if room >= taken or taken - room > MAX_TAKEN:
            return None
        if not is_spared and not (self._is_fresh and self._foretold == (room, grown)):
            free = self._blocks - len(self.queue.pins) - groups * len(self.running)
            self._forecast = SharedForecast(
                self,
                due_of(self.pending, self.running, grown=filter(self.unheard_blocks, self.running)),
                room=room,
                free=free,
            )
            self._foretold = room, grown
            self._is_fresh = True
            self.forecasts_made += 1
        elif self._forecast is not None and self._is_fresh:
            for allocation in self._last_sent:
                self._forecast.add(allocation)
        self._last_sent.clear()
        return self._forecast

    def unheard_blocks(self, allocation: SharedAllocation) -> int:
        """How many blocks its answer has filled of which no event has told."""
        return allocation.unheard_blocks(block_tokens=self.block_tokens)
