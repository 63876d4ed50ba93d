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

**Ahead.** While a step runs, the one behind it can be launched (``schedule_ahead``) for those who run already: each
goes on with the token that is being sampled. Nobody is admitted or preempted in it. Whoever turns out to have ended
has run one position in vain, and keeps his pages until that step has been committed, too.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from operator import gt

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.transfers import Mover
from engine_shim.schedule.cache_face import CacheFace
from engine_shim.schedule.chunks import Chunks
from engine_shim.schedule.entry import Entry, by_precedence
from engine_shim.schedule.launches import Launches
from engine_shim.schedule.leaders import find_leader
from engine_shim.schedule.limits import Limits
from engine_shim.schedule.memory import Memory
from engine_shim.schedule.stats import Counters, Stats, stats_of
from engine_shim.schedule.transit import OffloadPlan
from engine_shim.types import Batch, CacheLayout, Chunk, FinishReason, Output, Request, Sampled, SchedulingPolicy


class Scheduler(CacheFace):
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
        events = EventRecorder(layout)
        super().__init__(Memory(layout, events, plan=offload, mover=mover), events)
        self._max_running = max_running
        self._chunk_tokens = chunk_tokens
        self._policy = policy
        self._limits = Limits(min(max_context_tokens, self._memory.context_tokens), eos_token_ids)
        self._chunks = Chunks(self._memory, self._limits, draft_tokens=draft_tokens)
        self._entries: dict[str, Entry] = {}
        self._waiting: list[Entry] = []  # by precedence
        self._running: list[Entry] = []  # as they were admitted
        self._launches = Launches(layout, drafts=draft_tokens > 0)
        self._room_short: tuple[int, ...] | None = None  # what room there was when who is next had none; None: he had
        self._outputs: list[Output] = []
        self._arrivals = self._admissions = 0
        self._counters = Counters()

    # --- requests come and go -----------------------------------------------------------------------

    @property
    def context_tokens(self) -> int:
        """Prompt and output of one request together: the given limit, or what the device or the host can hold."""
        return self._limits.context_tokens

    @property
    def has_work(self) -> bool:
        """A request is unfinished, a step is launched, or an output was not drained."""
        return bool(self._entries or self._launches or self._outputs)

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
        self._room_short = None

    def abort(self, request_id: str) -> bool:
        """End a request early; False if there is no such request.

        If a launched step may still write its pages, it keeps them and ends in ``commit``; else it ends now.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.aborted:
            return False
        if entry.launches:
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
        if self._launches:
            raise RuntimeError("the batch before this one was not committed")
        self.poll()
        chunks: dict[Entry, Chunk] = {}
        # Every running request has its token first, and of what is left drafts take no more than prefills.
        self._chunks.begin(draft_budget=(self._chunk_tokens - len(self._running)) // 2)
        for entry in self._decodes_first():
            budget = self._chunk_tokens - _total(chunks)
            if budget == 0:
                break
            # A receipt is gone if another one has preempted it in this very step.
            if entry.receipt is not None and self._memory.may_run(entry):
                self._schedule_running(entry, min(entry.next_tokens, budget), chunks)
        self._admit(chunks)
        return self._launch(chunks) if chunks else None

    def schedule_ahead(self) -> Batch | None:
        """The batch behind the launched one, which is to be launched before that has been committed.

        None where it has to wait: somebody could be admitted, needs his token known, or has no page left.
        """
        if not self._launches.can_be_followed():
            return None
        self.poll()
        if self._may_admit():
            return None
        chunks: dict[Entry, Chunk] = {}
        self._chunks.begin(draft_budget=0)
        for entry in self._decodes_first():
            budget = self._chunk_tokens - _total(chunks)
            if budget == 0:
                break
            if entry.load is not None or entry.sinking is not None or self._ends_with_launched(entry):
                continue
            if entry.head_pages is not None:
                return None
            fitting = self._memory.fit(entry, min(entry.next_tokens, budget))
            if fitting == 0:
                return None
            chunks[entry] = self._chunks.cut(entry, fitting)
        return self._launch(chunks) if chunks else None

    def commit(self, batch: Batch, sampled: Sequence[Sampled]) -> list[Output]:
        """Book what the runner did with the oldest launched batch: something for each chunk that samples, in order."""
        if len(sampled) != sum(chunk.samples for chunk in batch.chunks):
            raise ValueError(f"{len(sampled)} results do not fit the chunks that sample")
        entries = self._landed(batch)
        results = iter(sampled)
        outputs = [
            self._commit_chunk(entry, chunk, next(results) if chunk.samples else None)
            for entry, chunk in zip(entries, batch.chunks, strict=True)
        ]
        return [output for output in outputs if output is not None]

    def fail(self, batch: Batch) -> list[Output]:
        """Give up on the oldest launched batch, which the runner did not finish: its requests end with ``ERROR``.

        Nothing they computed since their last store is kept. What was launched behind it must have come to its end, and
        counts for nothing; requests that were only in that go on.
        """
        entries = self._landed(batch)
        behind = self._recall()
        outputs = []
        for entry in entries:
            if entry.request.finish is None:
                del self._entries[entry.request.id]
                entry.request.finish = FinishReason.ABORT if entry.aborted else FinishReason.ERROR
                outputs.append(Output(request=entry.request, tokens=(), finish=entry.request.finish))
            self._memory.drop(entry)
            self._running.remove(entry)
        self._restart(entry for entry in behind if entry not in entries)
        return [*outputs, *self.drain_outputs()]

    def rewind(self, batch: Batch) -> list[Output]:
        """Give up on a launched batch whose load did not arrive: its requests start again from what the tree has."""
        self._restart(self._landed(batch))
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
        while (fitting := self._memory.fit(entry, wanted)) < wanted:
            if self._memory.sink(entry, fitting=fitting):
                if self._memory.may_run(entry):
                    continue
                return
            if fitting:
                break
            if self._memory.lends_pages or (len(self._running) == 1 and self.awaits_transfers):
                return
            assert len(self._running) > 1, "a request that is alone always has room"
            last = max(self._running, key=by_precedence)
            chunks.pop(last, None)
            self._preempt(last)
            if last is entry:
                return
        chunks[entry] = self._chunks.cut(entry, fitting)

    def _admit(self, chunks: dict[Entry, Chunk]) -> None:
        self._room_short = None
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
            wanted = self._memory.within_reach(entry, min(entry.next_tokens, budget))
            # Nobody is preempted for a newcomer, and each running request keeps a page to grow into.
            fitting = self._memory.fit(entry, wanted, spare_pages=len(self._running))
            is_cut = fitting < wanted and self._running
            if fitting == 0 or is_cut or not self._memory.has_room_below(entry):
                self._memory.leave(entry)
                entry.request.computed_tokens = 0
                self._room_short = self._memory.room()
                return
            entry.leader = None
            self._waiting.remove(entry)
            self._running.append(entry)
            self._admissions += 1
            if not entry.admitted:
                entry.admitted, entry.request.cached_tokens = True, entry.request.computed_tokens
                self._counters.count_admission(entry, times=1)
            if self._memory.begin(entry):
                chunks[entry] = self._chunks.cut(entry, fitting)

    def _decodes_first(self) -> list[Entry]:
        return sorted(self._running, key=lambda entry: entry.remaining_tokens > 1)

    def _ends_with_launched(self, entry: Entry) -> bool:
        """Whether a request has ended, or will by its length with the token that is being sampled."""
        request, sampled = entry.request, entry.launched_samples
        return request.finish is not None or (sampled > 0 and self._limits.unsampled_tokens(request) <= sampled)

    def _may_admit(self) -> bool:
        """Whether the next step could take somebody in; who had no room is asked again when there is more."""
        if not self._waiting or len(self._running) >= self._max_running:
            return False
        if self._room_short is not None and not any(map(gt, self._memory.room(), self._room_short)):
            return False
        return not all(map(self._memory.awaits_fetch, self._waiting))

    def _launch(self, chunks: dict[Entry, Chunk]) -> Batch:
        loads = [transfer for entry in chunks if entry.load for transfer in entry.load.outstanding]
        batch = Batch(tuple(chunks.values()), tuple(loads))
        self._launches.add(batch, tuple(chunks))
        self._memory.held_back.launched()
        return batch

    def _landed(self, batch: Batch) -> tuple[Entry, ...]:
        """The oldest launched step is over; returns who was in it."""
        entries = self._launches.end(batch).entries
        self._memory.held_back.committed()
        return entries

    def _recall(self) -> list[Entry]:
        """Count every launched step as over and as never run; returns who was in them."""
        return list({entry: None for launch in tuple(self._launches) for entry in self._landed(launch.batch)})

    def _restart(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.aborted:
                self._leave(entry)
                del self._entries[entry.request.id]
                self._end(entry.request, FinishReason.ABORT)
            else:
                self._requeue(entry)

    def _commit_chunk(self, entry: Entry, chunk: Chunk, sampled: Sampled | None) -> Output | None:
        request = chunk.request
        if request.finish is not None:  # with the step before
            self._leave(entry)
            return None
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
            del self._entries[request.id]
            if entry.launches:
                self._memory.store(entry)
            else:
                self._leave(entry)
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
            self._counters.count_admission(entry, times=-1)
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

    # --- for metrics and tests ----------------------------------------------------------------------

    def stats(self) -> Stats:
        """Numbers of this moment and counts since the start."""
        return stats_of(
            self._counters,
            self._memory.cache.components,
            running=len(self._running),
            waiting=len(self._waiting),
            below=self._memory.offload.stats() if self._memory.offload else None,
        )

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache contradicts itself, or a launched step uses what is free."""
        self._memory.check_integrity()
        self._launches.check(self._memory.cache.pools)


def _total(chunks: dict[Entry, Chunk]) -> int:
    return sum(chunk.count + chunk.room for chunk in chunks.values())
