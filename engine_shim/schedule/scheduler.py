"""Continuous batching with chunked prefill over a prefix cache.

One step of a rank: ``schedule`` a batch, let the runner run it, ``commit`` its tokens. In a batch stand:

1. one token of every request that decodes, so that no prefill can starve them,
2. prefill chunks of requests that run already,
3. waiting requests by *precedence*, which is arrival, or under the priority policy the request's priority (lower is
   first) and then arrival: if the head does not fit, nobody passes it.

One exception: a request that shares more of its prompt with a prefill in progress than the tree holds steps aside
until that prefill has stored the common part, so siblings that arrive together cost one prefill. It waits for one
such *leader* at most, and no longer than the leader runs; a leader that ends, fails or is preempted sets it free.

All within ``chunk_tokens``. When pages run out the tree gives up unused ones; then the *last* running request in
precedence is preempted, never one for another behind it, so the first always gets on and nothing wedges. What
a preempted request computed goes to the tree; it waits by its precedence, restarts from what is still there, and its
sampled tokens are kept. Where a transfer keeps pages, nobody is preempted: they come back. As in vLLM, what runs
makes room for what runs, never for what waits, whatever the priorities.

A request whose prefix is loaded from the host runs once the last piece of that is under way; until then it holds its
pages and others run.

A request that decodes may have up to ``draft_tokens`` drafts tried, which the runner proposes. They have what is left
over of a step, and nobody is preempted for their pages. Only those that held ever become tokens of the request.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Sequence

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.radix import RadixCache
from engine_shim.cache.transfers import Mover, Place
from engine_shim.schedule.entry import Entry, by_precedence
from engine_shim.schedule.leaders import find_leader
from engine_shim.schedule.limits import Limits
from engine_shim.schedule.memory import Memory
from engine_shim.schedule.stats import Counters, Stats, stats_of
from engine_shim.schedule.transit import OffloadPlan
from engine_shim.types import Batch, CacheLayout, Chunk, FinishReason, Output, Request, Sampled, SchedulingPolicy
from router.wire.kv_events import Event


class Scheduler:
    """Decides what one rank runs. Not thread-safe: one loop calls it.

    Raises ``ValueError`` for pools in which not even one request can run.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        max_running: int = 64,
        chunk_tokens: int = 512,
        max_context_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        offload: OffloadPlan | None = None,
        mover: Mover | None = None,
        draft_tokens: int = 0,
        policy: SchedulingPolicy = SchedulingPolicy.FCFS,
    ) -> None:
        layout.require_room()
        if max_running < 1 or chunk_tokens < 1:
            raise ValueError("max_running and chunk_tokens are at least 1")
        self._events = EventRecorder(layout)
        self._memory = Memory(layout, self._events, plan=offload, mover=mover)
        self._max_running = max_running
        self._chunk_tokens = chunk_tokens
        self._draft_tokens = draft_tokens
        self._policy = policy
        self._page = layout.page_tokens
        # The last sampled token is never computed, so it needs no page.
        self._limits = Limits(min(max_context_tokens, (layout.pages[0] - 1) * layout.page_tokens + 1), eos_token_ids)
        self._entries: dict[str, Entry] = {}
        self._waiting: list[Entry] = []  # by precedence
        self._running: list[Entry] = []  # as they were admitted
        self._launched: Batch | None = None
        self._draft_budget = 0
        self._outputs: list[Output] = []
        self._arrivals = self._admissions = 0
        self._counters = Counters()

    # --- requests come and go -----------------------------------------------------------------------

    @property
    def context_tokens(self) -> int:
        """Prompt and output of one request together: the given limit, or what the full pool can hold."""
        return self._limits.context_tokens

    @property
    def has_work(self) -> bool:
        """A request is unfinished, or an output was not drained."""
        return bool(self._entries or self._outputs)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never fit ends at once with ``FinishReason.ERROR`` (see ``drain_outputs``).

        Raises ``ValueError`` for an id in use, an empty prompt or ``max_tokens`` below 1.
        """
        if request.id in self._entries:
            raise ValueError(f"request {request.id!r} is queued already")
        if not request.prompt or request.sampling.max_tokens < 1:
            raise ValueError("a request has at least one prompt token and samples at least one")
        if len(request.prompt) >= self._limits.context_tokens:
            self._end(request, FinishReason.ERROR)
            return
        priority = request.priority if self._policy is SchedulingPolicy.PRIORITY else 0
        self._arrivals += 1
        entry = self._entries[request.id] = Entry(request, (priority, self._arrivals))
        self._memory.look_up(entry)
        insort(self._waiting, entry, key=by_precedence)

    def abort(self, request_id: str) -> bool:
        """End a request early; False if there is no such request.

        If the launched batch may still write its pages, it keeps them and ends in ``commit``; else it ends now.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.aborted:
            return False
        if self._launched and any(chunk.request is entry.request for chunk in self._launched.chunks):
            entry.aborted = True
            return True
        if entry.receipt is None:
            self._waiting.remove(entry)
        else:
            self._leave(entry)
        del self._entries[request_id]
        self._end(entry.request, FinishReason.ABORT)
        return True

    def drain_outputs(self) -> list[Output]:
        """Ends that no ``commit`` reports: refusals, and aborts outside a batch."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # --- one step -----------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next batch, or None if nothing can run. Every batch must be committed before the next call."""
        if self._launched is not None:
            raise RuntimeError("the batch before this one was not committed")
        self.poll()
        chunks: dict[Entry, Chunk] = {}
        # Every running request has its token first, and of what is left drafts take no more than prefills.
        self._draft_budget = (self._chunk_tokens - len(self._running)) // 2
        for entry in sorted(self._running, key=lambda entry: entry.remaining_tokens > 1):
            budget = self._chunk_tokens - _total(chunks)
            if budget == 0:
                break
            # A receipt is gone if another one has preempted it in this very step.
            if entry.receipt is not None and self._memory.may_run(entry):
                self._schedule_running(entry, min(entry.next_tokens, budget), chunks)
        self._admit(chunks)
        if not chunks:
            return None
        loads = [transfer for entry in chunks if entry.load for transfer in entry.load.outstanding]
        self._launched = Batch(tuple(chunks.values()), tuple(loads))
        return self._launched

    def commit(self, batch: Batch, sampled: Sequence[Sampled]) -> list[Output]:
        """Book what the runner did: something sampled for each chunk that samples, in order."""
        if batch is not self._launched:
            raise RuntimeError("this is not the launched batch")
        if len(sampled) != sum(chunk.samples for chunk in batch.chunks):
            raise ValueError(f"{len(sampled)} results do not fit the chunks that sample")
        self._launched = None
        results = iter(sampled)
        outputs = [self._commit_chunk(chunk, next(results) if chunk.samples else None) for chunk in batch.chunks]
        return [output for output in outputs if output is not None]

    def fail(self, batch: Batch) -> list[Output]:
        """Give up on a launched batch that the runner did not finish: its requests end with ``ERROR``.

        Nothing they computed since their last store is kept; requests outside the batch go on.
        """
        if batch is not self._launched:
            raise RuntimeError("this is not the launched batch")
        self._launched = None
        outputs = []
        for chunk in batch.chunks:
            entry = self._entries.pop(chunk.request.id)
            self._memory.drop(entry)
            self._running.remove(entry)
            chunk.request.finish = FinishReason.ABORT if entry.aborted else FinishReason.ERROR
            outputs.append(Output(request=chunk.request, tokens=(), finish=chunk.request.finish))
        return outputs

    def rewind(self, batch: Batch) -> list[Output]:
        """Give up on a launched batch whose load did not arrive: its requests start again from what the tree has."""
        if batch is not self._launched:
            raise RuntimeError("this is not the launched batch")
        self._launched = None
        for chunk in batch.chunks:
            entry = self._entries[chunk.request.id]
            if entry.aborted:
                self._leave(entry)
                del self._entries[chunk.request.id]
                self._end(chunk.request, FinishReason.ABORT)
            else:
                self._requeue(entry)
        return self.drain_outputs()

    def poll(self) -> None:
        """Between two steps: take note of transfers that have ended."""
        for entry in self._memory.poll():
            self._requeue(entry)

    @property
    def awaits_transfers(self) -> bool:
        """Something moves; if nothing can run, it is that which is waited for."""
        return self._memory.offload is not None and self._memory.offload.in_flight > 0

    def _schedule_running(self, entry: Entry, wanted: int, chunks: dict[Entry, Chunk]) -> None:
        """Add a chunk; if no page is left, at the cost of requests behind it, of which the last gives way itself."""
        while (fitting := self._memory.fit(entry, wanted)) == 0:
            if self._memory.lends_pages:
                return
            assert len(self._running) > 1, "a request that is alone always has room"
            last = max(self._running, key=by_precedence)
            chunks.pop(last, None)
            self._preempt(last)
            if last is entry:
                return
        chunks[entry] = self._chunk(entry, self._aligned(entry, fitting))

    def _admit(self, chunks: dict[Entry, Chunk]) -> None:
        for entry in tuple(self._waiting):
            if entry.leader is None and entry.asked_admissions != self._admissions:
                entry.asked_admissions = self._admissions
                find_leader(entry, self._running, chunks, self._memory)
            if entry.waits_for_leader or self._memory.awaits_fetch(entry):
                continue
            budget = self._chunk_tokens - _total(chunks)
            if budget == 0 or len(self._running) == self._max_running:
                return
            self._memory.admit(entry)
            wanted = min(entry.next_tokens, budget)
            # Nobody is preempted for a newcomer, and each running request keeps a page to grow into.
            fitting = self._memory.fit(entry, wanted, spare_pages=len(self._running))
            if fitting == 0 or (fitting < wanted and self._running):
                self._memory.leave(entry)
                entry.request.computed_tokens = 0
                return
            entry.leader = None
            self._waiting.remove(entry)
            self._running.append(entry)
            self._admissions += 1
            self._count_admission(entry)
            if self._memory.begin(entry):
                chunks[entry] = self._chunk(entry, self._aligned(entry, fitting))

    def _aligned(self, entry: Entry, count: int) -> int:
        """A prefill chunk cut back to a page boundary, if the cache has a use for that and the chunk holds one."""
        start = entry.request.computed_tokens
        if not self._memory.aligns_chunks or count == entry.remaining_tokens:
            return count
        aligned = (start + count) // self._page * self._page - start
        return aligned if aligned > 0 else count

    def _chunk(self, entry: Entry, count: int) -> Chunk:
        request = entry.request
        room = self._room(entry, count)
        self._draft_budget -= room
        self._memory.extend(entry, count + room)
        return Chunk(
            request=request,
            start=request.computed_tokens,
            count=count,
            tables=request.tables,
            samples=count == entry.remaining_tokens,
            draws=len(request.tokens) - len(request.prompt),
            room=room,
            rebuilt_until=entry.rebuilt_until,
            window_start=entry.window_start,
        )

    def _room(self, entry: Entry, count: int) -> int:
        """How many drafts may be tried behind the last known token, without harm to anybody."""
        if entry.prefilling or count < entry.remaining_tokens:
            return 0
        room = min(self._draft_tokens, self._draft_budget, self._limits.unsampled_tokens(entry.request) - 1)
        if self._memory.aligns_chunks:
            # Or a state that stands on a page boundary, where alone it can be kept, would be jumped over.
            room = min(room, self._page - 1 - (len(entry.request.tokens) - 1) % self._page)
        if room <= 0:
            return 0
        return max(0, self._memory.fit(entry, count + room, spare_pages=len(self._running)) - count)

    def _commit_chunk(self, chunk: Chunk, sampled: Sampled | None) -> Output | None:
        request = chunk.request
        entry = self._entries[request.id]
        self._memory.landed(entry)
        tokens: tuple[int, ...] = ()
        if entry.aborted:
            request.finish = FinishReason.ABORT
        elif sampled is not None:
            tokens = self._limits.take(request, sampled)
            self._counters.count_drafts(sampled)
        # All tokens but the last one have run through the layers as drafts.
        computed = chunk.count + max(0, len(tokens) - 1)
        self._counters.computed_tokens += computed
        self._memory.computed(entry, computed, at_prompt_end=entry.prefilling and chunk.samples)
        if request.finish is not None:
            self._leave(entry)
            del self._entries[request.id]
        elif entry.pass_stop() or (entry.prefilling and chunk.samples):
            self._memory.store(entry)
            entry.prefilling = not chunk.samples
        if not tokens and request.finish is None:
            return None
        logprobs = sampled.logprobs[: len(tokens)] if sampled is not None else ()
        return Output(request, tokens, request.finish, logprobs)

    def _preempt(self, entry: Entry) -> None:
        self._requeue(entry)
        self._counters.preemptions += 1

    def _requeue(self, entry: Entry) -> None:
        if entry.load is not None and not entry.request.output:  # what it was counted for did not arrive
            self._counters.queried_tokens -= len(entry.request.prompt)
            self._counters.cached_tokens -= entry.request.cached_tokens
            self._counters.loaded_tokens -= entry.loaded_tokens
            entry.admitted = False
        self._leave(entry)
        entry.request.computed_tokens = 0
        insort(self._waiting, entry, key=by_precedence)

    def _leave(self, entry: Entry) -> None:
        self._memory.leave(entry)
        self._running.remove(entry)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish = reason
        self._outputs.append(Output(request=request, tokens=(), finish=reason))

    def _count_admission(self, entry: Entry) -> None:
        if entry.admitted:
            return
        request = entry.request
        entry.admitted = True
        request.cached_tokens = request.computed_tokens
        self._counters.queried_tokens += len(request.prompt)
        self._counters.cached_tokens += request.cached_tokens
        self._counters.loaded_tokens += entry.loaded_tokens

    # --- the cache, for publishers and metrics ------------------------------------------------------

    def take_events(self) -> tuple[Event, ...]:
        """How the cache changed since the last call, in order."""
        return self._events.take()

    def snapshot_events(self) -> tuple[Event, ...]:
        """Store events that rebuild the cache as it is; take the pending ones first, they are part of it."""
        return self._memory.snapshot_events()

    def reset_cache(self) -> bool:
        """Forget all prefixes; False, and nothing done, while a request holds pages."""
        if not self._memory.is_idle:
            return False
        self._memory.reset()
        return True

    def stats(self) -> Stats:
        """Numbers of this moment and counts since the start."""
        return stats_of(
            self._counters,
            self._memory.cache.components,
            running=len(self._running),
            waiting=len(self._waiting),
            below=self._memory.offload.stats() if self._memory.offload else None,
        )

    @property
    def cache(self) -> RadixCache:
        """The prefix cache itself, for whoever brings pages in or takes copies of them, between two steps."""
        return self._memory.cache

    @property
    def copy_generations(self) -> dict[Place, tuple[array[int], ...]]:
        """The same for the slots of every place that pages move between."""
        offload = self._memory.offload
        return {Place.DEVICE: self.generations, **(offload.generations if offload else {})}

    @property
    def generations(self) -> tuple[array[int], ...]:
        """For each group how often each of its pages has been freed: whoever saw another number saw another page."""
        return tuple(pool.generations for pool in self._memory.cache.pools)

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache contradicts itself."""
        self._memory.check_integrity()


def _total(chunks: dict[Entry, Chunk]) -> int:
    return sum(chunk.count + chunk.room for chunk in chunks.values())
