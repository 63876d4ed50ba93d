"""The forecast against an engine that keeps every block: vLLM's queue of free blocks, without anything clever."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from router.core.forecast import Allocation, Pool
from router.core.index import PrefixIndex
from router.core.provisional import Ticket
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored, Event
from tests.unit.core.late_events import CONVERSATIONS, PROMPTS, LateEventsMachine

BLOCK = 2


@dataclass
class Engine:
    """``free`` is in the order in which blocks are taken; a block is the prefix it stands for, None if it has none."""

    free: list[str | None]
    held: Counter[str] = field(default_factory=Counter)  # by running requests
    events: list[Event] = field(default_factory=list)

    def hit(self, prompt: str) -> int:
        blocks = [prompt[: end + 1] for end in range(len(prompt))]
        return next(
            (at for at, block in enumerate(blocks) if not (self.held[block] or block in self.free)), len(blocks)
        )

    def schedule(self, prompt: str) -> bool:
        """Blocks for the whole prompt and one more for what is generated; False if there are not enough."""
        found = self.hit(prompt)
        touched = [prompt[: end + 1] for end in range(found)]
        left = [block for block in self.free if block not in touched]
        if len(left) < len(prompt) - found + 1:
            return False
        taken, self.free = left[: len(prompt) - found + 1], left[len(prompt) - found + 1 :]
        self.events += [BlockRemoved((name_of(block),)) for block in taken if block is not None]
        self.held.update(prompt[: end + 1] for end in range(len(prompt)))
        if found < len(prompt):
            names = tuple(name_of(prompt[: end + 1]) for end in range(found, len(prompt)))
            parent = name_of(prompt[:found]) if found else None
            self.events.append(BlockStored(names, parent, tokens_of(prompt)[BLOCK * found :], BLOCK))
        return True

    def finish(self, prompt: str) -> None:
        """The block begun is taken next; whole ones last, those at the prompt's end first."""
        self.free.insert(0, None)
        for end in reversed(range(len(prompt))):
            block = prompt[: end + 1]
            self.held[block] -= 1
            if not self.held[block]:
                self.free.append(block)


def name_of(prefix: str) -> int:
    return int.from_bytes(prefix.encode(), "big")


def tokens_of(prompt: str) -> list[int]:
    return [token for letter in prompt for token in (ord(letter), 9)]


def keys_of(prompt: str) -> list[int]:
    return block_keys(tokens_of(prompt), block_tokens=BLOCK, parent=namespace_seed("", ""))


class ForecastMachine(LateEventsMachine):
    """Requests are sent, scheduled in order and ended; their events come late. All are looked up at any moment."""

    @initialize(blocks=st.integers(6, 24))
    def start(self, blocks: int) -> None:
        self.engine = Engine([None] * blocks)
        self.pool = Pool(blocks)
        self.index = PrefixIndex(block_tokens=BLOCK)
        self.index.add_rank(0, domain="engine", pool=self.pool)
        self.waiting: list[tuple[str, Allocation, Ticket]] = []
        self.scheduled: list[tuple[str, Allocation, Ticket]] = []  # what their events say is under way
        self.running: list[tuple[str, Allocation, Ticket]] = []
        self.unpromised: dict[Ticket, int] = {}  # blocks that were there since a request was sent

    @rule(prompt=PROMPTS)
    def send(self, prompt: str) -> None:
        keys = keys_of(prompt)
        ticket = self.index.promise(0, keys, prompt_tokens=len(tokens_of(prompt)) + 1)
        self.waiting.append((prompt, self.pool.sent(keys, blocks=len(keys) + 1), ticket))
        self.unpromised[ticket] = self.resident(keys)

    def resident(self, keys: list[int]) -> int:
        held = self.index.residency(0)[-1]
        return next((at for at, key in enumerate(keys) if key not in held), len(keys))

    @precondition(lambda self: self.waiting)
    @rule()
    def step(self) -> None:
        if self.engine.schedule(self.waiting[0][0]):
            self.scheduled.append(self.waiting.pop(0))

    @precondition(lambda self: self.scheduled)
    @rule()
    def deliver(self) -> None:
        for event in self.engine.events:
            self.index.apply(0, event)
        self.engine.events.clear()
        for _, allocation, _ in self.scheduled:
            self.pool.begun(allocation)
        self.running += self.scheduled
        self.scheduled.clear()

    def end(self, place: int) -> None:
        prompt, allocation, ticket = self.running.pop(place)
        self.engine.finish(prompt)
        self.pool.ended(allocation, keys_of(prompt))
        self.index.provisional.drop(ticket)

    @invariant()
    def found(self) -> None:
        """What the index foretells of any prompt is what the engine finds once it comes to it."""
        has_lost = False
        for prompt, _, ticket in (*self.waiting, *self.scheduled):
            resident = self.resident(keys_of(prompt))
            has_lost |= resident < self.unpromised[ticket]
            self.unpromised[ticket] = max(self.unpromised[ticket], resident)
        engine = deepcopy(self.engine)
        if not all(engine.schedule(prompt) for prompt, _, _ in self.waiting):
            return  # one will have to wait until another ends: nobody knows which
        if has_lost:
            return  # what was there for one has gone: that it is computed again, nothing promises any more
        for prompt in CONVERSATIONS:
            found = self.index.reusable_tokens(keys_of(prompt), prompt_tokens=len(tokens_of(prompt)) + 1).get(0, 0)
            assert found == BLOCK * engine.hit(prompt), prompt


TestForecast = ForecastMachine.TestCase
TestForecast.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
