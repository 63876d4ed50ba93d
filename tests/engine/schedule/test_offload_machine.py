"""The scheduler over a host and a disk: transfers that take their time, fail, and race with everything else."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from kv_memory import KvMemory, fingerprint
from kv_mover import KvMover, LoadingMemory
from test_scheduler_machine import Resident, SchedulerMachine, replay

from engine_shim.cache.component import Component
from engine_shim.cache.copies import Copies, Page
from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.pool import PageError
from engine_shim.cache.radix import RadixCache
from engine_shim.cache.transfers import LoadError, Place, WritePolicy
from engine_shim.runner.shadow import ShadowRunner
from engine_shim.runner.shadow_mover import ShadowMover
from engine_shim.schedule.memory import Memory
from engine_shim.schedule.offload import Offload
from engine_shim.schedule.transit import OffloadPlan
from engine_shim.types import FinishReason, GroupKind, SchedulingPolicy, WindowTails
from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import EventBatch, decode_batch, encode_batch


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
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
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


# --- bugs in the engine --------------------------------------------------------------------------------


def sources_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """The tree may give up what is being copied out."""
    patch.setattr(Component, "pin", lambda self, node: None)
    patch.setattr(Component, "unpin", lambda self, node: None)
    patch.setattr(RadixCache, "unpin", lambda self, receipt: setattr(self, "pinned", self.pinned - 1))


def freed_before_the_load_landed(patch: pytest.MonkeyPatch) -> None:
    """A request that leaves frees pages that a load will still write."""
    drop = Memory.drop

    def bad(self: Memory, entry: Any) -> None:
        if entry.load is not None:
            entry.load.outstanding.clear()
        drop(self, entry)

    patch.setattr(Memory, "drop", bad)


def stale_load(patch: pytest.MonkeyPatch) -> None:
    """A host slot may be given to another page while a load reads it."""
    patch.setattr(Copies, "pin", lambda self, copy: None)
    patch.setattr(Copies, "unpin", lambda self, copy: None)


def no_barrier(patch: pytest.MonkeyPatch) -> None:
    """A step does not say which loads it depends on."""
    patch.setattr(KvMover, "finish", lambda self, loads: None)


def read_before_ready(patch: pytest.MonkeyPatch) -> None:
    """A copy counts as soon as its transfer has begun."""
    reserve = Copies.reserve

    def bad(self: Copies, page: Page, place: Place, group: int) -> Any:
        copy = reserve(self, page, place, group)
        if copy is not None:
            copy.is_ready = True
        return copy

    patch.setattr(Copies, "reserve", bad)


def copied_for_each_twin(patch: pytest.MonkeyPatch) -> None:
    """What is on its way already is sent again."""
    grow = Copies.grow
    patch.setattr(
        Copies, "grow", lambda self, *arguments: [replace(page, copies={}) for page in grow(self, *arguments)]
    )


def damage_ignored(patch: pytest.MonkeyPatch) -> None:
    """A load that did not arrive whole is taken for one that did."""
    land = Offload._land
    patch.setattr(Offload, "_land", lambda self, transfer, *, whole: land(self, transfer, whole=True))


def window_with_a_hole(patch: pytest.MonkeyPatch) -> None:
    """A boundary is loaded though its window is not all there."""
    boundary = Offload._boundary

    def bad(self: Offload, chain: list[Page], match: Any, places: Any) -> tuple[int, int]:
        depth, _ = boundary(self, chain, match, places)
        return depth, min(depth, len(chain))

    patch.setattr(Offload, "_boundary", bad)


def untold_copies(patch: pytest.MonkeyPatch) -> None:
    """Copies go without an event."""
    patch.setattr(EventRecorder, "uncopied", lambda self, place, group, page: None)


def told_before_landing(patch: pytest.MonkeyPatch) -> None:
    """What a load brings goes to the tree, and to the routers, when it is sent."""
    start = Offload.start

    def bad(self: Offload, load: Any, targets: Any) -> None:
        start(self, load, targets)
        load.outstanding.clear()

    patch.setattr(Offload, "start", bad)


BUGS = [
    sources_not_pinned,
    freed_before_the_load_landed,
    stale_load,
    no_barrier,
    read_before_ready,
    copied_for_each_twin,
    damage_ignored,
    window_with_a_hole,
    untold_copies,
    told_before_landing,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of six walks, which all pass on clean code, ends with an alarm."""
    plant(monkeypatch)
    with pytest.raises((IntegrityError, AssertionError, KeyError, ValueError, IndexError, PageError)):
        deque(map(walk, range(6)), maxlen=0)


# --- what routers are told -------------------------------------------------------------------------------


def usable(hashes: list[int], resident: Resident, machine: OffloadMachine) -> int:
    """Pages of a prompt that the device can reuse, by trying every boundary on what is said to be resident."""
    full = len(list(takewhile(resident.get(("GPU", 0), set()).__contains__, hashes)))
    reach = machine.layout.window_pages()
    for boundary in range(full, 0, -1):
        for group in machine.layout.groups[1:]:
            behind = {GroupKind.WINDOW: reach, GroupKind.STATE: 1}.get(group.kind, 0)
            needed = hashes[max(0, boundary - behind) : boundary]
            if not resident.get(("GPU", group.index), set()).issuperset(needed):
                break
        else:
            return boundary
    return 0


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_router_follows_every_medium(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded, decoded and applied to the router's index, each step's events say how much of a prompt lies where.

    For full attention, windows and states, through restarts, beside the cache's own account of what is resident.
    """
    page = 1 + seed % 4
    index = PrefixIndex(block_tokens=page)
    index.add_rank(0, domain="shim")
    asked = Counter[str]()

    def follow(machine: OffloadMachine) -> None:
        if machine.restarts > asked["restarts"]:  # a new epoch
            asked["restarts"] = machine.restarts
            index.clear(0)
        for event in decode_batch(encode_batch(EventBatch(0.0, machine.scheduler.take_events()))).events:
            index.apply(0, event)
        resident: Resident = {}
        replay(machine.scheduler.snapshot_events(), resident)
        device = resident.get(("GPU", 0), set())
        anywhere = device.union(*(resident.get((medium, 0), set()) for medium in ("CPU", "STORAGE")))
        for request in list(machine.requests.values())[-8:]:
            prompt = request.tokens
            hashes = block_keys(prompt, block_tokens=page, parent=namespace_seed(""))[: (len(prompt) - 1) // page]
            keys = block_keys(prompt, block_tokens=page, parent=namespace_seed("", ""))
            loadable = page * len(list(takewhile(anywhere.__contains__, hashes)))
            if anywhere != device:
                found = index.loadable_tokens(keys, prompt_tokens=len(prompt))
                assert found.get(0, 0) == loadable
            reusable = page * usable(hashes, resident, machine)
            assert index.reusable_tokens(keys, prompt_tokens=len(prompt)).get(0, 0) == reusable
            asked.update(all=1, below=loadable > reusable, reused=reusable > 0)

    monkeypatch.setattr(OffloadMachine, "agrees", follow)
    machine = walk(seed)
    assert min(asked["below"], asked["reused"]) > 100
    assert machine.restarts > 0 or machine.sizes[1] is None
