"""The forecast for groups that share a pool against an engine that keeps every block: vLLM's queue of free blocks, and
what its managers of windows, chunks, recurrent state and full attention do with it, without anything clever.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from router.core.forecast import Pool
from router.core.index import PrefixIndex
from router.core.provisional import Ticket
from router.core.shared_allocation import SharedAllocation
from router.core.shared_pool import SharedPool
from router.core.usable import Geometry
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored, Event
from tests.unit.core.late_events import CONVERSATIONS, PROMPTS, LateEventsMachine

BLOCK = 2

#: A block's group and the prefix it stands for.
Name = tuple[int, str]
#: A group's kind, and the blocks of its window or chunk.
Group = tuple[str, int]
#: All chunks are of so many blocks.
CHUNK = 3
WINDOW_GROUPS = st.integers(1, 3).map(lambda blocks: ("sliding_window", blocks))
GROUPS = st.one_of(WINDOW_GROUPS, st.sampled_from([("mamba", 1), ("chunked_local_attention", CHUNK)]))
FULL = ("full_attention", 0)


@dataclass
class Running:
    """A request's blocks in each group, by number, None for those a window has left; the last one is begun.

    ``stops`` are the blocks with which the steps of its prompt end that are to come, ``ends`` where state is kept.
    """

    text: str
    tables: dict[int, list[int | None]]
    found: int
    stops: list[int]
    ends: set[int]


class Full(Exception):
    """A step of a prompt finds no room: an engine would put some request off."""


@dataclass
class Engine:
    """The last group is full attention. ``free`` is in the order in which blocks are taken.

    ``keeps_all``: windows cache every block, or only what lies before a prompt's end and before the end of what full
    attention alone had. State is kept where the prompt ends, and where full attention alone had it up to: with
    these places steps end. From state that is computed in a step another request goes on in the next.
    """

    blocks: int
    kinds: list[Group]
    keeps_all: bool
    free: list[int] = field(init=False)
    names: dict[int, Name] = field(default_factory=dict)
    cached: dict[Name, list[int]] = field(default_factory=dict)  # oldest copy first
    held: Counter[int] = field(default_factory=Counter)
    events: list[list[Event]] = field(default_factory=lambda: [[]])  # of each step
    stepping: list[Running] = field(default_factory=list)  # whose prompts are not computed yet
    fresh: set[int] = field(default_factory=set)  # state that is computed in this step

    def __post_init__(self) -> None:
        self.free = list(range(self.blocks))

    @property
    def groups(self) -> range:
        return range(len(self.kinds))

    def first_held(self, group: int, end: int) -> int:
        """For what follows a prompt's first ``end`` blocks."""
        kind, blocks = self.kinds[group]
        match kind:
            case "full_attention":
                return 0
            case "chunked_local_attention":
                return end // blocks * blocks
            case _:
                return max(0, end - blocks)

    def is_state(self, group: int) -> bool:
        return self.kinds[group][0] == "mamba"

    def known(self, prompt: str) -> int:
        """Of full attention alone."""
        dense = len(self.kinds) - 1
        ends = range(1, len(prompt) + 1)
        return next((end - 1 for end in ends if (dense, prompt[:end]) not in self.cached), len(prompt))

    def hit(self, prompt: str) -> int:
        """The longest prefix of which every group has what it takes to go on."""
        return max(
            end
            for end in range(self.known(prompt) + 1)
            if all(
                (group, prompt[: at + 1]) in self.cached
                for group in self.groups
                for at in range(self.first_held(group, end), end)
            )
        )

    def hit_in_time(self, prompt: str) -> int:
        """What is found once nothing that it needs is computed in this very step."""
        while True:
            found = self.hit(prompt)
            states = [self.cached[group, prompt[:found]][0] for group in self.groups if found and self.is_state(group)]
            if self.fresh.isdisjoint(states):
                return found
            self.step()

    def schedule(self, prompt: str) -> Running | None:
        """The first step of a prompt; None if there are not enough blocks for it and one more that is generated."""
        found, known = self.hit_in_time(prompt), self.known(prompt)
        tables: dict[int, list[int | None]] = {
            group: [
                None if at < self.first_held(group, found) else self.cached[group, prompt[: at + 1]][0]
                for at in range(found)
            ]
            for group in self.groups
        }
        touched = [block for table in tables.values() for block in table if block is not None]
        ends = {len(prompt), max(known, found)} - {found}
        new = sum(1 if self.is_state(group) else len(prompt) - found + 1 for group in self.groups)
        if len(self.free) - len([block for block in touched if block in self.free]) < new:
            return None
        self.free = [block for block in self.free if block not in touched]
        self.held.update(touched)
        stops = [len(prompt)]
        if any(map(self.is_state, self.groups)):
            stops = [*sorted({*ends, len(prompt)}), *([len(prompt)] if len(prompt) in ends else [])]
        running = Running(prompt, tables, found, stops, ends)
        self.stepping.append(running)
        self.advance(running)
        return running

    def advance(self, running: Running) -> None:
        """The next step of a prompt; with the last one a block is begun."""
        prompt, start, stop = running.text, len(running.tables[len(self.kinds) - 1]), running.stops.pop(0)
        if start > running.found:
            self.leave(running, start, upto=start - 1)
        last = stop + (not running.stops)
        new = {group: range(last - 1 if self.is_state(group) else start, last) for group in self.groups}
        if len(self.free) < sum(map(len, new.values())):
            raise Full
        for group, table in running.tables.items():
            table += [None] * (new[group].start - len(table)) + [self.take() for _ in new[group]]
        for group in self.groups:
            kept = [
                at
                for at in range(start, stop)
                if at in new[group]
                and (self.keeps(group) or any(self.first_held(group, end) <= at < end for end in running.ends))
            ]
            self.store(running, group, start, kept, end=stop)
            if self.is_state(group):
                self.fresh.update(running.tables[group][at] or 0 for at in kept)
        assert prompt == running.text

    def keeps(self, group: int) -> bool:
        kind, _ = self.kinds[group]
        return kind in ("full_attention", "chunked_local_attention") or (kind == "sliding_window" and self.keeps_all)

    def take(self) -> int:
        block = self.free.pop(0)
        self.held[block] = 1
        if (name := self.names.pop(block, None)) is not None:
            self.cached[name].remove(block)
            if not self.cached[name]:
                del self.cached[name]
            self.events[-1].append(BlockRemoved((name_of(name[1]),), group=name[0]))
        return block

    def store(self, running: Running, group: int, start: int, kept: list[int], *, end: int) -> None:
        text = running.text[:end]
        if start == len(text):
            return
        for at in kept:
            block = running.tables[group][at]
            assert block is not None
            self.names[block] = (group, text[: at + 1])
            self.cached.setdefault((group, text[: at + 1]), []).append(block)
        kind, blocks = self.kinds[group]
        self.events[-1].append(
            BlockStored(
                tuple(name_of(text[: at + 1]) for at in kept),
                name_of(text[:start]) if start else None,
                tokens_of(text)[BLOCK * start :],
                BLOCK,
                group=group,
                kind=kind,
                window_tokens=BLOCK * blocks + 1 if kind == "sliding_window" else None,
            )
        )

    def step(self) -> None:
        """The step is done, and the next one comes."""
        self.fresh.clear()
        self.events.append([])
        for running in [*self.stepping]:
            if running.stops:
                self.advance(running)
            else:
                self.slide(running)
                self.stepping.remove(running)

    def slide(self, running: Running) -> None:
        """All of a text is computed, and what comes next is."""
        self.leave(running, len(running.text), upto=len(running.text))

    def leave(self, running: Running, end: int, *, upto: int) -> None:
        """Windows let go of what they have left: of state one after the other, of all else the last first."""
        for group in self.groups:
            table, first = running.tables[group], upto if self.is_state(group) else self.first_held(group, end)
            self.let_go(table[:first] if self.is_state(group) else table[:first][::-1])
            table[:first] = [None] * first

    def answer(self, running: Running, letter: str) -> None:
        """The block begun is full; the next is begun."""
        at = len(running.text)
        running.text += letter
        for group in self.groups:
            self.store(running, group, at, [at] if self.keeps(group) else [], end=at + 1)
        self.slide(running)
        for table in running.tables.values():
            table.append(self.take())

    def finish(self, running: Running) -> None:
        for group in self.groups:
            self.let_go(running.tables[group][::-1])

    def let_go(self, blocks: list[int | None]) -> None:
        """Of those that nobody holds any more the first goes first; what is not cached is taken next."""
        gone = []
        for block in blocks:
            if block is not None:
                self.held[block] -= 1
                gone += [] if self.held[block] else [block]
        self.free[:0] = [block for block in gone if block not in self.names]
        self.free += [block for block in gone if block in self.names]


def name_of(prefix: str) -> int:
    return int.from_bytes(prefix.encode(), "big")


def tokens_of(prompt: str) -> list[int]:
    return [token for letter in prompt for token in (ord(letter), 9)]


def keys_of(prompt: str) -> list[int]:
    return block_keys(tokens_of(prompt), block_tokens=BLOCK, parent=namespace_seed("", ""))


@dataclass
class Asked:
    """A request as the router sees it, and as the engine does once it is scheduled."""

    prompt: str
    allocation: SharedAllocation
    ticket: Ticket
    unpromised: frozenset[tuple[int, int]]  # by group and key: what was there since it was sent
    running: Running | None = None


class SharedForecastMachine(LateEventsMachine):
    """Requests are sent, scheduled in order and ended; their events come late. All are looked up at any moment."""

    @initialize(blocks=st.integers(12, 60), kinds=st.lists(GROUPS, min_size=1, max_size=2), keeps_all=st.booleans())
    def start(self, blocks: int, kinds: list[Group], keeps_all: bool) -> None:
        self.engine = Engine(blocks, [*kinds, FULL], keeps_all)
        self.index = PrefixIndex(block_tokens=BLOCK)
        geometry = Geometry(chunk_tokens=CHUNK * BLOCK)
        self.index.add_rank(0, domain="engine", geometry=geometry, pool=Pool(None, all_blocks=blocks))
        self.is_beyond_knowing = False
        self.waiting: list[Asked] = []
        self.scheduled: list[Asked] = []  # their events are under way
        self.running: list[Asked] = []
        running = self.engine.schedule("zzzzzz"[: blocks // len(self.engine.groups) - 1])
        assert running is not None
        while self.engine.stepping:
            self.engine.step()
        self.engine.finish(running)
        self.apply()
        pool = self.index.pool(0)
        assert isinstance(pool, SharedPool)
        windows = [group for group, (kind, _) in enumerate(kinds) if kind == "sliding_window"]
        segments = dict.fromkeys(windows, int(keeps_all))  # as longer prompts would show
        self.index._ranks[0].segment_tokens.update(segments)
        self.pool = pool

    def apply(self) -> None:
        for events in self.engine.events:
            for event in events:
                self.index.apply(0, event)
            self.index.end_batch(0)
        self.engine.events[:] = [[]]

    @rule(prompt=PROMPTS)
    def send(self, prompt: str) -> None:
        keys = keys_of(prompt)
        ticket = self.index.promise(0, keys, prompt_tokens=len(tokens_of(prompt)) + 1)
        allocation = self.pool.sent(keys, blocks=len(keys) + 1)
        self.waiting.append(Asked(prompt, allocation, ticket, self.resident(keys)))

    def resident(self, keys: list[int]) -> frozenset[tuple[int, int]]:
        held = self.index.residency(0).items()
        return frozenset((group, key) for group, there in held for key in there.intersection(keys))

    @precondition(lambda self: self.waiting)
    @rule()
    def step(self) -> None:
        prompt = self.waiting[0].prompt
        try:
            deepcopy(self.engine).schedule(prompt)
        except Full:
            return  # somebody would have to wait
        if (running := self.engine.schedule(prompt)) is not None:
            self.waiting[0].running = running
            self.scheduled.append(self.waiting.pop(0))

    @precondition(lambda self: self.scheduled)
    @rule()
    def deliver(self) -> None:
        """First tokens come with the events."""
        engine = deepcopy(self.engine)
        with contextlib.suppress(Full):
            while engine.stepping:
                engine.step()
        if engine.stepping:
            return  # somebody would have to wait
        while self.engine.stepping:
            self.engine.step()
        self.apply()
        for asked in self.scheduled:
            self.is_beyond_knowing |= self.is_silent(asked)
            self.pool.begun(asked.allocation)
        self.running += self.scheduled
        self.scheduled.clear()

    def is_silent(self, asked: Asked) -> bool:
        """No event tells of a prompt that stores nothing: when it let go of its state, among what others did, or
        whether it found what has gone by now.
        """
        assert asked.running is not None
        is_among_others = len(self.scheduled) > 1 and any(map(self.engine.is_state, self.engine.groups))
        stores_nothing = asked.running.found == len(asked.prompt)
        return stores_nothing and (is_among_others or self.engine.hit(asked.prompt) < len(asked.prompt))

    def end(self, place: int) -> None:
        asked = self.running.pop(place)
        assert asked.running is not None
        self.engine.finish(asked.running)
        self.pool.ended(asked.allocation, keys_of(asked.running.text))
        self.index.provisional.drop(asked.ticket)

    @invariant()
    def found(self) -> None:
        """What the index foretells of any prompt is what the engine finds once it comes to it."""
        has_lost = False
        for asked in (*self.waiting, *self.scheduled):
            resident = self.resident(keys_of(asked.prompt))
            has_lost |= not asked.unpromised <= resident
            asked.unpromised |= resident
        engine = deepcopy(self.engine)
        self.is_beyond_knowing |= any(len(copies) > 1 for copies in engine.cached.values())
        if self.is_beyond_knowing:
            return  # of several copies the forecast follows one
        for asked in self.waiting:
            try:
                while engine.schedule(asked.prompt) is None:
                    if not engine.stepping:
                        return  # it will have to wait until another ends: nobody knows which
                    engine.step()
            except Full:
                return
        if has_lost:
            return  # what was there for one has gone: that it is computed again, nothing promises any more
        for prompt in CONVERSATIONS:
            found = self.index.reusable_tokens(keys_of(prompt), prompt_tokens=len(tokens_of(prompt)) + 1).get(0, 0)
            with contextlib.suppress(Full):
                assert found == BLOCK * deepcopy(engine).hit_in_time(prompt), prompt


TestSharedForecast = SharedForecastMachine.TestCase
TestSharedForecast.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
