"""One run in simulated time: the router's own decision code in front of fluid engines, driven by a workload.

The router knows what a router can know: cache events come late, dispatches are entered as promises, load and speed are
learned from its own dispatches, first tokens and completions.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from loadtest.simulate.comparators import Asked, comparator
from loadtest.simulate.engine import Engine, Job, Listener
from loadtest.simulate.measure import Meter
from loadtest.simulate.runs import (
    Path,
    Run,
    believe,
    believed_blocks,
    ever_blocks,
    loadable_blocks,
    path_blocks,
    remember,
    sent_blocks,
)
from loadtest.simulate.scenario import Request, Scenario
from loadtest.simulate.windows import Span, believed_usable, window_before
from router.core.admission import Admission, AdmissionParameters, Hold, Visit
from router.core.admission_guard import Guard
from router.core.cost import CostParameters
from router.core.load import Claim, LoadBook
from router.core.pace import PaceLearner, PacePeers, judge, prior
from router.core.session_table import Binding, SessionTable
from router.core.types import (
    Decision,
    FleetView,
    RankId,
    RankStatus,
    RankView,
    Residency,
    Trust,
)

MODEL = "simulated"
#: What the router believes of a rank's speed before it has seen any: the default of its settings.
_PRIOR_RATE = 10_000.0
#: A promise outlives its request by so long: the router's own rule.
_PROMISE_SECONDS = 2.0
_TICK_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Flight:
    """A request that was sent: what must be ended with it."""

    request: Request
    decision: Decision
    claim: Claim
    promise: int
    binding: Binding | None
    visit: Visit


class _NeverHold(Guard):
    """For policies without admission: it learns, and lets everybody pass."""

    def decide(self, model: str, *, now: float) -> bool:
        """Never."""
        super().decide(model, now=now)
        return False


@dataclass(slots=True)
class _Rank:
    engine: Engine
    jobs: dict[Job, Flight] = field(default_factory=dict)
    wake: int = 0


class World:
    """Clock, ranks and router. The workload calls ``at`` and ``ask``."""

    def __init__(self, scenario: Scenario, policy: str, *, block_tokens: int, meter: Meter) -> None:
        self.scenario = scenario
        self.block_tokens = block_tokens
        self.now = 0.0
        self._meter = meter
        self._rng = random.Random(scenario.seed)
        self._policy = comparator(policy, CostParameters())
        self._held: dict[int, Request] = {}
        self._loads = LoadBook()
        self._sessions = SessionTable(max_sessions=200_000, idle_seconds=14_400.0)
        guard = Guard if policy == "affinity" else _NeverHold
        self._admission = Admission(AdmissionParameters(), guard(self._sessions.returns))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._late: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._window_blocks = -(-(scenario.window_tokens - 1) // block_tokens) if scenario.window_tokens else 0
        self._promises: deque[tuple[float, Path, int, int]] = deque()
        self._promise = itertools.count(1)
        self._ranks = [self._new_rank(slot) for slot in range(scenario.ranks)]
        self._peers = PacePeers()
        self._learners: list[PaceLearner] = []
        self._views = [self._new_view(slot) for slot in range(scenario.ranks)]
        self._view = FleetView(tuple(self._views))

    def _new_rank(self, slot: int) -> _Rank:
        scenario = self.scenario
        slower = scenario.slow_rank_factor if slot == 0 else 1.0
        pool_blocks = scenario.pool_tokens // self.block_tokens

        def late(hear: Callable[[Run, int], None]) -> Callable[[Run, int], None]:
            def told(run: Run, blocks: int) -> None:
                self._late.append((self.now + scenario.event_lag_seconds, slot, partial(hear, run, blocks)))

            return told

        def stored(run: Run, blocks: int) -> None:
            residency = self._views[slot].residency
            assert residency is not None
            residency.tokens += (blocks - run.known.get(slot, 0)) * self.block_tokens
            believe(run.known, slot, blocks)

        def windowed(run: Run, span: Span | None) -> None:
            due = self.now + scenario.event_lag_seconds
            self._late.append((due, slot, lambda: believe(run.spans, slot, span)))

        listener = Listener(
            first_token=lambda job: self._first_token(slot, job),
            finished=lambda job: self._finished(slot, job),
            stored=late(stored),
            loadable=late(lambda run, blocks: believe(run.loadable, slot, blocks)),
            windowed=windowed,
        )
        return _Rank(
            Engine(
                listener,
                pool_blocks=pool_blocks,
                host_blocks=int(pool_blocks * scenario.host_ratio),
                block_tokens=self.block_tokens,
                slowdown=scenario.slowdown * slower,
                decode_slowdown=slower,
                window_blocks=self._window_blocks,
                window_pool_blocks=int(pool_blocks * scenario.window_pool_ratio),
            )
        )

    def _new_view(self, slot: int) -> RankView:
        pace = prior(_PRIOR_RATE)
        self._learners.append(PaceLearner(pace, self._peers))
        return RankView(
            slot=slot,
            id=RankId("simulated", slot),
            models=frozenset({MODEL}),
            status=RankStatus.READY,
            load=self._loads.load(slot),
            pace=pace,
            trust=Trust(),
            pool_tokens=self.scenario.pool_tokens,
            residency=Residency(),
        )

    # --- time -----------------------------------------------------------------------------------------

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Let ``event`` happen at ``when``."""
        heapq.heappush(self._events, (when, next(self._order), event))

    def run(self) -> None:
        """Until the scenario's end."""
        scenario = self.scenario
        self.at(_TICK_SECONDS, self._tick)
        self.at(scenario.warm_up_seconds, lambda: self._meter.begin(self._busy_seconds()))
        if scenario.fail_at_seconds is not None:
            self.at(scenario.fail_at_seconds, self._fail)
            self.at(scenario.fail_at_seconds + scenario.outage_seconds, self._recover)
        while self._events and self._events[0][0] <= scenario.end_seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = scenario.end_seconds
        self._meter.end(self._busy_seconds())

    def _busy_seconds(self) -> list[float]:
        for rank in self._ranks:
            rank.engine.advance(self.now)
        return [rank.engine.busy_seconds for rank in self._ranks]

    def _wake(self, slot: int) -> None:
        """Ask to be called when the rank's next thing happens; an earlier wish is void."""
        rank = self._ranks[slot]
        rank.wake += 1
        wake = rank.wake
        due = rank.engine.next_event()
        if due < float("inf"):
            self.at(due, lambda: self._progress(slot, wake))

    def _progress(self, slot: int, wake: int) -> None:
        rank = self._ranks[slot]
        if rank.wake == wake:
            rank.engine.advance(self.now)
            self._wake(slot)

    def _tick(self) -> None:
        self._release()
        self.at(self.now + _TICK_SECONDS, self._tick)

    # --- the router -----------------------------------------------------------------------------------

    def ask(self, request: Request) -> None:
        """A client sends a request."""
        request.arrived_at = self.now
        request.ideal_tokens = self._tokens(ever_blocks(request.path), request)
        remember(request.path)
        asked = self._asked(request)
        passed = self._admission.offer(asked, self._view, now=self.now)
        if isinstance(passed, Hold):
            self._held[passed.ticket] = request
        else:
            self._send(request, msgspec.structs.replace(asked, allowed=passed.slots))

    def _release(self) -> None:
        while (released := self._admission.release(self._view, now=self.now)) is not None:
            request = self._held.pop(released.ticket)
            self._send(request, msgspec.structs.replace(self._asked(request), allowed=released.admit.slots))

    def _asked(self, request: Request) -> Asked:
        self._hear()
        path = request.path
        home = parent_home = None
        stored, reusable = self._known_tokens(request)
        if request.session is not None:
            home = self._sessions.home(MODEL, request.session, now=self.now, held=reusable)
            parent_home = self._sessions.parent_home(MODEL, request.session, now=self.now)
        lower = loadable_blocks(path) if self.scenario.host_ratio else {}
        return Asked(
            model=MODEL,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            reusable_tokens=reusable,
            session=request.session,
            home=home,
            loadable_tokens={slot: self._tokens(blocks, request) for slot, blocks in lower.items()},
            return_ratio=self._sessions.returns.ratio(MODEL),
            stored_tokens=stored,
            at_home=self._sessions.at_home,
            parent_home=parent_home,
            sent_tokens={slot: self._tokens(blocks, request) for slot, blocks in sent_blocks(path).items()},
            last_slot=next((run.last for run, _ in reversed(path) if run.last is not None), None),
        )

    def _known_tokens(self, request: Request) -> tuple[dict[int, int], dict[int, int]]:
        """What full-attention layers are believed to hold of it, where there are others; and what can be reused."""
        stored = usable = believed_blocks(request.path)
        if self._window_blocks:
            usable = believed_usable(request.path, stored, window=self._window_blocks)
        reusable = {slot: self._tokens(blocks, request) for slot, blocks in usable.items()}
        return {slot: self._tokens(blocks, request) for slot, blocks in stored.items() if usable != stored}, reusable

    def _tokens(self, blocks: int, request: Request) -> int:
        return min(blocks, (request.prompt_tokens - 1) // self.block_tokens) * self.block_tokens

    def _hear(self) -> None:
        """Cache events that have come by now, and promises that have run out."""
        while self._late and self._late[0][0] <= self.now:
            _, _, hear = self._late.popleft()
            hear()
        while self._promises and self._promises[0][0] <= self.now:
            _, path, slot, promise = self._promises.popleft()
            self._break_promise(path, slot, promise)

    def _break_promise(self, path: Path, slot: int, promise: int) -> None:
        for run, _ in path:
            if run.promised.get(slot, (0, 0))[1] == promise:
                del run.promised[slot]

    def _send(self, request: Request, asked: Asked) -> None:
        decision = self._policy(self._view, asked, self._rng, self.now)
        if decision is None:
            self.at(self.now + _TICK_SECONDS, lambda: self._send(request, self._asked(request)))
            return
        slot = decision.slot
        request.sent_at = self.now
        request.had_home = asked.home is not None
        request.moved = request.had_home and slot != asked.home
        promise = next(self._promise)
        for run, blocks in request.path:
            run.promised[slot] = (max(blocks, run.promised.get(slot, (0, 0))[0]), promise)
            run.sent[slot] = max(blocks, run.sent.get(slot, 0))
            run.last = slot
        stored_tokens = asked.stored_tokens.get(slot, 0)
        fork = stored_tokens // self.block_tokens if stored_tokens > decision.expected_cached_tokens else 0
        for depth in (fork, path_blocks(request.path)):
            for run, span in window_before(request.path, depth, window=self._window_blocks):
                run.spans[slot] = span
        binding = None
        if request.session is not None:
            binding = self._sessions.start(MODEL, request.session, slot=slot, now=self.now)
        visit = self._admission.start(asked, slot, self._view, now=self.now)
        claim = self._loads.open(
            slot,
            prompt_tokens=request.prompt_tokens,
            prefill_tokens=request.prompt_tokens - decision.expected_cached_tokens,
            seconds=decision.expected_prefill_seconds / self._views[slot].pace.factor,
            now=self.now,
        )
        flight = Flight(request, decision, claim, promise, binding, visit)
        job = Job(request.path, request.prompt_tokens, request.output_tokens)
        rank = self._ranks[slot]
        rank.jobs[job] = flight
        rank.engine.advance(self.now)
        rank.engine.submit(job)
        self._wake(slot)

    def _first_token(self, slot: int, job: Job) -> None:
        flight = self._ranks[slot].jobs[job]
        request = flight.request
        served = self._loads.first_byte(flight.claim, now=self.now)
        if served is not None and not job.loaded_tokens:  # loading says nothing of how fast it computes
            self._learners[slot].observe(
                served_seconds=served,
                uncached_tokens=job.prompt_tokens - job.cached_tokens,
                context_tokens=job.prompt_tokens,
            )
        flight.visit.first_token()
        self._meter.first_token(request, job, now=self.now)
        self.at(self.now, self._release)

    def _finished(self, slot: int, job: Job) -> None:
        flight = self._ranks[slot].jobs.pop(job)
        request = flight.request
        self._end(slot, flight, kept=True)
        self._admission.finish(
            flight.visit, now=self.now, cached_tokens=job.cached_tokens, ideal_tokens=request.ideal_tokens
        )
        judge(
            self._views[slot].trust,
            predicted_tokens=flight.decision.expected_cached_tokens,
            actual_tokens=job.cached_tokens,
            slack_tokens=self.block_tokens,
        )
        self._meter.finished(request, now=self.now)
        request.done()
        self.at(self.now, self._release)

    def _end(self, slot: int, flight: Flight, *, kept: bool) -> None:
        self._loads.close(flight.claim, now=self.now)
        request = flight.request
        if request.session is not None and flight.binding is not None:
            self._sessions.finish(MODEL, request.session, flight.binding, now=self.now, is_answered=kept)
        if kept:
            self._promises.append((self.now + _PROMISE_SECONDS, request.path, slot, flight.promise))
        else:
            self._break_promise(request.path, slot, flight.promise)

    # --- a rank that dies -----------------------------------------------------------------------------

    def _fail(self) -> None:
        """Rank 0 is gone with its cache; what ran there is sent elsewhere at once."""
        rank = self._ranks[0]
        rank.engine.advance(self.now)
        for run in rank.engine.cache.resident:
            run.known.pop(0, None)
        for run in rank.engine.host.resident if rank.engine.host else ():
            run.loadable.pop(0, None)
        for run in rank.engine.windows.spans if rank.engine.windows else ():
            run.spans.pop(0, None)
        self._late = deque(entry for entry in self._late if entry[1] != 0)
        residency = self._views[0].residency
        assert residency is not None
        residency.tokens = 0
        lost = [rank.jobs.pop(job) for job in rank.engine.empty()]
        self._wake(0)
        self._set_status(0, RankStatus.DOWN)
        self._sessions.forget_slot(0)
        self._admission.forget_slot(0)
        for flight in lost:
            self._end(0, flight, kept=False)
            self._admission.finish(flight.visit, now=self.now, is_kept=False)
            self._again(flight.request)

    def _again(self, request: Request) -> None:
        """Send a lost request elsewhere; its client has waited since it asked."""
        arrived_at = request.arrived_at
        self.ask(request)
        request.arrived_at = arrived_at

    def _recover(self) -> None:
        self._set_status(0, RankStatus.READY)
        self._release()

    def _set_status(self, slot: int, status: RankStatus) -> None:
        self._views[slot] = replace(self._views[slot], status=status)
        self._view = FleetView(tuple(self._views), version=self._view.version + 1)
