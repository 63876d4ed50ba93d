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

from router.core.block_queue import BlockQueue
from router.core.forecast import MAX_PENDING
from router.core.guard import Guard
from router.core.shared_allocation import SharedAllocation, due_of
from router.core.shared_forecast import SharedForecast
from router.core.shared_holding import SharedHolding
from router.core.usable import Kind, Rule

#: With more blocks than this to be taken, nothing is foretold: it would take more than a millisecond.
MAX_TAKEN = 1 << 14


class SharedPool(SharedHolding):
    """Who uses the blocks of a rank, and in which order it would give them up. Mutated by its owner, on one thread."""

    def __init__(
        self,
        rules: Mapping[int, Rule],
        segment_tokens: Mapping[int, int],
        *,
        dense_group: int,
        block_tokens: int,
        blocks: int | None = None,
        cached: Iterable[int] = (),
        guard: Guard | None = None,
        recomputed_blocks: int = 0,
    ) -> None:
        """``rules`` and ``segment_tokens`` are of all other groups, ``cached`` the blocks of the dense one.

        Of what a request finds ``recomputed_blocks`` are computed again.
        """
        super().__init__(segment_tokens, dense_group=dense_group, block_tokens=block_tokens, cached=cached)
        self.is_radix = False
        self.guard = guard or Guard()
        self.recomputed_blocks = recomputed_blocks
        #: For those that bound the work.
        self.forecasts_made = 0
        self._blocks = blocks
        self._is_known = blocks is not None
        self._sparse_copies = 0
        self._forecast: SharedForecast | None = None  # the last that was made
        self._is_fresh = False  # nothing has changed since
        self._foretold: tuple[int, int, int] = (0, 0, 0)  # what it was made of: room, free blocks, and those of answers
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
        return SharedPool(
            self.rules,
            self.segment_tokens,
            dense_group=self.dense_group,
            block_tokens=self.block_tokens,
            blocks=self._blocks if self._is_known else None,
            recomputed_blocks=self.recomputed_blocks,
        )

    @property
    def blocks(self) -> int | None:
        """How many blocks of the dense group there are is not known: the others take from the same."""
        return None

    @property
    def is_moving(self) -> bool:
        """Whether what is there may be gone when the next prompt is scheduled."""
        return bool(self.pending or self.running)

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
        """It has its blocks. Where it stores none, no event will say so until one of its answer does."""
        if allocation.begun_at is None and allocation in self.pending:
            allocation.begun_at = self._tick()

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
        if allocation in self.pending and allocation not in self.running and self._stores_none(allocation):
            self._hear(allocation, allocation.prompt_blocks, allocation.prompt_blocks)
            self._settle_later()
        if len(keys) > len(allocation.keys):
            allocation.keys = array("Q", keys)
        if allocation.heard >= allocation.prompt_blocks:
            self._finish_if_heard(allocation)

    def forget(self, allocation: SharedAllocation) -> None:
        """It failed, or its events did not come in time."""
        self._tick()
        self._settle(allocation)
        if allocation in self.running:
            self._finish(allocation)

    def _changes(self) -> None:
        self._is_fresh = False
        super()._changes()

    # --- events ---------------------------------------------------------------------------------------

    def stored(self, parent: int | None, keys: Sequence[int], *, new: int | None = None) -> None:
        """The rank stored blocks of the dense group behind ``parent``. ``new`` does not matter here."""
        if not keys:
            return
        self._changes()
        for key in reversed(keys):
            self._enter(key)
        if self._awaited and not self._awaited.keys().isdisjoint(keys):
            for at, key in enumerate(keys):
                waiting = self._awaited.get(key)
                if waiting and (key == keys[-1] or waiting[0].ended_at is not None):
                    self._heard_of(waiting[0], key, at + 1)
                    self._hear_alike(key)
        elif parent is not None and (end := self._goes_on(self._tip_of(parent), keys)):
            self._hear_more(self._tips[parent], end)
        elif self.pending:
            self._hear_piece(parent, keys)
        self._entered.clear()

    def _tip_of(self, parent: int) -> SharedAllocation | None:
        """The request whose answer goes on behind a block; it may be the first that is told of it."""
        if parent in self._awaited and parent not in self._tips:
            self._hear_alike(parent)
        return self._tips.get(parent)

    def _heard_of(self, allocation: SharedAllocation, key: int, stored: int) -> None:
        prompt_blocks = allocation.prompt_blocks
        if allocation not in self.running:
            self._hear(allocation, max(0, prompt_blocks - stored), prompt_blocks)
        elif allocation.heard < prompt_blocks and key == allocation.keys[prompt_blocks - 1]:
            self._hear_more(allocation, prompt_blocks)
        else:  # the last of its answer
            self._settle(allocation)
            self._hear_more(allocation, len(allocation.keys))

    @staticmethod
    def _goes_on(allocation: SharedAllocation | None, keys: Sequence[int]) -> int:
        """Where in a request's chain blocks end that are stored behind the last that was heard of; 0: it is not its."""
        if allocation is None:
            return 0
        known, end = allocation.keys, allocation.heard + len(keys)
        if allocation.heard == len(known) and allocation.ended_at is None:  # of its answer
            known.extend(keys)
        return end if end <= len(known) and known[end - 1] == keys[-1] else 0

    def gained(self, group: int, key: int) -> None:
        """The rank stored a copy of a block of a sparse group."""
        self._is_fresh = False
        self._sparse_copies += 1
        block = self.block(group, key)
        copy = self._enter(block)
        if (place := self._unnamed.pop(block, None)) is not None:
            allocation, at = place
            if at >= allocation.first[group]:
                allocation.tables[group][at - allocation.first[group]] = copy
                self.queue.pins[copy] = 1
                self.queue.nameless -= 1
        elif (holder := self._states.pop(block, None)) is not None:
            holder.tables[group].append(copy)
            holder.first[group] -= 1
            self.queue.pin(copy)

    def lost(self, group: int, key: int) -> None:
        """The rank gave a copy of a block of a sparse group up."""
        self._changes()
        self._sparse_copies = max(0, self._sparse_copies - 1)
        self._leave((self.block(group, key),))

    def lost_twin(self, key: int) -> None:
        """The rank gave up one of several copies of a block of the dense group."""
        self._changes()
        self._leave((key,))

    def removed(self, keys: Sequence[int], *, copies: int) -> None:
        """The rank gave up blocks of the dense group, of which it held so many ``copies`` before (0: not known)."""
        self._changes()
        if copies and not self._is_known:
            nameless = [group for group, rule in self.rules.items() if rule.kind is Kind.WINDOW]
            nameless = [group for group in nameless if not self.segment_tokens.get(group)]
            full = copies + self._sparse_copies + len(nameless)  # a block of those is held as it is filled
            self._blocks = max(self._blocks or 0, full)
        self._leave(keys)

    def batch_ended(self) -> None:
        """All that the rank told of one step has come."""
        if self._later[0] or self._later[1]:
            self._is_fresh = False
            self._settle_later()

    def cleared(self) -> None:
        """The rank's cache was emptied; what is held is held. It is made anew from the requests: that cannot fail."""
        self._forecast, self._is_fresh = None, False
        self._sparse_copies = 0
        self.queue = BlockQueue()
        self._entered, self._unnamed, self._states, self._later = {}, {}, {}, ([], [])
        self._awaited, self._tips = {}, {}
        for allocation in [each for each in self.running if each.ended_at is not None and each not in self.pending]:
            del self.running[allocation]
        for allocation in self.running:
            for group in self.groups:
                self._hold_nameless(allocation, group)
            if allocation.ended_at is None and allocation.heard:
                self._tips[allocation.keys[allocation.heard - 1]] = allocation
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
        groups, begun = len(self.groups), sum(map(self.begun_blocks, self.running))
        grown = sum(self.unheard_blocks(each) for each in self.running)
        room = self._blocks - copies - self._sparse_copies - self.queue.nameless - begun
        if not self._is_known:
            room = max(0, room)
        taken = groups * (grown + sum(len(each.keys) + 1 for each in self.pending))
        if room >= taken or taken - room > MAX_TAKEN:
            return None
        made_of = room, self._blocks - len(self.queue.pins) - begun, grown
        if not is_spared and not (self._is_fresh and self._foretold == made_of):
            self._foretold = made_of
            self._forecast = self._foretell()
            self._is_fresh = True
        elif self._forecast is not None and self._is_fresh:
            for allocation in self._last_sent:
                self._forecast.add(allocation)
        self._last_sent.clear()
        return self._forecast

    def step_after(self, forecast: SharedForecast) -> SharedForecast | None:
        """What will be there one step later than by a forecast that was just given; None if that was not made anew."""
        if not self._is_fresh:
            return None
        if forecast.later is None:
            forecast.later = self._foretell()
            forecast.later.go_on(forecast.steps + 1)
        return forecast.later

    def _foretell(self) -> SharedForecast:
        self.forecasts_made += 1
        due = due_of(self.pending, self.running, grown=filter(self.unheard_blocks, self.running))
        room, free, _ = self._foretold
        return SharedForecast(self, due, room=room, free=free)

    def unheard_blocks(self, allocation: SharedAllocation) -> int:
        """How many blocks it has, or is about to have, of which no event has told."""
        return allocation.unheard_blocks(block_tokens=self.block_tokens)
