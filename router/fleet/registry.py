"""The workers: known by URL, asked what they are, watched, and kept as ranks in the fleet.

Each worker has one task as long as it is registered: ask (again and again while it is down), enter its ranks, follow
their event streams, probe. A worker that is down is reported with a sentence; it never stops the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import httpx
import zmq.asyncio
from structlog.typing import FilteringBoundLogger

from router.core.types import RankId, RankStatus
from router.errors import Conflict, HomingError, NotFound, WorkerError
from router.fleet.doubles import Place, is_same_process, places
from router.fleet.event_stream import EventStream, Picture, StreamTimes
from router.fleet.outgoing import Outgoing
from router.fleet.parity import Checker, Standing
from router.fleet.probes import SENTENCES, Verdict, judge, probe, until_due
from router.fleet.target import ModelCard, Target
from router.fleet.worker import Hooks, Worker
from router.fleet.worker_api import WorkerInfo, describe, fetch_snapshot, reset_cache
from router.settings import ProbeSettings, WorkerSpec
from router.telemetry.metrics import Metrics

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 10.0
#: A worker joins with its cache known, so that a router that starts anew sends nobody away from home; but it joins.
_SYNCHRONIZE_SECONDS = 3.0
#: Whoever registers a worker waits so long to hear that it is known under another address; later it is only shown.
_RECOGNIZE_SECONDS = 2.0


class Ranks(Picture, Protocol):
    """What the registry writes of the fleet."""

    def add_rank(
        self,
        rank_id: RankId,
        /,
        *,
        target: Target,
        models: frozenset[str],
        block_tokens: int | None,
        pool_tokens: int | None,
        pool_blocks: int | None,
        prefill_chunk_tokens: int | None,
        max_running_requests: int | None,
        retention_tokens: int | None,
        cards: Mapping[str, ModelCard],
    ) -> int: ...
    def remove_rank(self, slot: int) -> None: ...
    def expect_clear(self, slot: int, *, since: float) -> None: ...
    def set_status(self, slot: int, status: RankStatus) -> None: ...


class Registry:
    """All workers. ``add``, ``remove`` and the rest may be called while ``run`` runs."""

    def __init__(
        self,
        ranks: Ranks,
        settings: ProbeSettings,
        *,
        client: httpx.AsyncClient,
        metrics: Metrics,
        log: FilteringBoundLogger,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        hooks: Hooks | None = None,
        stream_times: StreamTimes | None = None,
    ) -> None:
        self._ranks = ranks
        self._settings = settings
        self._client = client
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._wall_clock = wall_clock
        self._hooks = hooks or Hooks()
        self._stream_times = stream_times or StreamTimes()
        self._workers: dict[str, Worker] = {}
        #: One at a time is compared with those in force, so that of two that are one, one comes in.
        self._recognizing = asyncio.Lock()
        self._outgoing = Outgoing(self._hooks.can_spare, log)
        self._tasks: asyncio.TaskGroup | None = None
        self._context: zmq.asyncio.Context | None = None

    async def run(self) -> None:
        """Keep all workers until cancelled."""
        self._context = zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for worker in self._workers.values():
                    self._start(worker)
                await asyncio.get_running_loop().create_future()
        finally:
            self._context.destroy(linger=0)

    # --- what an operator asks ------------------------------------------------------------------------

    def workers(self) -> Sequence[Worker]:
        """All registered workers, in order of registration."""
        return list(self._workers.values())

    def outgoing(self) -> Sequence[Worker]:
        """Those that are registered no more, and serve until others can."""
        return list(self._outgoing)

    def worker(self, name: str) -> Worker:
        """One worker, perhaps an outgoing one. Raises ``NotFound``."""
        for worker in [*self.workers(), *self.outgoing()]:
            if worker.name == name:
                return worker
        raise NotFound(f"There is no worker {name!r}.", code="worker_not_found", param="id")

    def add(self, spec: WorkerSpec) -> Worker:
        """Register a worker; it is asked and entered in the background. Raises ``Conflict``."""
        self._refuse_known(spec)
        worker = next((each for each in self._outgoing if each.spec == spec and not each.is_ending), Worker(spec))
        self._outgoing.take(worker)
        self._workers[spec.name] = worker
        if self._tasks is not None and worker.life is None:
            self._start(worker)
        return worker

    async def join(self, spec: WorkerSpec) -> Worker:
        """``add``, once it is known that the worker is not there under another address. Raises ``Conflict``."""
        self._refuse_known(spec)
        if self._tasks is not None and self._workers:
            try:
                async with asyncio.timeout(_RECOGNIZE_SECONDS):
                    info, there = await asyncio.gather(describe(self._client, spec), places(spec.url))
                    double = await self._double(spec, info, there)
            except (WorkerError, TimeoutError):  # down or slow: it is asked again, in the background
                double = None
            if double is not None:
                raise Conflict(_is_double(spec, double) + ".", param="url")
        return self.add(spec)

    def _refuse_known(self, spec: WorkerSpec) -> None:
        for other in self._workers.values():
            if spec.name == other.name or spec.url == other.spec.url:
                raise Conflict(f"Worker {other.name!r} at {other.spec.url} is registered already.", param="url")

    async def remove(self, name: str) -> None:
        """Forget a worker with all its ranks held, at once. Requests on it may finish. Raises ``NotFound``."""
        worker = self.worker(name)
        if self._workers.get(name) is worker:
            del self._workers[name]
        self._outgoing.take(worker)
        await worker.end()
        self._log.info("worker removed", worker=name)

    async def change(self, *, leaving: Iterable[str], joining: Iterable[WorkerSpec]) -> dict[str, Conflict]:
        """Replace workers; they serve until they are dispensable (``fleet/outgoing``). Returns who cannot join."""
        for worker in [self._workers.pop(name) for name in leaving if name in self._workers]:
            self._outgoing.add(worker)
        refused, joined = {}, []
        for spec in joining:
            try:
                joined.append(self.add(spec).name)
            except Conflict as conflict:
                refused[spec.name] = conflict
        await self._outgoing.await_also(joined, self._workers)
        return refused

    def drain(self, name: str) -> Worker:
        """Give a worker no new sessions; those at home there leave one by one. Raises ``NotFound``."""
        worker = self.worker(name)
        worker.is_draining = True
        self._show(worker, worker.status, worker.reason)
        return worker

    def undrain(self, name: str) -> Worker:
        """Take ``drain`` back. Raises ``NotFound``."""
        worker = self.worker(name)
        worker.is_draining = False
        status = RankStatus.READY if worker.status is RankStatus.DRAINING else worker.status
        self._show(worker, status, worker.reason)
        return worker

    async def reset_cache(self, name: str) -> None:
        """Empty a worker's prefix cache, and the picture of it at once: vLLM tells of it only with its next step.

        Raises ``NotFound``, ``WorkerError``.
        """
        worker = self.worker(name)
        if worker.info is None:
            raise WorkerError(f"{worker.name} has not been reached yet: {worker.reason}")
        asked_at = self._clock()
        await reset_cache(self._client, worker.info)
        for slot in worker.slots:
            self._ranks.expect_clear(slot, since=asked_at)

    # --- a worker's life ------------------------------------------------------------------------------

    def _start(self, worker: Worker) -> None:
        assert self._tasks is not None
        worker.life = self._tasks.create_task(self._live(worker))

    async def _live(self, worker: Worker) -> None:
        while True:
            try:
                await self._follow(worker)
            except Exception as error:  # noqa: BLE001 - the boundary: what one worker does must not end the others
                self._log.error("worker lost by a fault of the router", worker=worker.name, exc_info=error)
                self._show(worker, RankStatus.DOWN, f"the router failed at it ({error!r}) and begins anew")
                await asyncio.sleep(_LAST_RETRY_SECONDS)

    async def _follow(self, worker: Worker) -> None:
        """Until the worker turns out to be laid out in another way."""
        info = await self._ask_until_known(worker)
        is_served = await self._outgoing.replace(worker, remove_rank=self._ranks.remove_rank)
        worker.slots = tuple(self._enter(info, rank) for rank in range(info.dp_size))
        if is_served:
            self._show(worker, RankStatus.READY, "")
        try:
            async with asyncio.TaskGroup() as streams:
                worker.streams = self._streams(info, worker.slots)
                following = [streams.create_task(stream.run()) for stream in worker.streams]
                await self._greet(worker)
                if self._settings.parity:
                    following.append(streams.create_task(self._check_parity(worker)))
                await self._watch(worker)
                for task in following:
                    task.cancel()
        finally:
            slots, worker.slots, worker.streams = worker.slots, (), []
            for slot in slots:
                self._ranks.remove_rank(slot)

    async def _check_parity(self, worker: Worker) -> None:
        """Each rank in turn, beside the traffic; the result is for the operator, and changes no routing."""
        info = worker.info
        assert info is not None
        checker = Checker(self._client, self._hooks.encode, self._hooks.promised)
        for rank, slot in enumerate(worker.slots):
            nonce = f"{self._wall_clock():.6f}-{rank}"
            found = await checker.check(info, rank, slot, nonce=nonce)
            worker.parity = {**worker.parity, rank: found}
            if found.standing is Standing.UNCHECKED:
                self._log.info("self-check not made", worker=worker.name, rank=rank, reason=found.sentence)
                continue
            self._metrics.parity.labels(worker.name, str(rank)).set(found.standing is Standing.PASSED)
            if found.standing is Standing.FAILED:
                self._log.warning("self-check failed", worker=worker.name, rank=rank, reason=found.sentence)

    async def _ask_until_known(self, worker: Worker) -> WorkerInfo:
        wait = _FIRST_RETRY_SECONDS
        while True:
            try:
                info = await describe(self._client, worker.spec)
                there = await places(worker.spec.url)
                async with self._recognizing:
                    double = await self._double(worker.spec, info, there)
                    worker.info, worker.places = (info, there) if double is None else (None, frozenset())
                if double is None:
                    return info
                self._show(worker, RankStatus.DOWN, _is_double(worker.spec, double))
            except WorkerError as error:
                self._show(worker, RankStatus.DOWN, str(error))
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LAST_RETRY_SECONDS)

    async def _double(self, spec: WorkerSpec, info: WorkerInfo, there: frozenset[Place]) -> Worker | None:
        """The worker in force that is the same server as that of ``spec``.

        With two entries for one cache, what either is believed to hold and to have in flight would be wrong.
        """
        for other in self.workers():
            if other.info is None or other.name == spec.name:
                continue
            if info.epochs & other.info.epochs:
                return other
            if there & other.places and await is_same_process(self._client, info, other.info, other.spec):
                return other
        return None

    async def _greet(self, worker: Worker) -> None:
        """Let the others do what they need before the first request."""
        try:
            await self._hooks.on_worker_ready(worker)
        except HomingError as error:
            self._log.warning("worker joins without its tokenizer or checks", worker=worker.name, reason=str(error))
        with suppress(TimeoutError):
            async with asyncio.timeout(_SYNCHRONIZE_SECONDS):
                await asyncio.gather(*(stream.is_synchronized.wait() for stream in worker.streams))
        self._show(worker, RankStatus.READY, "")

    async def _watch(self, worker: Worker) -> None:
        """Probe until the worker turns out to be laid out in another way than its ranks are."""
        assert worker.info is not None
        while True:
            await until_due(worker.doubted, interval_seconds=self._settings.interval_seconds)
            seen = await probe(self._client, worker.info.url, timeout_seconds=self._settings.timeout_seconds)
            failed_before = worker.failed_probes
            worker.failed_probes, verdict = judge(
                seen,
                failed_before=failed_before,
                failures_allowed=self._settings.failures,
                has_progress=self._hooks.has_progress(worker),
            )
            if verdict is Verdict.DOWN:
                self._show(worker, RankStatus.DOWN, f"{worker.name}: {SENTENCES[seen]}")
            elif verdict is Verdict.UP and failed_before and not await self._is_back(worker):
                return

    def doubt(self, name: str) -> None:
        """Look after a worker at once: a request could not be sent to it."""
        for worker in [*self.workers(), *self.outgoing()]:
            if worker.name == name:
                worker.doubted.set()

    async def _is_back(self, worker: Worker) -> bool:
        """A worker that failed a probe answers again: the same, a new process, or laid out in another way (False)?"""
        before = worker.info
        assert before is not None
        try:
            now = await describe(self._client, worker.spec)
        except WorkerError as error:
            worker.reason, worker.failed_probes = str(error), 1
            return True  # not yet; the next probe asks again
        is_new = now.identity != before.identity
        if not now.is_laid_out_like(before) or (is_new and await self._double(worker.spec, now, worker.places)):
            return False
        worker.info = now
        for stream in worker.streams:
            if is_new:
                stream.restarted()
            else:
                stream.check()
        await self._greet(worker)
        return True

    def _enter(self, info: WorkerInfo, rank: int) -> int:
        return self._ranks.add_rank(
            RankId(info.name, rank),
            target=info.target(rank),
            models=frozenset(info.models),
            block_tokens=info.block_tokens,
            pool_tokens=info.pool_tokens,
            pool_blocks=info.pool_blocks,
            prefill_chunk_tokens=info.prefill_chunk_tokens,
            max_running_requests=info.max_running_requests,
            retention_tokens=info.retention_tokens,
            cards=info.cards,
        )

    def _streams(self, info: WorkerInfo, slots: Sequence[int]) -> list[EventStream]:
        silent = [rank for rank, source in enumerate(info.sources) if source is None]
        if silent:
            self._log.warning(
                "ranks publish no cache events: what they hold is guessed", worker=info.name, ranks=silent
            )
        return [self._stream(info, rank, slot) for rank, slot in enumerate(slots) if rank not in silent]

    def _stream(self, info: WorkerInfo, rank: int, slot: int) -> EventStream:
        source = info.sources[rank]
        assert source is not None
        assert self._context is not None
        path = source.snapshot_path
        return EventStream(
            source,
            self._ranks,
            slot=slot,
            rank=RankId(info.name, rank),
            metrics=self._metrics,
            log=self._log,
            clock=self._clock,
            wall_clock=self._wall_clock,
            context=self._context,
            snapshot=partial(fetch_snapshot, self._client, info.url, path) if path else None,
            times=self._stream_times,
        )

    def _show(self, worker: Worker, status: RankStatus, reason: str) -> None:
        """Set and report a worker's status; a draining worker stays so until it is undrained."""
        if worker.is_draining and status is RankStatus.READY:
            status = RankStatus.DRAINING
        if (status, reason) != (worker.status, worker.reason):
            level = self._log.warning if status is RankStatus.DOWN else self._log.info
            level("worker " + status, worker=worker.name, url=worker.spec.url, reason=reason or None)
        worker.status, worker.reason = status, reason
        for slot in worker.slots:
            self._ranks.set_status(slot, status)
        if status is RankStatus.READY and self._tasks is not None and self._outgoing.dispensable(self._workers):
            self._tasks.create_task(self._outgoing.end_dispensable(self._workers))


def _is_double(spec: WorkerSpec, other: Worker) -> str:
    return f"{spec.url} is the same server as worker {other.name!r} at {other.spec.url}, which is registered already"
