"""One data-parallel rank: a scheduler, a runner, and the thread that drives them.

::

    event loop                          engine thread
    ----------                          -------------
    submit / abort / call  --queue-->   commands, then: schedule -> launch -> land -> commit
    Mailbox.take           <--loop---   the step's events published, then its tokens, in one callback

Only the engine thread touches the scheduler, the runner and the live event socket. A step's events leave
before its tokens do, so whoever reads an answer's end can know what the cache holds.

**Overlap.** With a runner that launches, the next step is scheduled and launched while the one before runs, and only
then is that one waited for, committed and told; its tokens reach the next step on the device. Commands wait until
nothing is launched, and while one waits nothing more is launched ahead. What else a step waits for: ``Scheduler``.

**Failure.** A step whose runner raises ends that step's requests with ``ERROR`` and the rank goes on; after
``MAX_FAILED_STEPS`` such steps in a row the rank fails. What was launched behind a failed step is lost with it. A step
one of whose loads did not arrive is run again without. Any other error, a cache that contradicts itself or its shadow
above all, fails the rank at once. A failed rank ends all its requests, takes no more, and says why in ``failure``.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, cast

import structlog

from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.radix import RadixCache
from engine_shim.cache.transfers import BackgroundMover, LoadError
from engine_shim.events import EventPublisher
from engine_shim.mailbox import Mailbox
from engine_shim.metrics import Latencies
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.schedule.stats import Stats
from engine_shim.timing import Timing
from engine_shim.types import (
    Batch,
    CacheLayout,
    FinishReason,
    LaunchingRunner,
    Output,
    Request,
    Runner,
    StepLanding,
)
from router.wire.kv_events import Snapshot

log = structlog.get_logger(__name__)
#: This many steps that fail one after the other are the runner's fault, not a request's.
MAX_FAILED_STEPS = 3
#: The cache is recounted when the rank falls idle, but not more often than this.
CHECK_INTERVAL_SECONDS = 5.0
_T = TypeVar("_T")


class EngineStopped(Exception):
    """The rank takes no more work: it failed, or the process is ending."""


class Engine:
    """A rank. ``submit``, ``abort``, ``call`` and the properties are for the event loop's thread.

    ``clock`` is the one that stamped ``Request.arrival_seconds``. ``overlaps``: the runner is one that launches.
    """

    def __init__(
        self,
        rank: int,
        scheduler: Scheduler,
        *,
        runner: Runner,
        layout: CacheLayout,
        publisher: EventPublisher | None,
        clock: Callable[[], float],
        mover: BackgroundMover | None = None,
        overlaps: bool = False,
    ) -> None:
        self.rank = rank
        self.layout = layout
        self.publisher = publisher
        self.latencies = Latencies(scheduler.context_tokens)
        self.failure: str | None = None
        self._scheduler = scheduler
        self._runner = runner
        self._overlaps = overlaps
        self._launched: deque[tuple[Batch, StepLanding]] = deque()
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._mover = mover
        if mover is not None:
            mover.notify = functools.partial(self._commands.put, scheduler.poll)
        self._is_blocked = False
        self._timing = Timing(self.latencies)
        self._open: dict[str, tuple[Mailbox, int]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._stopping = False
        self._failed_steps = 0
        self._is_checked = True
        self._next_check_seconds = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{rank}", daemon=True)

    # --- for the event loop -----------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Requests submitted and not yet ended: waiting and running."""
        return len(self._open)

    @property
    def accepts(self) -> bool:
        """Whether the rank works and is not being stopped."""
        return self.failure is None and not self._stopping

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; outputs are delivered in ``loop``."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after its present step; what is in flight then ends as aborted."""
        self._stopping = True
        self._commands.put(_nothing)

    def join(self) -> None:
        """Wait for the stopped thread, then close the mover and the publisher."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._mover is not None:
            self._mover.close()
        if self.publisher is not None:
            self.publisher.close()

    def submit(self, request: Request, *, mailbox: Mailbox, index: int) -> None:
        """Hand a request to the rank. Raises ``EngineStopped``."""
        self._require_running()
        self._open[request.id] = (mailbox, index)
        self._commands.put(functools.partial(self._add, request))

    def abort(self, request_id: str) -> None:
        """End a request between this step and the next; one that has ended is left alone."""
        self._commands.put(functools.partial(self._abort, request_id))

    async def call(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` in the engine's thread between two steps. Raises ``EngineStopped``."""
        self._require_running()
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)
        self._commands.put(functools.partial(self._answer, work, answer))
        return await answer

    async def with_cache(self, work: Callable[[RadixCache], _T]) -> _T:
        """``call`` with the prefix cache: what changes in it is published. Raises ``EngineStopped``."""
        return await self.call(functools.partial(work, self._scheduler.cache))

    async def reset_cache(self) -> bool:
        """Empty the prefix cache and publish that at once; False while requests hold pages."""
        return await self.call(self._reset)

    async def snapshot(self) -> Snapshot | None:
        """All that is resident, exactly as of the last published message; None without a publisher."""
        return await self.call(self._snapshot)

    def stats(self) -> Stats:
        """The scheduler's numbers, at most one step old."""
        return self._scheduler.stats()

    # --- in the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if self._scheduler.has_work:
                    self._is_checked = False
                    self._step()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            log.exception("engine_failed", rank=self.rank)
        finally:
            self._stopping = True
            self._in_loop(self._end_all)

    def _take_commands(self) -> None:
        """Run what the event loop asked for; sleep until it asks when there is nothing else to do."""
        if self._is_blocked or not self._scheduler.has_work:
            self._idle()()
        while not self._commands.empty():
            self._commands.get()()
        self._publish()

    def _idle(self) -> Callable[[], None]:
        """The next command; the cache is recounted on the way if work was done and the last time was long ago."""
        if not self._is_checked:
            try:
                return self._commands.get(timeout=max(0.0, self._next_check_seconds - self._clock()))
            except queue.Empty:
                self._scheduler.check_integrity()
                self._is_checked = True
                self._next_check_seconds = self._clock() + CHECK_INTERVAL_SECONDS
        return self._commands.get()

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        if batch is None:
            refused = self._scheduler.drain_outputs()
            # A transfer that lands is a command, so there is something to wake up for.
            self._is_blocked = not refused and self._scheduler.awaits_transfers
            if not (refused or self._is_blocked):
                raise RuntimeError("requests wait, but the scheduler runs none of them")
            self._deliver(refused)
            return
        self._is_blocked = False
        self._launch(batch)
        while self._launched:
            if len(self._launched) == 1 and self._overlaps and self._commands.empty():
                ahead = self._scheduler.schedule_ahead()
                if ahead is not None:
                    self._launch(ahead)
            self._land()

    def _launch(self, batch: Batch) -> None:
        self._timing.scheduled(batch, self._clock())
        landing: StepLanding = functools.partial(self._runner.run, batch)
        if self._overlaps:
            try:
                landing = cast("LaunchingRunner", self._runner).launch(batch)
            except Exception as error:  # noqa: BLE001 - what a step raises is dealt with when it lands
                landing = functools.partial(_raise, error)
        self._launched.append((batch, landing))

    def _land(self) -> None:
        """Wait for the oldest launched step, book it, and tell what came of it."""
        batch, landing = self._launched.popleft()
        try:
            sampled = landing()
        except IntegrityError:
            raise
        except LoadError as error:
            log.warning("load_failed", rank=self.rank, requests=len(batch.chunks), error=str(error))
            outputs = self._scheduler.rewind(batch)
        except Exception as error:  # noqa: BLE001 - whatever a model or device raises; logged and counted
            outputs = self._fail_step(batch, error)
        else:
            self._failed_steps = 0
            outputs = self._scheduler.commit(batch, sampled)
        self._publish()
        self._deliver([*outputs, *self._scheduler.drain_outputs()])

    def _fail_step(self, batch: Batch, error: Exception) -> list[Output]:
        """Give up a batch; re-raises the runner's error when there were too many in a row."""
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error
        log.error("step_failed", rank=self.rank, requests=len(batch.chunks), exc_info=error)
        while self._launched:
            _, landing = self._launched.popleft()
            try:
                landing()
            except IntegrityError:
                raise
            except Exception as behind:  # noqa: BLE001 - it counts for nothing, however it ends
                log.warning("step_behind_failed", rank=self.rank, error=str(behind))
        return self._scheduler.fail(batch)

    def _publish(self) -> None:
        events = self._scheduler.take_events()
        if self.publisher is not None:
            self.publisher.publish(events)

    def _add(self, request: Request) -> None:
        self._timing.began(request)
        self._scheduler.add(request)

    def _abort(self, request_id: str) -> None:
        if request_id in self._timing:
            self._scheduler.abort(request_id)
            self._deliver(self._scheduler.drain_outputs())

    def _reset(self) -> bool:
        while self._scheduler.awaits_transfers and not self._scheduler.has_work:
            self._commands.get()()  # the cache is in no one's way but that of its own copies, which land
        done = self._scheduler.reset_cache()
        self._publish()
        return done

    def _snapshot(self) -> Snapshot | None:
        self._publish()
        if self.publisher is None:
            return None
        return self.publisher.snapshot(self._scheduler.snapshot_events())

    def _answer(self, work: Callable[[], _T], answer: asyncio.Future[_T]) -> None:
        result = work()
        self._in_loop(_resolve, answer, result)

    def _deliver(self, outputs: Iterable[Output]) -> None:
        now = self._clock()
        news: list[Output] = []
        for output in outputs:
            self._timing.told(output, now)
            news.append(output)
        if news:
            self._in_loop(self._hand_over, news)

    def _in_loop(self, work: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "the thread starts after the loop is known"
        self._loop.call_soon_threadsafe(work, *arguments)

    # --- back in the event loop ----------------------------------------------------------------------

    def _hand_over(self, news: list[Output]) -> None:
        for output in news:
            mailbox, index = self._open[output.request.id]
            if output.finish is not None:
                del self._open[output.request.id]
            mailbox.put(index, output.tokens, output.finish, logprobs=output.logprobs)

    def _end_all(self) -> None:
        finish = FinishReason.ABORT if self.failure is None else FinishReason.ERROR
        for mailbox, index in self._open.values():
            self.latencies.finished[finish] += 1
            mailbox.put(index, (), finish)
        self._open.clear()
        for answer in tuple(self._calls):
            if not answer.done():
                answer.set_exception(EngineStopped(self.failure or "the engine has stopped"))

    def _require_running(self) -> None:
        if not self.accepts:
            raise EngineStopped(self.failure or "the engine is stopping")


def _resolve(answer: asyncio.Future[_T], result: _T) -> None:
    if not answer.done():
        answer.set_result(result)


def _raise(error: Exception) -> NoReturn:
    raise error


def _nothing() -> None:
    """A command that only wakes the thread."""
