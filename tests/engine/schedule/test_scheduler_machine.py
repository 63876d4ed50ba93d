"""The scheduler under arbitrary arrivals, forks, aborts and pools too small for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_memory import EOS, KvMemory, expected_output

from engine_shim.runner.shadow import ShadowRunner
from engine_shim.schedule.entry import Entry
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import (
    Batch,
    CacheGroup,
    CacheLayout,
    Chunk,
    FinishReason,
    GroupKind,
    Output,
    Request,
    Sampling,
    SchedulingPolicy,
    StepLanding,
    WindowTails,
)
from router.wire.kv_events import BlockRemoved, BlockStored, Event

Resident = dict[tuple[str, int], set[int | bytes]]


def replay(events: Iterable[Event], resident: Resident) -> None:
    """Follow the events: {(medium, group): hashes that are resident}. Nothing is stored twice or removed in vain.

    What else each event must look like is the cache's test.
    """
    for event in events:
        if isinstance(event, BlockStored):
            there = resident.setdefault((event.medium, event.group), set())
            assert not there & set(event.hashes)
            there.update(event.hashes)
        elif isinstance(event, BlockRemoved):
            there = resident[event.medium, event.group]
            assert there >= set(event.hashes)
            there -= set(event.hashes)
        else:
            resident.clear()


class WatchedScheduler(Scheduler):
    """A scheduler whose choices are looked at. Requests are named by their number, so names tell who came first."""

    watched_policy = SchedulingPolicy.FCFS

    def place(self, entry: Entry) -> tuple[int, int]:
        """Where vLLM would have a request: who has the lower place goes first."""
        by_priority = self.watched_policy is SchedulingPolicy.PRIORITY
        return (entry.request.priority if by_priority else 0, int(entry.request.id))

    def _preempt(self, entry: Entry) -> None:
        assert self.place(entry) == max(map(self.place, self._running)), "somebody less important runs on"
        super()._preempt(entry)

    def _admit(self, chunks: dict[Entry, Chunk]) -> None:
        before = set(self._running)
        super()._admit(chunks)
        waiting = [self.place(entry) for entry in self._waiting]
        assert waiting == sorted(waiting)
        excused = {entry for entry in self._waiting if entry.waits_for_leader or self._memory.awaits_fetch(entry)}
        for admitted in set(self._running) - before:
            for entry in set(self._waiting) - excused:
                assert self.place(admitted) < self.place(entry), "somebody more important was passed"


class SchedulerMachine(RuleBasedStateMachine):
    """Every output is compared with what the request must answer, every read of a page with what must stand there."""

    longest = 60

    @initialize(
        page=st.integers(1, 4),
        window=st.none() | st.integers(1, 11),
        full_pages=st.integers(8, 30),
        spare_window_pages=st.integers(2, 20),
        state_slots=st.none() | st.integers(3, 12),
        checkpoint_pages=st.integers(1, 5),
        chunk=st.integers(1, 13),
        running=st.integers(1, 5),
        drafts=st.sampled_from([0, 1, 3, 6]),
        head=st.booleans(),
        tails=st.sampled_from(WindowTails),
        layers=st.integers(1, 3),
        ring=st.integers(1, 6),
        seed=st.integers(0, 5),
        scheduling=st.sampled_from(SchedulingPolicy),
    )
    def start(
        self,
        page: int,
        window: int | None,
        full_pages: int,
        spare_window_pages: int,
        state_slots: int | None,
        checkpoint_pages: int,
        chunk: int,
        running: int,
        drafts: int,
        head: bool,
        tails: WindowTails,
        layers: int,
        ring: int,
        seed: int,
        scheduling: SchedulingPolicy = SchedulingPolicy.FCFS,
    ) -> None:
        groups = [CacheGroup(0, GroupKind.FULL, (1,))]
        pages = [full_pages]
        if window is not None:
            groups.append(CacheGroup(1, GroupKind.WINDOW, tuple(range(10, 10 + layers)), window))
            pages.append(-(-(window - 1) // page) + spare_window_pages)
        if state_slots is not None:
            groups.append(CacheGroup(len(groups), GroupKind.STATE, (2,)))
            pages.append(state_slots)
        if head:
            groups.append(CacheGroup(len(groups), GroupKind.DRAFT, (3,)))
            pages.append(full_pages)
        if state_slots is not None or window is None:
            tails = WindowTails.STORED  # nothing else can be
        self.layout = CacheLayout(
            page,
            tuple(groups),
            tuple(pages),
            checkpoint_tokens=checkpoint_pages * page,
            window_tails=tails,
            ring_pages=min(-(-((window or 1) - 1) // page) + ring, pages[1] - 1) if window else 0,
        )
        self.chunk = chunk
        self.memory = KvMemory(self.layout, seed=seed)
        self.build(max_running=running, draft_tokens=drafts, policy=scheduling)
        self.resident: Resident = {}
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.failed: set[str] = set()
        self.flights: list[tuple[Batch, StepLanding]] = []
        self.ahead = 0

    @property
    def batch(self) -> Batch | None:
        """The oldest launched batch."""
        return self.flights[0][0] if self.flights else None

    def build(self, **options: Any) -> None:
        """Scheduler and runner for the layout and the memory."""
        self.scheduler = WatchedScheduler(
            self.layout,
            chunk_tokens=self.chunk,
            max_context_tokens=self.longest,
            eos_token_ids=frozenset({EOS}),
            **options,
        )
        self.scheduler.watched_policy = options["policy"]
        self.runner = ShadowRunner(self.memory, self.layout, generations=self.scheduler.generations)

    @rule(
        tokens=st.lists(st.integers(1, 3), min_size=1, max_size=12),
        parent=st.integers(0, 30),
        cut=st.integers(0, 40),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        namespace=st.sampled_from(["", "", "tenant"]),
        priority=st.integers(-1, 1),
    )
    def add(
        self,
        tokens: list[int],
        parent: int,
        cut: int,
        max_tokens: int,
        ignore_eos: bool,
        namespace: str,
        priority: int = 0,
    ) -> None:
        """A new request, which as a rule continues or forks an earlier one."""
        head: list[int] = []
        if parent < len(self.requests):
            head = list(self.requests.values())[parent].tokens[:cut]
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=frozenset({10}))
        request = Request(str(len(self.requests)), (*head, *tokens), sampling, namespace, priority)
        self.requests[request.id] = request
        self.streams[request.id] = []
        self.scheduler.add(request)
        self.take(self.scheduler.drain_outputs())

    @rule(index=st.integers(0, 30))
    def abort(self, index: int) -> None:
        request = self.requests.get(str(index))
        ended = request is None or request.finish is not None or request.id in self.aborted
        assert self.scheduler.abort(str(index)) is not ended
        if not ended:
            self.aborted.add(str(index))
        self.take(self.scheduler.drain_outputs())

    @precondition(lambda self: self.batch is None)
    @rule()
    def launch(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            self.nothing_runs()
            return
        assert batch.tokens >= 1
        assert sum(chunk.count + chunk.room for chunk in batch.chunks) <= self.chunk
        for chunk in batch.chunks:
            assert chunk.start == chunk.request.computed_tokens
            assert chunk.samples == (chunk.start + chunk.count == len(chunk.request.tokens))
            assert chunk.draws == len(self.streams[chunk.request.id])
            assert not chunk.awaits_token
        self.flights.append((batch, self.runner.launch(batch)))

    def nothing_runs(self) -> None:
        assert not self.scheduler.has_work, "unfinished requests and nothing to run"

    @precondition(lambda self: len(self.flights) == 1)
    @rule()
    def launch_ahead(self) -> None:
        """The step behind the launched one goes on where that ends, with whoever is not known to end in it."""
        first = {chunk.request: chunk for chunk in self.flights[0][0].chunks}
        batch = self.scheduler.schedule_ahead()
        if batch is None:
            return
        self.ahead += 1
        assert sum(chunk.count for chunk in batch.chunks) <= self.chunk
        for chunk in batch.chunks:
            before = first.get(chunk.request)
            sampling = before is not None and before.samples
            assert chunk.request.finish is None
            assert chunk.start == chunk.request.computed_tokens + (before.count if before else 0)
            assert chunk.awaits_token is sampling
            assert chunk.draws == len(self.streams[chunk.request.id]) + sampling
            assert chunk.draws < chunk.request.sampling.max_tokens
            assert chunk.samples == (chunk.start + chunk.count == len(chunk.request.tokens) + sampling)
            assert not chunk.room
        self.flights.append((batch, self.runner.launch(batch)))

    @rule()
    def hurry(self) -> None:
        """The device is quick: all that is launched has run."""
        self.memory.hurry()

    @precondition(lambda self: self.batch is not None)
    @rule()
    def land(self) -> None:
        """The runner writes at the last moment, after whatever was aborted meanwhile."""
        batch, landing = self.flights.pop(0)
        self.take(self.scheduler.commit(batch, landing()))

    @precondition(lambda self: self.batch is not None)
    @rule()
    def fail(self) -> None:
        """The runner gives up, after it has written anything anywhere it may write."""
        self.memory.forget()
        for batch, _ in self.flights:
            self.memory.scribble(batch)
        batch, self.flights = self.flights[0][0], []
        alive = [chunk.request for chunk in batch.chunks if chunk.request.finish is None]
        failed = self.scheduler.fail(batch)
        assert [output.request for output in failed[: len(alive)]] == alive
        self.failed.update(output.request.id for output in failed)
        self.take(failed)

    @rule(steps=st.integers(1, 6))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if self.batch is None:
                self.launch()
            if self.batch is not None:
                self.land()
            self.agrees()

    @rule(steps=st.integers(2, 6))
    def steps_ahead(self, steps: int) -> None:
        """As an engine does that overlaps them."""
        for _ in range(steps):
            if not self.flights:
                self.launch()
            if len(self.flights) == 1:
                self.launch_ahead()
            if self.flights:
                self.land()
            self.agrees()

    @rule()
    def reset(self) -> None:
        holding = self.scheduler.stats().running > 0
        assert self.scheduler.reset_cache() is not holding

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            request = output.request
            assert output.finish is request.finish
            self.streams[request.id] += output.tokens
            answer, reason = expected_output(
                request.prompt,
                request.sampling,
                namespace=request.namespace,
                context_tokens=self.scheduler.context_tokens,
            )
            stream = self.streams[request.id]
            if output.finish is FinishReason.ERROR:
                assert request.id in self.failed or len(request.prompt) >= self.scheduler.context_tokens
                assert stream == answer[: len(stream)]
            elif output.finish is FinishReason.ABORT:
                assert request.id in self.aborted
                assert stream == answer[: len(stream)]
            elif output.finish is None:
                assert stream == answer[: len(stream)]
                assert len(stream) < len(answer)
            else:
                assert (stream, output.finish) == (answer, reason)

    @invariant()
    def agrees(self) -> None:
        self.scheduler.check_integrity()
        replay(self.scheduler.take_events(), self.resident)
        snapshot: Resident = {}
        replay(self.scheduler.snapshot_events(), snapshot)
        assert {where: hashes for where, hashes in self.resident.items() if hashes} == snapshot

    def settle(self) -> None:
        """Let what goes on beside the steps come to its end."""

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.steps(1)
        assert all(request.finish is not None for request in self.requests.values()), "a request is stuck"
        self.settle()
        stats = self.scheduler.stats()
        assert stats.used_pages == stats.evictable_pages, "a request left pages or locks behind"


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
