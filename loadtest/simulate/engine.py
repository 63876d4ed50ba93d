"""One rank of a continuous-batching engine as a fluid: work flows at rates that change only when something happens.

Prompts are computed one after another, first come first served, in quanta of 150 ms between which all running requests
decode one step. A prompt starts when it and its reply fit beside what is in use; the first in the queue blocks others.
Its blocks can be reused, and are announced, when its prefill is done; a reply's blocks are not kept. An engine may
have layers with a sliding window beside those with full attention (``windows``).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.simulate.cache import RunCache
from loadtest.simulate.runs import Path, Run, path_blocks
from loadtest.simulate.windows import Told, WindowCache

#: At full speed: 22,000 prompt tokens a second at the start of a context, 15,000 at 100,000 tokens.
TOKEN_SECONDS = 1 / 22_000
FULL_SPEED_RATE = 15_000
ATTENTION_SECONDS = (1 / FULL_SPEED_RATE - TOKEN_SECONDS) / 100_000
MAX_RUNNING = 64
#: A token loaded from the host tier, in tokens computed.
LOAD_RATIO = 0.2
_QUANTUM_SECONDS = 0.15
_STEP_SECONDS = 0.022
_STEP_REQUEST_SECONDS = 1e-4
_STEP_TOKEN_SECONDS = 1e-8
_EPSILON = 1e-9


def prefill_work(uncached_tokens: int, context_tokens: int) -> float:
    """Seconds at full speed to compute the last ``uncached_tokens`` of a context."""
    attention = uncached_tokens * (context_tokens - uncached_tokens / 2)
    return TOKEN_SECONDS * uncached_tokens + ATTENTION_SECONDS * attention


@dataclass(slots=True, eq=False)
class Job:
    """A request inside an engine. What is cached, loaded from the host, and to be done is known once its prefill has
    started; so is where a window has to be left behind on the way (``fork_blocks``, 0: nowhere).
    """

    path: Path
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    loaded_tokens: int = 0
    work: float = 0.0
    fork_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears of an engine's progress: a prefill or a reply is done, what is held of a run (device, host, window)."""

    first_token: Callable[[Job], None]
    finished: Callable[[Job], None]
    stored: Callable[[Run, int], None]
    loadable: Callable[[Run, int], None]
    windowed: Told


class Engine:
    """``slowdown`` divides the speed of prefill, ``decode_slowdown`` that of decoding. Without ``window_blocks`` all
    layers have full attention; with them some have that window, and a pool of ``window_pool_blocks``.

    Call ``advance`` to the present before anything else; ``next_event`` says when to call again.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        pool_blocks: int,
        host_blocks: int,
        block_tokens: int,
        slowdown: float,
        decode_slowdown: float = 1.0,
        window_blocks: int = 0,
        window_pool_blocks: int = 0,
    ) -> None:
        self._listener = listener
        self._block_tokens = block_tokens
        self._slowdown = slowdown
        self._decode_slowdown = decode_slowdown
        self._pool_blocks = pool_blocks
        self._host_blocks = host_blocks
        self._window_blocks = window_blocks
        self._window_pool_blocks = window_pool_blocks
        self.busy_seconds = 0.0
        self.now = 0.0
        self._reset()

    def empty(self) -> list[Job]:
        """Lose everything, as a restart does. Returns the jobs that were lost."""
        current = [self._prefilling] if self._prefilling else []
        lost = [*self._queue, *current, *(job for _, _, job in self._running)]
        self._reset()
        return lost

    def _reset(self) -> None:
        self.cache = RunCache(self._pool_blocks, self._listener.stored)
        self.host = RunCache(self._host_blocks, self._listener.loadable) if self._host_blocks else None
        self.windows: WindowCache | None = None
        if self._window_blocks:
            self.windows = WindowCache(self._window_pool_blocks, self._window_blocks, self._listener.windowed)
        self._queue: deque[Job] = deque()
        self._prefilling: Job | None = None
        self._remaining = 0.0
        self._steps = 0.0
        self._running: list[tuple[float, int, Job]] = []
        self._running_tokens = 0
        self._jobs_started = 0

    def submit(self, job: Job) -> None:
        """A request arrives now."""
        self._queue.append(job)
        self._start_prefill()

    def advance(self, now: float) -> None:
        """Let the time since the last call pass, and everything happen that was due."""
        while (due := self.next_event()) <= now + _EPSILON:
            self._flow(due)
            self._happen()
        self._flow(now)

    def next_event(self) -> float:
        """When the next prefill or reply ends; infinity if nothing runs."""
        prefill_rate, step_rate = self._rates()
        due = float("inf")
        if self._prefilling is not None:
            due = self._remaining / prefill_rate
        if self._running:
            due = min(due, (self._running[0][0] - self._steps) / step_rate)
        return self.now + max(0.0, due)

    def _rates(self) -> tuple[float, float]:
        """Prefill seconds, and decode steps, done in a second."""
        running = len(self._running)
        if not running:
            return 1.0, 0.0
        step = self._decode_slowdown * (
            _STEP_SECONDS + _STEP_REQUEST_SECONDS * running + _STEP_TOKEN_SECONDS * self._running_tokens
        )
        if self._prefilling is None:
            return 0.0, 1.0 / step
        return _QUANTUM_SECONDS / (_QUANTUM_SECONDS + step), 1.0 / (_QUANTUM_SECONDS + step)

    def _flow(self, until: float) -> None:
        passed = until - self.now
        if passed > 0.0:
            prefill_rate, step_rate = self._rates()
            if self._prefilling is not None:
                self._remaining -= passed * prefill_rate
                self.busy_seconds += passed
            self._steps += passed * step_rate
            self.now = until

    def _happen(self) -> None:
        if self._prefilling is not None and self._remaining <= _EPSILON:
            self._end_prefill(self._prefilling)
        while self._running and self._running[0][0] <= self._steps + _EPSILON:
            _, _, job = heapq.heappop(self._running)
            self._running_tokens -= job.prompt_tokens
            self.cache.give_back(job.path, self._reply_blocks(job))
            if self.windows is not None:
                self.windows.give_back(job.path, path_blocks(job.path))
            self._listener.finished(job)
        self._start_prefill()

    def _start_prefill(self) -> None:
        while self._prefilling is None and self._queue and len(self._running) < MAX_RUNNING:
            job = self._queue[0]
            held = min(self.cache.match(job.path), (job.prompt_tokens - 1) // self._block_tokens)
            if self.windows is not None and not self.windows.has_room(job.path, path_blocks(job.path)):
                return
            if not self.cache.take(job.path, self._reply_blocks(job)):
                return
            self._queue.popleft()
            reusable = self._resume(job, held) * self._block_tokens
            job.cached_tokens = reusable
            job.work = self._slowdown * prefill_work(job.prompt_tokens - reusable, job.prompt_tokens)
            if self.host is not None:
                job.work -= self._saved_by_host(self.host, job)
            self._prefilling = job
            self._remaining = job.work

    def _resume(self, job: Job, held: int) -> int:
        """Blocks that the prompt can reuse of those that the full-attention layers hold."""
        if self.windows is None:
            return held
        usable = self.windows.usable(job.path, held)
        job.fork_blocks = held if held > usable else 0
        self.windows.take(job.path, path_blocks(job.path), fork=job.fork_blocks)
        return usable

    def _saved_by_host(self, host: RunCache, job: Job) -> float:
        """Load, not compute, what the host tier holds beyond the device. The tier keeps all that was computed."""
        most = (job.prompt_tokens - 1) // self._block_tokens
        either = max(job.cached_tokens, min(host.match(job.path), most) * self._block_tokens)
        if host.take(job.path, 0):
            host.give_back(job.path, 0)
        job.loaded_tokens = either - job.cached_tokens
        computed = self._slowdown * prefill_work(job.prompt_tokens - either, job.prompt_tokens)
        return (1.0 - LOAD_RATIO) * (job.work - computed)

    def _end_prefill(self, job: Job) -> None:
        self._prefilling = None
        for run, _ in job.path:
            self._listener.stored(run, self.cache.resident[run])
            if self.host is not None and run in self.host.resident:
                self._listener.loadable(run, self.host.resident[run])
        if self.windows is not None:
            for run, _ in job.path:
                self._listener.windowed(run, self.windows.spans.get(run))
        self._jobs_started += 1
        finish = self._steps + max(1, job.output_tokens - 1)
        heapq.heappush(self._running, (finish, self._jobs_started, job))
        self._running_tokens += job.prompt_tokens
        self._listener.first_token(job)

    def _reply_blocks(self, job: Job) -> int:
        return -(-job.output_tokens // self._block_tokens)
