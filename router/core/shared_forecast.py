"""What of a prompt will still be there in a full vLLM whose groups of layers share one pool of blocks.

Requests of which no event has come are gone through as the engine would: those that have answered in the order in
which they did, then those that wait. Each touches what it finds in all groups, takes blocks of every group for the
rest, never cached ones first, and lets go of what has left its windows one step later. A request that does not fit
waits until those before it have done that, then until one ends: the one that runs longest is taken to be it.

Where groups keep recurrent state a prompt is computed in steps that end where state is kept, and others are scheduled
between them. From state that another computes in the same step a request cannot go on: it waits for the next.

The pool numbers its cached blocks in the order in which it would give them up, so that what has been given up is known
by one number, the ``front``. Along a chain those numbers fall, as a request lets go of its tail first: where a chain
breaks off is found by halving. So a request costs little more than what its windows hold, however long it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.core.block_queue import HELD, Copy, Tail
from router.core.foretold_queue import ForetoldQueue
from router.core.recency import common_blocks
from router.core.shared_allocation import Due, SharedAllocation
from router.core.usable import Mask, boundary, resumed_behind

if TYPE_CHECKING:
    from router.core.shared_pool import SharedPool


@dataclass(slots=True, eq=False)
class _Run:
    """A request that runs. Of the dense group it holds the first ``length`` blocks, of which ``found`` were there, and
    one that is begun; of each other group ``tables`` from block ``first`` on, None for what is not cached.

    ``stops`` are the blocks that the steps of its prompt which are to come end with, ``ends`` those behind which it
    leaves what it takes to go on. ``has_begun``: the first block that is to come is there.
    """

    allocation: SharedAllocation
    found: int
    length: int
    tables: dict[int, list[Copy | None]]
    first: dict[int, int]
    stops: list[int] = field(default_factory=list)
    ends: Set[int] = frozenset()
    has_begun: bool = False
    is_heard: bool = False
    is_prefilled: bool = False


class SharedForecast(ForetoldQueue):
    """A pool once all requests under way have their blocks. Good as long as nothing changes in the pool."""

    def __init__(self, pool: SharedPool, due: Iterable[tuple[SharedAllocation, Due]], *, room: int, free: int) -> None:
        super().__init__(pool, room=room, free=free)
        self._runs: dict[SharedAllocation, _Run] = {}
        self._over: list[_Run] = []
        self._fresh: set[Copy | None] = set()  # states that are computed in the step that is gone through
        self._waiting_to_end = deque(pool.running)
        #: The same some steps later, once it was asked for.
        self.steps = 0
        self.later: SharedForecast | None = None
        self._take(0)
        for allocation, what in due:
            match what:
                case Due.BEGINS:
                    self.add(allocation)
                case Due.GROWS:
                    self._fill(self._known(allocation))
                case Due.ENDS:
                    self._end(allocation)

    # --- what will be there -----------------------------------------------------------------------------

    def mask(self, group: int, now: Mask, promised: Mask, *, bit: int) -> Mask:
        """Which blocks of another group than the dense one will be there, as ``bit``; of those that nothing is known of
        here it is as ``now``, or as ``promised``.
        """
        pool, front, lost, named = self._pool, self._front.number, self._lost, self._named
        order, twins, tag = pool.queue.order, pool.queue.twins, pool.tag(group)

        def held(key: int) -> int | None:
            block = key ^ tag
            number = order.get(block)
            if number is None and block not in twins and block not in named:
                return (now(key) or 0) | (promised(key) or 0)
            is_left = number is not None and number >= front and block not in lost
            return bit if is_left or self._found(block) is not None else 0

        return held

    def unkept(self, keys: Sequence[int], depth: int, promised: Mask) -> Mask:
        """What is promised of a prompt's first ``depth`` blocks and not computed yet: what requests that were gone
        through leave of theirs is known, which may be other blocks than they were sent for.
        """
        known: frozenset[int] | None = None

        def held(key: int) -> int | None:
            nonlocal known
            if not (mask := promised(key)):
                return None
            if known is None:
                known = frozenset(keys[: self._covered(keys, depth)])
            return None if key in known else mask

        return held

    def depth(self, keys: Sequence[int], depth: int) -> int:
        """How many of the first ``depth`` blocks of the dense group will be there."""
        number, front = self._pool.queue.number, self._front.number
        start = self._covered(keys, depth)
        end = bisect_left(range(depth), True, lo=start, key=lambda at: 0 < number(keys[at]) < front)
        return self._cut_lost(keys, end)

    def comes_too_soon(self, keys: Sequence[int], found: int) -> bool:
        """Whether a prompt that finds so many blocks has to wait for the next step, as it needs state of this one."""
        states = [group for group, rule in self._pool.rules.items() if rule.is_state]
        last = [self._pool.block(group, key) for group in states for key in keys[max(0, found - 1) : found]]
        return not self._fresh.isdisjoint(map(self._found, last))

    def go_on(self, steps: int) -> None:
        """So many steps are done."""
        self.steps = steps
        for _ in range(steps):
            self._wait()

    def _known(self, allocation: SharedAllocation) -> _Run:
        """A request that has been heard of."""
        if (known := self._runs.get(allocation)) is not None:
            return known
        pool = self._pool
        heard = allocation.heard
        tables = {
            group: [copy if copy in pool.queue.order else None for copy in allocation.tables[group]]
            for group in pool.rules
        }
        if pool.begun_blocks(allocation):
            for table in tables.values():
                table.append(None)
        run = _Run(allocation, heard, heard, tables, dict(allocation.first), is_heard=True, is_prefilled=True)
        if heard < allocation.prompt_blocks:
            run.ends = self._places(allocation) - {heard}
            run.stops, run.is_prefilled = self._stops(allocation, run.ends), False
            run.has_begun = pool.begun_blocks(allocation) > 0
        self._runs[allocation] = run
        return run

    def _covered(self, keys: Sequence[int], limit: int) -> int:
        """How many of a chain's first blocks requests that were gone through hold, or did as they ended."""
        runs = (*self._runs.values(), *self._over)
        return max((common_blocks(keys, run.allocation.keys, min(limit, run.length)) for run in runs), default=0)

    def _cut_lost(self, keys: Sequence[int], end: int) -> int:
        if not self._lost:
            return end
        return next((at for at in range(end) if keys[at] in self._lost), end)

    def _known_prefix(self, keys: Sequence[int], limit: int) -> int:
        """Of a prompt's first blocks so many are cached."""
        number, front = self._pool.queue.number, max(1, self._front.number)
        start = self._covered(keys, limit)
        end = bisect_left(range(limit), True, lo=start, key=lambda at: number(keys[at]) < front)
        return self._cut_lost(keys, end)

    # --- requests -------------------------------------------------------------------------------------

    def add(self, allocation: SharedAllocation) -> None:
        """Another request gets its blocks, after all that were gone through."""
        self.later = None
        pool = self._pool
        for run in self._runs.values():
            begun_at = run.allocation.begun_at
            if begun_at is not None and begun_at < allocation.sent_at:
                self._slide(run)
        keys, size = allocation.keys, pool.block_tokens
        blocks, most = -(-allocation.prompt_tokens // size), (allocation.prompt_tokens - 1) // size
        while True:
            masks = {group: self.mask(group, _nowhere, _nowhere, bit=1) for group in pool.rules}
            again = pool.recomputed_blocks
            known = self._known_prefix(keys, min(most + again, len(keys)))
            found = boundary(keys, known, bit=1, groups=masks, rules=pool.rules, recomputed=again)
            first = {group: pool.first_held(group, found * size) for group in pool.rules}
            held = {
                group: [copy for key in keys[first[group] : found] if (copy := self._found(pool.block(group, key)))]
                for group in pool.rules
            }
            idle = sum(not self._pins_of(copy) for copies in held.values() for copy in copies)
            tails = self._tails_of(keys, found)
            span = self._idle_span(keys, found)
            idle += span.stop - span.start + sum(stop - tail.start for tail, stop in tails)
            ends = (self._places(allocation) | {max(known - again, found)}) - {found}
            states = [group for group, rule in pool.rules.items() if rule.is_state]
            new = len(states) + (len(pool.groups) - len(states)) * (blocks - found)
            if any(copy in self._fresh for group in states for copy in held[group]) and self._wait():
                continue  # state can be gone on from one step after it was computed
            if idle + new <= self._free or not self._wait():
                break
        if span.start < span.stop:
            self._spans.append(span)
            self._free -= span.stop - span.start
        for tail, stop in tails:
            self._free -= stop - tail.start
            tail.start = stop
            if tail.start == tail.stop:
                del self._tail[tail]
        for copies in held.values():
            for copy in copies:
                self._pin(copy)
        run = _Run(allocation, found, found, {group: [*copies] for group, copies in held.items()}, first)
        run.stops, run.ends = self._stops(allocation, ends), ends
        self._runs[allocation] = run
        self._waiting_to_end.append(allocation)
        self._advance(run)
        if allocation.begun_at is not None:
            while run.stops:
                self._advance(run)
            if allocation.generated is not None:
                self._fill(run)

    def _places(self, allocation: SharedAllocation) -> Set[int]:
        """Behind how many of its prompt's blocks others will go on."""
        pool, tokens = self._pool, allocation.prompt_tokens
        has_state = any(rule.is_state for rule in pool.rules.values())
        same, longer = (tokens - 1) // pool.block_tokens, tokens // pool.block_tokens
        return resumed_behind(same, longer, is_eagle=pool.recomputed_blocks > 0, is_state=has_state)

    def _stops(self, allocation: SharedAllocation, ends: Set[int]) -> list[int]:
        """The blocks that the steps of a prompt end with: of one step, but where state is kept."""
        last = allocation.prompt_blocks
        if not any(rule.is_state for rule in self._pool.rules.values()):
            return [last]
        is_left = last in ends and allocation.prompt_tokens % self._pool.block_tokens > 0
        return [*sorted({*ends, last}), *([last] if is_left else [])]

    def _advance(self, run: _Run) -> None:
        """The next step of its prompt: it lets go of what it has left, and takes the blocks of what is computed."""
        pool, allocation, size = self._pool, run.allocation, self._pool.block_tokens
        keys, start, stop = allocation.keys, run.length, run.stops.pop(0)
        if start > run.found:
            self._let_go_of_left(run, start * size)
        begun = not run.stops and allocation.prompt_tokens % size > 0
        states = sum(rule.is_state for rule in pool.rules.values())
        self._take(states + (len(pool.groups) - states) * (stop - start + begun) - len(pool.groups) * run.has_begun)
        self._lost.difference_update(keys[start:stop])
        run.length = stop
        for group, rule in pool.rules.items():
            kept = rule.kept(start, stop, ends=run.ends, segment_tokens=pool.segment_tokens.get(group, 0))
            if rule.is_state:  # between the states it begins and ends with there is none
                kept = [at for at in kept if at + 1 == stop]
            copies = self._name([pool.block(group, keys[at]) for at in kept])
            last = stop + begun
            first = last - 1 if rule.is_state else start
            taken: list[Copy | None] = [None] * (last - first)
            for at, copy in zip(kept, copies, strict=True):
                taken[at - first] = copy
            if run.has_begun:
                run.tables[group].pop()
            run.tables[group] += taken
            if rule.is_state:
                run.first[group] = last - len(run.tables[group])
                self._fresh.update(copies)
        run.has_begun = False

    def _wait(self) -> bool:
        """What an engine does until there is more room. False: nothing more will come of it."""
        begun = [run for run in self._runs.values() if not run.is_prefilled]
        self._fresh.clear()
        if begun:
            for run in begun:
                if run.stops:
                    self._advance(run)
                else:
                    self._slide(run)
            return True
        if self._waiting_to_end:
            self._end(self._waiting_to_end[0])
            return True
        return False

    def _slide(self, run: _Run) -> None:
        """All steps of a prompt are done, and the next one comes."""
        if run.is_prefilled:
            return
        while run.stops:
            self._advance(run)
        run.is_prefilled = True
        self._fresh.difference_update(*run.tables.values())
        self._let_go_of_left(run, run.allocation.prompt_tokens)
        if run.allocation.prompt_tokens % self._pool.block_tokens == 0:
            self._take(len(self._pool.groups))
            for table in run.tables.values():
                table.append(None)

    def _let_go_of_left(self, run: _Run, tokens: int) -> None:
        """So many tokens are computed: windows let go of what they have left."""
        for group, rule in self._pool.rules.items():
            left = max(0, self._pool.first_held(group, tokens) - run.first[group])
            table = run.tables[group]
            gone, run.tables[group] = table[:left], table[left:]
            run.first[group] += len(gone)
            self._let_go(gone if rule.is_state else gone[::-1])

    def _fill(self, run: _Run) -> None:
        """Its answer fills blocks of which nobody has heard the names yet, or its prompt goes on."""
        if run.stops and run.allocation.generated is None:
            self._advance(run)
            return
        self._slide(run)
        for _ in range(run.allocation.unheard_answer(block_tokens=self._pool.block_tokens)):
            run.length += 1
            self._begin_block(run)

    def _begin_block(self, run: _Run) -> None:
        self._let_go_of_left(run, run.length * self._pool.block_tokens + 1)
        self._take(len(self._pool.groups))
        for table in run.tables.values():
            table.append(None)

    def _end(self, allocation: SharedAllocation) -> None:
        """It fills the blocks of its answer, as far as they are known, and ends."""
        pool, keys = self._pool, allocation.keys
        if allocation not in self._waiting_to_end:  # what did not fit
            return
        self._waiting_to_end.remove(allocation)
        run = self._known(allocation)
        self._slide(run)
        while run.length < len(keys):
            for group, rule in pool.rules.items():
                segment_tokens = pool.segment_tokens.get(group, 0)
                if rule.kept(run.length, run.length + 1, ends=(), segment_tokens=segment_tokens):
                    run.tables[group][-1] = self._name([pool.block(group, keys[run.length])])[0]
            run.length += 1
            self._begin_block(run)
        del self._runs[allocation]
        for group in pool.groups:
            if group in pool.rules:
                self._let_go(run.tables[group][::-1])
            else:
                self._let_go_of_chain(run)
        self._over.append(run)

    def _let_go_of_chain(self, run: _Run) -> None:
        """Of the dense group all goes that nobody else holds."""
        keys = run.allocation.keys
        length = min(run.length, len(keys))
        others = [
            common_blocks(keys, other.allocation.keys, min(length, other.length)) for other in self._runs.values()
        ]
        held = max(others, default=0)
        over = [common_blocks(keys, other.allocation.keys, length) for other in self._over if other.is_heard]
        pins = self._pool.queue.pins
        held = bisect_left(
            range(length),
            True,
            lo=held,
            key=lambda at: pins.get(keys[at], 0) <= run.is_heard + sum(count > at for count in over),
        )
        nameless = 1 + run.length - length
        self._room += nameless
        self._free += nameless + length - held
        if held < length:
            self._tail[Tail(keys, held, length)] = None

    # --- blocks of the dense group ------------------------------------------------------------------------

    def _idle_span(self, keys: Sequence[int], found: int) -> Tail:
        """Of a prompt's first ``found`` blocks those that nobody uses, or has touched: they are behind the others."""
        pool = self._pool
        touched = max((common_blocks(keys, span.keys, min(found, span.stop)) for span in self._spans), default=0)
        start = bisect_left(range(found), True, lo=touched, key=lambda at: pool.queue.number(keys[at]) < HELD)
        front = max(1, self._front.number)
        return Tail(
            keys, start, bisect_left(range(found), True, lo=start, key=lambda at: pool.queue.number(keys[at]) < front)
        )

    def _tails_of(self, keys: Sequence[int], found: int) -> list[tuple[Tail, int]]:
        """What had been let go of and is touched, up to which block."""
        tails: list[tuple[Tail, int]] = []
        for tail in self._tail:
            if isinstance(tail, Tail):
                stop = common_blocks(keys, tail.keys, min(found, tail.stop))
                if stop > tail.start:
                    tails.append((tail, stop))
        return tails


def _nowhere(key: int) -> None:
    """Nobody has the block."""
