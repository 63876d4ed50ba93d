"""Which blocks of a shared pool (``core/shared_pool``) requests hold on to, as far as events have told.

A request is heard of as its prompt is stored: in one piece, or in several where it is computed in several steps. From
then on it holds what it found and what it stored, until windows and chunks have passed, or it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

from router.core.block_queue import Block, BlockQueue, Copy
from router.core.shared_allocation import SharedAllocation
from router.core.usable import Rule

#: Of those sent first so many may have the first piece of their prompt stored.
MOST_IN_PIECES = 4
_TAG = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class SharedHolding:
    """The queue of cached blocks, and the requests that hold some. Mutated by its owner, on one thread."""

    def __init__(
        self, segment_tokens: Mapping[int, int], *, dense_group: int, block_tokens: int, cached: Iterable[int] = ()
    ) -> None:
        """``segment_tokens`` is of all other groups than the dense one, of which ``cached`` are."""
        self.rules: dict[int, Rule] = {}
        self.segment_tokens = segment_tokens
        self.dense_group = dense_group
        self.block_tokens = block_tokens
        #: The groups in the order in which a request takes and frees their blocks.
        self.groups: list[int] = []
        self.queue = BlockQueue(cached)
        self.recomputed_blocks = 0
        self.running: dict[SharedAllocation, None] = {}
        #: Requests of which events are due.
        self.pending: dict[SharedAllocation, None] = {}
        self._entered: dict[Block, Copy] = {}  # by the events of the request of which is being heard
        self._unnamed: dict[Block, tuple[SharedAllocation, int]] = {}  # of that heard of last: names may be to come
        self._states: dict[Block, SharedAllocation] = {}  # that it may store, of those
        #: What is left with the next step, and with the one after it; none of it is tried twice.
        self._later: tuple[list[Callable[[], None]], list[Callable[[], None]]] = [], []
        self._awaited: dict[int, list[SharedAllocation]] = {}
        self._tips: dict[int, SharedAllocation] = {}  # running requests, by the last block that was heard of
        self._clock = 0

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

    def is_state(self, group: int) -> bool:
        """Whether a group's blocks are states, of which a request goes on from the last alone."""
        return group in self.rules and self.rules[group].is_state

    def begun_blocks(self, allocation: SharedAllocation) -> int:
        """How many blocks a running request has that are not full: one in each group, but for steps that end with a
        block, where state is kept.
        """
        is_between = allocation.heard < allocation.prompt_blocks and any(map(self.is_state, self.groups))
        return 0 if is_between else len(self.groups)

    # --- events that are due --------------------------------------------------------------------------

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

    def _stores_none(self, allocation: SharedAllocation) -> bool:
        """Whether all of its prompt is there, for every group: nothing of it is stored, or told of.

        Where a prompt ends with a block, that block is stored once more, since the last token is always computed; with
        EAGLE the last that was found is.
        """
        keys, end = allocation.keys, allocation.prompt_blocks
        if keys and (self.recomputed_blocks or allocation.prompt_tokens % self.block_tokens == 0):
            return False
        firsts = ((group, self.rules[group].first_needed(end) if group in self.rules else 0) for group in self.groups)
        return all(self.block(group, key) in self.queue for group, at in firsts for key in reversed(keys[at:end]))

    def _hear_alike(self, key: int) -> None:
        """Those that have begun, too, and found all of it."""
        for each in [*self._awaited.get(key, ())]:
            if each.begun_at is not None and each not in self.running and self._stores_none(each):
                self._hear(each, each.prompt_blocks, each.prompt_blocks)

    def _hear_piece(self, parent: int | None, keys: Sequence[int]) -> None:
        """The first piece of a prompt, perhaps, that is computed in several steps."""
        for allocation in islice((each for each in self.pending if each not in self.running), MOST_IN_PIECES):
            try:
                start = 0 if parent is None else 1 + allocation.keys.index(parent)
            except ValueError:
                continue
            end = start + len(keys)
            if end < allocation.prompt_blocks and allocation.keys[end - 1] == keys[-1]:
                self._hear(allocation, start, end)
                return

    # --- what is held ---------------------------------------------------------------------------------

    def _hear(self, allocation: SharedAllocation, found: int, end: int) -> None:
        """Its prompt is stored up to block ``end``, ``found`` blocks of which were there."""
        if allocation.begun_at is None:
            self._clock += 1
            allocation.begun_at = self._clock
        self.running[allocation] = None
        for group in self.groups:
            start = min(end, self.first_held(group, found * self.block_tokens))
            if self.is_state(group):
                states = map(self.queue.found, [self.block(group, key) for key in allocation.keys[start:found]])
                allocation.tables[group] = [copy for copy in states if copy is not None]
                for copy in allocation.tables[group]:
                    self.queue.pin(copy)
                self._hear_state(allocation, group, found, end)
                continue
            blocks = [self.block(group, key) for key in allocation.keys[start:end]]
            is_there = found - start
            table = [self.queue.found(block) for block in blocks[:is_there]]
            table += [self._entered.get(block) for block in blocks[is_there:]]
            for copy in table:
                self.queue.pin(copy)
            allocation.first[group], allocation.tables[group] = start, table
            if group in self.rules:
                places = zip(range(start, end), blocks, table, strict=False)
                self._unnamed.update((block, (allocation, at)) for at, block, copy in places if copy is None)
        self._heard(allocation, found, end)

    def _hear_more(self, allocation: SharedAllocation, end: int) -> None:
        """Another piece of its prompt is stored, or its answer has filled blocks and begins the next."""
        is_prompt = allocation.heard < allocation.prompt_blocks
        for group in self.groups:
            table = allocation.tables[group]
            if is_prompt and self.is_state(group):
                self._hear_state(allocation, group, allocation.heard, end)
                continue
            for at in range(allocation.heard, end):
                block = self.block(group, allocation.keys[at])
                copy = self._entered.get(block)
                table.append(copy)
                self.queue.pin(copy)
                if copy is None:
                    self._unnamed[block] = allocation, at
        self._heard(allocation, allocation.heard, end)

    def _hear_state(self, allocation: SharedAllocation, group: int, start: int, end: int) -> None:
        """What is computed from block ``start`` to ``end`` leaves a state there, which may be told of next. Between it
        and the one before there is none.
        """
        table = allocation.tables[group]
        if start < end:
            block = self.block(group, allocation.keys[end - 1])
            if (copy := self._entered.get(block)) is None:
                self._states[block] = allocation
            else:
                table.append(copy)
                self.queue.pin(copy)
        allocation.first[group] = end - len(table)

    def _heard(self, allocation: SharedAllocation, start: int, end: int) -> None:
        """With its next step it lets go of what it has left. A prompt whose last state is kept has one more step."""
        soon, after = self._later
        steps = [(soon, end * self.block_tokens + (end > allocation.prompt_blocks))]
        if end == allocation.prompt_blocks:
            self._settle(allocation)
            ends_inside = start < end and allocation.prompt_tokens % self.block_tokens > 0
            if ends_inside and any(map(self.is_state, self.groups)):
                steps.append((after, allocation.prompt_tokens))
            else:
                steps = [(soon, allocation.prompt_tokens)]
        for step, tokens in steps:
            for group in self.groups:
                step.append(partial(self._let_go, allocation, group, self.first_held(group, tokens)))
        self._untip(allocation)
        allocation.heard = end
        if end:
            self._tips[allocation.keys[end - 1]] = allocation
        if allocation.ended_at is not None and end >= allocation.prompt_blocks:
            after.append(partial(self._finish_if_heard, allocation))

    def _let_go(self, allocation: SharedAllocation, group: int, first: int) -> None:
        """It holds a group's blocks from ``first`` on. State is let go of one after the other."""
        table, left = allocation.tables[group], max(0, first - allocation.first[group])
        gone = table[:left] if self.is_state(group) else table[:left][::-1]
        del table[:left]
        allocation.first[group] += left
        for copy in gone:
            self.queue.unpin(copy)

    def _finish_if_heard(self, allocation: SharedAllocation) -> None:
        if allocation not in self.running:
            return
        if len(allocation.keys) == allocation.heard or allocation.keys[-1] in self.queue:
            self._finish(allocation)
        elif allocation not in self.pending:
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
        if allocation.heard and self._tips.get(tip := allocation.keys[allocation.heard - 1]) is allocation:
            del self._tips[tip]

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

    def _leave(self, blocks: Iterable[Block]) -> None:
        """A copy of each is given up: what was entered before is no part of what is heard of next."""
        self._entered.clear()
        for block in blocks:
            self.queue.leave(block)

    # --- the order of what happens ----------------------------------------------------------------------

    def _tick(self) -> int:
        self._changes()
        self._settle_later()
        self._clock += 1
        return self._clock

    def _changes(self) -> None:
        """Something else than a block of a sparse group comes."""
        self._unnamed.clear()
        self._states.clear()

    def _settle_later(self) -> None:
        """All that was scheduled in one step has gone on, in each step one request after the other."""
        later, self._later = self._later, ([], [])
        for step in later:
            for what in step:
                what()
