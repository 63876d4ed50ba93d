"""The scheduler over a host and a disk: transfers that take their time, fail, and race with everything else."""

from __future__ import annotations

import random
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from kv_memory import KvMemory, fingerprint
from kv_mover import KvMover, LoadingMemory
from test_scheduler_machine import SchedulerMachine

from engine_shim.cache.copies import Page
from engine_shim.cache.transfers import LoadError, Place, WritePolicy
from engine_shim.runner.shadow import ShadowRunner
from engine_shim.runner.shadow_mover import ShadowMover
from engine_shim.schedule.transit import OffloadPlan
from engine_shim.types import FinishReason, GroupKind, SchedulingPolicy, WindowTails


class OffloadMachine(SchedulerMachine):
    """As the scheduler's machine, and every copy below the device is compared with what its name says."""

    @initialize(
        page=st.integers(1, 4),
        window=st.none() | st.integers(1, 11),
        full_pages=st.integers(16, 30),
        spare_window_pages=st.integers(2, 12),
        state_slots=st.none() | st.integers(3, 8),
        checkpoint_pages=st.integers(1, 5),
        chunk=st.integers(1, 13),
        running=st.integers(1, 5),
        drafts=st.sampled_from([0, 3]),
        head=st.booleans(),
        tails=st.sampled_from(WindowTails),
        layers=st.integers(1, 3),
        ring=st.integers(1, 6),
        seed=st.integers(0, 5),
        scheduling=st.sampled_from(SchedulingPolicy),
        host=st.integers(3, 60),
        disk=st.none() | st.integers(3, 90),
        policy=st.sampled_from(WritePolicy),
        piece=st.integers(1, 9),
        overlaps=st.booleans(),
    )
    def start(
        self,
        host: int,
        disk: int | None,
        policy: WritePolicy,
        piece: int,
        overlaps: bool,
        **options: object,
    ) -> None:
        self.sizes, self.policy, self.piece, self.overlaps = (host, disk), policy, piece, overlaps
        self.restarts = self.refound = self.rebuilt_chunks = 0
        super().start(**options)

    def build(self, *, before: KvMover | None = None, **options: object) -> None:
        self.options = options
        groups = len(self.layout.groups)
        host, disk = ((pages,) * groups if pages else None for pages in self.sizes)
        self.mover = KvMover(self.memory, overlaps=self.overlaps, before=before)
        watched = ShadowMover(self.mover, self.layout)
        plan = OffloadPlan(host, disk, policy=self.policy, piece_pages=self.piece)
        super().build(offload=plan, mover=watched, **options)
        inner = LoadingMemory(self.memory, self.mover)
        self.runner = ShadowRunner(inner, self.layout, generations=self.scheduler.generations)
        watched.attach(self.runner, self.scheduler.copy_generations)

    @property
    def offload(self):
        return self.scheduler._memory.offload

    @rule(turn=st.integers(0, 3), times=st.integers(1, 4), whole=st.integers(0, 9))
    def transfers_end(self, turn: int, times: int, whole: int) -> None:
        """One transfer in ten does not arrive."""
        for _ in range(times):
            self.mover.land(turn, whole=whole > 0)

    @rule()
    def break_next_load(self) -> None:
        """The next load that a step waits for will not arrive."""
        self.mover.next_load_breaks = True

    @rule()
    def poll(self) -> None:
        if self.batch is None:
            self.scheduler.poll()

    @precondition(lambda self: self.batch is None)
    @rule()
    def launch(self) -> None:
        super().launch()
        for chunk in self.batch.chunks if self.batch else ():
            self.rebuilt_chunks += chunk.start < chunk.rebuilt_until

    def nothing_runs(self) -> None:
        assert not self.scheduler.has_work or self.scheduler.awaits_transfers, "nothing runs, nothing moves"

    @precondition(lambda self: self.batch is not None)
    @rule()
    def land(self) -> None:
        batch, landing = self.flights.pop(0)
        try:
            sampled = landing()
        except LoadError:
            assert not self.flights, "a step that loads is waited for"
            self.memory.forget()
            self.take(self.scheduler.rewind(batch))
        else:
            self.take(self.scheduler.commit(batch, sampled))

    @rule(steps=st.integers(1, 6))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if self.batch is None:
                self.launch()
            if self.batch is not None:
                self.land()
            elif self.scheduler.has_work:
                self.mover.land_all()
            self.agrees()

    @rule()
    def reset(self) -> None:
        idle = self.scheduler._memory.is_idle
        assert self.scheduler.reset_cache() is idle

    @precondition(lambda self: self.sizes[1] is not None)
    @rule()
    def restart(self) -> None:
        """The process ends, whatever was under way, and another one begins with what is on disk."""
        self.flights = []
        for request in self.requests.values():
            request.finish = request.finish or FinishReason.ABORT
        self.memory = KvMemory(self.layout)
        self.build(before=self.mover, **self.options)
        self.resident.clear()
        self.restarts += 1
        self.refound += len(self.offload.copies.shelves[Place.DISK].order[0])

    def agrees(self) -> None:
        super().agrees()
        for page in self.offload.copies.pages():
            for (place, group), copy in page.copies.items():
                if copy.is_ready and not copy.is_damaged:
                    self.holds(place, group, copy.slot, page)

    def holds(self, place: Place, group: int, slot: int, page: Page) -> None:
        """What stands in a slot is what follows from the tokens of the page's path."""
        tokens: list[int] = []
        above = page
        while above.parent is not None:
            tokens[:0] = above.tokens
            above = above.parent
        value, prints = crc32(page.namespace.encode()), []
        for token in tokens:
            value = fingerprint(value, token)
            prints.append(value)
        found = self.mover.memories[place]
        if self.layout.groups[group].kind is GroupKind.STATE:
            assert found[group, slot, 0] == (len(tokens), prints[-1])
            return
        size = self.layout.page_tokens
        first = len(tokens) - size
        for offset in range(size):
            assert found[group, slot, offset] == (first + offset, prints[first + offset])

    def settle(self) -> None:
        for _ in range(100):
            self.mover.land_all()
            self.scheduler.poll()
        self.agrees()
        assert self.scheduler._memory.is_idle


OffloadMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOffload = OffloadMachine.TestCase


def walk(seed: int, *, steps: int = 500, tails: WindowTails = WindowTails.STORED) -> OffloadMachine:
    """Few heads that come again and again, through pools much smaller than all of them."""
    rng = random.Random(seed)
    machine = OffloadMachine()
    machine.start(
        page=1 + seed % 4,
        window=(None, 5, 9)[seed % 3],
        full_pages=rng.randint(16, 24),
        spare_window_pages=rng.randint(2, 6),
        state_slots=rng.randint(4, 8) if seed % 2 else None,
        checkpoint_pages=rng.randint(1, 4),
        chunk=rng.randint(3, 13),
        running=rng.randint(1, 4),
        drafts=rng.choice([0, 3]),
        head=rng.random() < 0.5,
        tails=tails,
        layers=1 + seed % 2,
        ring=rng.randint(1, 6),
        seed=seed,
        scheduling=list(SchedulingPolicy)[seed // 2 % 2],
        host=rng.choice([30, 60, 90]),
        disk=rng.choice([None, 120, 200]),
        policy=list(WritePolicy)[seed % 3],
        piece=rng.randint(1, 9),
        overlaps=rng.random() < 0.7,
    )
    for _ in range(steps):
        match rng.choice(("add", "add", "steps", "steps", "steps", "one", "end", "abort", "break", "rare")):
            case "add" if len(machine.scheduler._entries) < 6:
                tokens = [rng.randint(1, 3) for _ in range(rng.randint(1, 8))]
                recent = max(0, len(machine.requests) - rng.choice([8, 20]))
                parent = rng.randint(recent, len(machine.requests))
                machine.add(tokens, parent, rng.randint(0, 40), rng.randint(1, 8), True, "", priority=-parent % 3)
            case "steps":
                machine.steps(rng.randint(1, 5))
            case "one" if machine.batch is None:
                machine.launch()
            case "one":
                machine.land()
            case "end":
                machine.transfers_end(rng.randrange(4), 2, rng.randrange(10))
            case "abort":
                machine.abort(rng.randint(0, len(machine.requests)))
            case "break":
                machine.break_next_load()
            case "rare" if rng.random() < 0.05:
                machine.reset()
            case "rare" if rng.random() < 0.2 and machine.sizes[1] is not None:
                machine.restart()
        machine.agrees()
    machine.teardown()
    return machine


@pytest.mark.parametrize("seed", range(12))
def test_long_random_walks(seed: int) -> None:
    """Hundreds of steps, and after each of them pages, copies, answers and events agree."""
    machine = walk(seed)
    assert machine.offload.counters.saved_pages > 0
    assert sum(machine.scheduler.stats().evicted_pages) > 0
    assert machine.refound > 0 or machine.sizes[1] is None


@pytest.mark.parametrize("tails", [WindowTails.REBUILT, WindowTails.RING])
@pytest.mark.parametrize("seed", [2, 8, 10])
def test_long_random_walks_that_rebuild(seed: int, tails: WindowTails) -> None:
    """The same where windows are not copied, or not even shared; prefixes are loaded and their windows rebuilt."""
    machine = walk(seed, tails=tails)
    assert machine.layout.window_tails is tails
    assert machine.rebuilt_chunks > 15
    assert machine.offload.counters.loaded_pages > 0
    if tails is WindowTails.RING:
        assert machine.memory.window_pages_reused > 80
