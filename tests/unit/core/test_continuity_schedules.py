"""Any schedule of drops, damage, restarts and lost answers: the event stream's state machine against an oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.continuity import advance
from router.core.continuity_types import (
    Apply,
    AskFailed,
    AskReplay,
    AskSnapshot,
    Check,
    Clear,
    Continuity,
    Damaged,
    Event,
    Joined,
    Load,
    Message,
    ReplayEnd,
    ReplayPart,
    SnapshotTaken,
)
from router.wire.kv_events import EventBatch, Snapshot


@dataclass
class World:
    """A publisher with its process restarts, the wires between, and a consumer that obeys the actions.

    What the consumer believes is kept as the list of messages that made it: (process, sequence).
    """

    has_snapshot: bool
    has_epoch: bool
    random: random.Random
    has_replay: bool = True
    state: Continuity = field(init=False)
    process: int = 0
    published: int = 0
    clock: float = 0.0
    log: list[EventBatch] = field(default_factory=list)
    wire: list[Event] = field(default_factory=list)
    ask: AskReplay | AskSnapshot | None = None
    answer: list[Event] = field(default_factory=list)
    believed: list[tuple[int, int]] = field(default_factory=list)
    identity: dict[float, tuple[int, int]] = field(default_factory=dict)
    is_lossless: bool = True

    def __post_init__(self) -> None:
        self.state = Continuity(has_replay=self.has_replay, has_snapshot=self.has_snapshot)

    def publish(self, *, dropped: bool = False, damaged: bool = False) -> None:
        self.clock += 1
        epoch = f"e{self.process}" if self.has_epoch else None
        message = EventBatch(timestamp=self.clock, events=(), epoch=epoch)
        self.identity[self.clock] = (self.process, len(self.log))
        if damaged:
            self.wire.append(Damaged(len(self.log)))
        elif not dropped:
            self.wire.append(Message(len(self.log), message))
        self.log.append(message)

    def restart(self) -> None:
        """A new process on a new connection. With epochs, stragglers of the old one may come after it."""
        self.process += 1
        self.log = []
        stragglers: list[Event] = []
        if self.has_epoch:
            stragglers, self.wire = self.wire, []
        self.wire.append(Joined())
        if stragglers and self.random.random() < 0.7:
            self.publish()
        self.wire += stragglers

    def deliver(self) -> None:
        if self.wire:
            self.feed(self.wire.pop(0))

    def serve(self) -> None:
        """The publisher answers the open ask from what it has now."""
        ask, self.ask = self.ask, None
        if isinstance(ask, AskReplay):
            parts: list[Event] = [ReplayPart(ask.ticket, n, self.log[n]) for n in range(ask.start, len(self.log))]
            self.random.shuffle(parts)
            self.answer = [*parts, ReplayEnd(ask.ticket)]
        elif isinstance(ask, AskSnapshot):
            epoch = f"e{self.process}" if self.has_epoch else None
            content = EventBatch(timestamp=-float(self.process) - 1, events=(), epoch=epoch)
            self.answer = [SnapshotTaken(ask.ticket, Snapshot(len(self.log) - 1, content))]

    def answer_one(self) -> None:
        if self.answer:
            self.feed(self.answer.pop(0))

    def lose_answer(self) -> None:
        if self.ask is not None:
            ticket, self.ask = self.ask.ticket, None
            self.is_lossless = False
            self.feed(AskFailed(ticket))

    def feed(self, event: Event) -> None:
        self.state, actions = advance(self.state, event)
        for action in actions:
            match action:
                case Apply(message):
                    self.believed.append(self.identity[message.timestamp])
                case Load(snapshot):
                    process = int(-snapshot.batch.timestamp - 1)
                    self.believed = [(process, n) for n in range(snapshot.sequence + 1)]
                case Clear():
                    self.believed = []
                case AskReplay() | AskSnapshot():
                    self.ask, self.answer = action, []
                case _:
                    pass

    def settle(self) -> None:
        """One more message, and all that is under way arrives."""
        self.publish()
        self.arrive()

    def arrive(self) -> None:
        """All that is under way arrives."""
        for _ in range(10_000):
            if not (self.wire or self.ask or self.answer):
                return
            self.deliver()
            if not self.wire:
                self.serve()
            while self.answer:
                self.answer_one()
        raise AssertionError("the machine never comes to rest")


STEPS = (
    *("flow", "flow", "publish", "publish", "drop", "drop", "damage", "deliver", "deliver"),
    *("check", "serve", "answer", "restart", "blip"),
)


def run(world: World, steps: list[str]) -> None:
    world.wire.append(Joined())
    for step in steps:
        match step:
            case "flow":
                world.settle()
            case "publish":
                world.publish()
            case "drop":
                world.publish(dropped=True)
            case "damage":
                world.publish(damaged=True)
            case "deliver":
                world.deliver()
            case "serve":
                world.serve()
            case "answer":
                world.answer_one()
            case "restart":
                world.restart()
            case "blip":
                world.wire.append(Joined())
            case "check":
                world.feed(Check())
            case "lose":
                world.lose_answer()
    world.settle()


@settings(max_examples=500, deadline=None)
@given(
    steps=st.lists(st.sampled_from(STEPS), max_size=40),
    has_snapshot=st.booleans(),
    seed=st.integers(0, 2**16),
)
@example(steps=["deliver", "serve", "flow", "restart"], has_snapshot=False, seed=0)  # the first replay brought nothing
def test_any_schedule_ends_in_the_publishers_own_state(steps: list[str], has_snapshot: bool, seed: int) -> None:
    """Drops, damage, shuffled replays, restarts: at rest, all messages of the process count, once, in order."""
    world = World(has_snapshot=has_snapshot, has_epoch=True, random=random.Random(seed))
    run(world, steps)
    assert world.believed == [(world.process, n) for n in range(len(world.log))]


@settings(max_examples=500, deadline=None)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=40), seed=st.integers(0, 2**16))
def test_any_schedule_of_a_publisher_without_epochs(steps: list[str], seed: int) -> None:
    """The same for engines that name no epoch, where restarts show only in numbers, timestamps and connections."""
    world = World(has_snapshot=False, has_epoch=False, random=random.Random(seed))
    run(world, steps)
    assert world.believed == [(world.process, n) for n in range(len(world.log))]


@settings(max_examples=500, deadline=None)
@given(
    steps=st.lists(st.sampled_from((*STEPS, "lose")), max_size=40),
    has_snapshot=st.booleans(),
    has_epoch=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_lost_answers_never_leave_anything_stale(
    steps: list[str], has_snapshot: bool, has_epoch: bool, seed: int
) -> None:
    """Whatever fails, what is believed is an unbroken run of the present process up to its last message."""
    world = World(has_snapshot=has_snapshot and has_epoch, has_epoch=has_epoch, random=random.Random(seed))
    run(world, steps)
    first = world.believed[0][1]
    assert world.believed == [(world.process, n) for n in range(first, len(world.log))]


@settings(max_examples=500, deadline=None)
@given(
    steps=st.lists(st.sampled_from((*STEPS, "lose")), max_size=40),
    has_replay=st.booleans(),
    has_epoch=st.booleans(),
    seed=st.integers(0, 2**16),
)
@example(steps=["flow"], has_replay=False, has_epoch=True, seed=0)
def test_a_check_of_a_rank_with_snapshots_ends_in_its_own_state(
    steps: list[str], has_replay: bool, has_epoch: bool, seed: int
) -> None:
    """Whatever failed before and was lost at the end: with the next check all counts, from the first message on."""
    world = World(has_snapshot=True, has_replay=has_replay, has_epoch=has_epoch, random=random.Random(seed))
    if not has_epoch:
        steps = [step for step in steps if step not in ("restart", "blip")]
    run(world, steps)
    world.publish(dropped=True)
    for _ in range(2):  # one for what came before, one for the tail
        world.feed(Check())
        world.arrive()
    assert world.believed == [(world.process, n) for n in range(len(world.log))]
