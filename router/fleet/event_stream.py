"""One rank's cache events: ZMQ subscription, replay and snapshot, driven by ``core.continuity``.

This module moves bytes and keeps time; what to do about a gap or a restart is decided there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

import zmq
import zmq.asyncio
from structlog.typing import FilteringBoundLogger
from zmq.utils.monitor import recv_monitor_message

from router.core.continuity import advance
from router.core.continuity_types import (
    Apply,
    AskFailed,
    AskReplay,
    AskSnapshot,
    Cause,
    Check,
    Clear,
    Continuity,
    Damaged,
    Discarded,
    Event,
    Joined,
    Load,
    Message,
    Phase,
    ReplayDone,
    ReplayEnd,
    ReplayPart,
    ReplayResult,
    Restarted,
    SnapshotTaken,
)
from router.core.types import RankId
from router.errors import WireError, WorkerError
from router.fleet.reactions import SLICE_BLOCKS, Reactions, in_turns, slices, weight
from router.telemetry.metrics import Metrics
from router.wire.kv_events import (
    REPLAY_END,
    EventBatch,
    EventSource,
    Snapshot,
    decode_in_slices,
    decode_sequence,
    encode_sequence,
)

RECEIVE_HIGH_WATER: Final = 100_000
_LOG_EVERY_SECONDS: Final = 60.0
#: Clocks that are further apart than this say nothing of how late an event is.
_MOST_LAG_SECONDS: Final = 3600.0
_YIELD_EVERY_MESSAGES: Final = 64
#: So many damaged messages are known again when a replay brings them.
_MOST_DAMAGED: Final = 1024
#: The publisher learns of a subscription a moment after the handshake; an answer must not be older than that.
_SUBSCRIBE_SECONDS: Final = 0.05


class Picture(Protocol):
    """Where a rank's events go: the fleet's index. False: the picture is gone and must be told from its start.

    ``is_last``: there is no more of the batch; else it comes next.
    """

    def apply(self, slot: int, batch: EventBatch, *, now: float, is_last: bool) -> bool: ...
    def clear(self, slot: int, cause: str) -> None: ...
    def load_snapshot(self, slot: int, snapshot: Snapshot, *, now: float, is_last: bool) -> bool: ...


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """How long a stream waits, in seconds."""

    replay_idle: float = 3.0  # between two parts; engines answer between steps, and a step can be long
    replay_total: float = 120.0  # of all parts, or of a snapshot
    check_quiet: float = 0.5  # of silence, after which it is asked whether anything was lost; then ever more rarely,
    check_every: float = 30.0  # up to this. Where snapshots are had as well, no more rarely: a shim answers at once
    between_asks: float = 0.25  # so that a publisher that sends only damage is not asked without pause


class EventStream:
    """Keeps one rank's picture whole while ``run`` runs. ``snapshot`` fetches one, where the worker offers it."""

    def __init__(
        self,
        source: EventSource,
        picture: Picture,
        *,
        slot: int,
        rank: RankId,
        metrics: Metrics,
        log: FilteringBoundLogger,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        context: zmq.asyncio.Context,
        snapshot: Callable[[], Awaitable[Snapshot]] | None = None,
        times: StreamTimes = StreamTimes(),
    ) -> None:
        self._source = source
        self._picture = picture
        self._slot = slot
        self._labels = (rank.worker, str(rank.rank))
        self._metrics = metrics
        self._log = log.bind(worker=rank.worker, rank=rank.rank)
        self._clock = clock
        self._wall_clock = wall_clock
        self._context = context
        self._fetch_snapshot = snapshot
        self._times = times
        self._state = Continuity(
            has_replay=source.replay_endpoint is not None,
            has_snapshot=snapshot is not None and source.snapshot_path is not None,
        )
        self.is_synchronized = asyncio.Event()  # set once the picture is as whole as it can be had
        self._tasks: asyncio.TaskGroup | None = None
        self._ask: asyncio.Task[None] | None = None
        self._last_ask_at = -1e9
        self._stirred = asyncio.Event()  # a message has come
        self._again_pause = 0.0  # between asks at least; longer with each answer that contradicts itself
        self._last_log_at: dict[str, float] = {}  # by what the line is about
        self._last_failure_at = -1e9
        self._damaged: dict[tuple[int, int], None] = {}  # sequences and hashes of payloads that were counted
        self._applied_blocks = 0  # since others had a turn at the latest, by weight
        self._reactions = Reactions(self._react)

    async def run(self) -> None:
        """Follow the stream until cancelled; return at once where the endpoint is none."""
        subscriber = self._context.socket(zmq.SUB)
        subscriber.linger = 0
        subscriber.rcvhwm = RECEIVE_HIGH_WATER
        subscriber.setsockopt(zmq.RECONNECT_IVL, 100)
        subscriber.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        subscriber.setsockopt(zmq.TCP_KEEPALIVE, 1)
        subscriber.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        subscriber.subscribe(self._source.topic.encode())
        monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            try:
                subscriber.connect(self._source.endpoint)
            except zmq.ZMQError as error:
                self._log.warning("cache events cannot be followed", endpoint=self._source.endpoint, reason=str(error))
                return
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._watch_connection(monitor))
                self._tasks.create_task(self._check_when_quiet())
                self._tasks.create_task(self._complete())
                await self._receive(subscriber)
        finally:
            subscriber.disable_monitor()
            monitor.close()
            subscriber.close()

    def restarted(self) -> None:
        """The worker is known to be a new process: nothing of the old picture holds."""
        if self._tasks is not None:
            self._again_pause = 0.0
            self._feed(Restarted())

    def check(self) -> None:
        """Ask whether anything was missed."""
        if self._tasks is not None:
            self._feed(Check())

    # --- the three sources of what happens ------------------------------------------------------------

    async def _receive(self, subscriber: zmq.asyncio.Socket) -> None:
        received = 0
        while True:
            frames = await subscriber.recv_multipart()
            self._metrics.event_batches.labels(*self._labels).inc()
            self._feed(await self._decode_live(frames))
            await self._reactions.over()
            self._stirred.set()
            received += 1
            if received % _YIELD_EVERY_MESSAGES == 0:
                await asyncio.sleep(0)

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            await recv_monitor_message(monitor)
            self._again_pause = 0.0  # perhaps another process
            self._feed(Joined())

    async def _check_when_quiet(self) -> None:
        """That messages were lost shows with the next one; where none follows, it must be asked."""
        pause = self._times.check_quiet
        while True:
            self._stirred.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._stirred.wait()
            except TimeoutError:
                is_easy = self._state.is_checked_easily  # else it asks for much, or for what has failed before
                self._feed(Check())
                pause = self._times.check_quiet if is_easy else min(2 * pause, self._times.check_every)
            else:
                pause = self._times.check_quiet
                await asyncio.sleep(pause)

    async def _complete(self) -> None:
        """A picture that begins in the middle gets its beginning, however much the rank has to say."""
        pause = self._times.check_quiet
        while True:
            await asyncio.sleep(pause)
            if self._state.lacks_past:
                self._feed(Check())
                pause = min(2 * pause, self._times.check_every)
            else:
                pause = self._times.check_quiet

    async def _decode_live(self, frames: list[bytes]) -> Event:
        try:
            if len(frames) != 3:
                raise WireError(f"a message of {len(frames)} frames, expected 3")
            sequence = decode_sequence(frames[1])
        except WireError as error:
            self._count_damage(error)
            return Damaged(None)
        batch = await self._decode(sequence, frames[2])
        if batch is None:
            return Damaged(sequence)
        lag_seconds = self._wall_clock() - batch.timestamp
        self._metrics.event_lag.observe(min(max(0.0, lag_seconds), _MOST_LAG_SECONDS))
        return Message(sequence, batch)

    async def _decode(self, sequence: int, payload: bytes) -> EventBatch | None:
        """The batch; None where it is damaged, which is counted once however often it is replayed."""
        try:
            return await in_turns(decode_in_slices(payload))
        except WireError as error:
            known = sequence, hash(payload)
            if known not in self._damaged:
                self._count_damage(error)
                self._damaged[known] = None
                if len(self._damaged) > _MOST_DAMAGED:
                    del self._damaged[next(iter(self._damaged))]
            return None

    def _count_damage(self, error: Exception) -> None:
        self._metrics.event_damage.labels(*self._labels).inc()
        if self._is_log_due("damage"):
            self._log.warning("cache event message not understood", reason=repr(error))

    def _is_log_due(self, about: str) -> bool:
        """Whether nothing was logged ``about`` this for a while; the caller logs now."""
        now = self._clock()
        is_due = now - self._last_log_at.get(about, -1e9) >= _LOG_EVERY_SECONDS
        if is_due:
            self._last_log_at[about] = now
        return is_due

    # --- deciding and doing ----------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        assert self._tasks is not None, "there are events only while the stream runs"
        self._reactions.add(event, self._tasks)

    def _react(self, event: Event) -> Iterator[None]:
        self._state, actions = advance(self._state, event)
        discarded: Cause | None = None
        for action in actions:
            match action:
                case Apply() | Load():
                    yield from self._pause_before(action.batch if isinstance(action, Apply) else action.snapshot.batch)
                    discarded = (yield from self._bring_in(action, is_live=isinstance(event, Message))) or discarded
                case Clear(cause):
                    if self._is_log_due(f"clear {cause}"):
                        self._log.info("cache picture thrown away", cause=str(cause))
                    self._picture.clear(self._slot, cause)
                case ReplayDone(result):
                    self._metrics.replays.labels(*self._labels, result).inc()
                case AskReplay() | AskSnapshot():
                    if action.cause is Cause.GAP:
                        self._metrics.event_gaps.labels(*self._labels).inc()
                    self._start(action)
        if discarded is not None:
            if not isinstance(event, Message):  # what was asked for contradicts itself, and may do so again
                self._again_pause = min(max(2 * self._again_pause, self._times.check_quiet), self._times.check_every)
            yield from self._react(Discarded(discarded))
        elif any(isinstance(action, Load) or action == ReplayDone(ReplayResult.WHOLE) for action in actions):
            self._again_pause = 0.0
        if self._state.phase is Phase.LIVE:
            self.is_synchronized.set()

    def _pause_before(self, batch: EventBatch) -> Iterator[None]:
        """Many small messages come at once, too: those that were held, or a replay's."""
        blocks = weight(batch)
        if self._applied_blocks and self._applied_blocks + blocks > SLICE_BLOCKS:
            yield
            self._applied_blocks = 0
        self._applied_blocks += blocks

    def _bring_in(self, action: Apply | Load, *, is_live: bool) -> Generator[None, None, Cause | None]:
        """Why the picture must be told anew, if it must. A live message that cannot be applied is as good as damaged.

        What cannot be applied of an answer would come no better a second time, nor what fails time and again: behind it
        the picture goes on empty.
        """
        snapshot = action.snapshot if isinstance(action, Load) else None
        for part, is_last in slices(action.batch if isinstance(action, Apply) else action.snapshot.batch):
            now = self._clock()
            try:
                if snapshot is None:
                    is_kept = self._picture.apply(self._slot, part, now=now, is_last=is_last)
                else:
                    first, snapshot = replace(snapshot, batch=part), None
                    is_kept = self._picture.load_snapshot(self._slot, first, now=now, is_last=is_last)
            except Exception as error:  # noqa: BLE001 - the boundary: what one worker says must not end the router
                self._count_damage(error)
                if is_live and now - self._last_failure_at >= self._times.check_every:
                    self._last_failure_at = now
                    return Cause.DAMAGE
                self._picture.clear(self._slot, Cause.DAMAGE)
                return None
            if not is_kept:
                return Cause.LAYOUT
            if not is_last:
                yield
        return None

    def _start(self, ask: AskReplay | AskSnapshot) -> None:
        assert self._tasks is not None, "the machine asks only while the stream runs"
        if self._ask is not None and self._ask is not asyncio.current_task():
            self._ask.cancel()
        self._ask = self._tasks.create_task(self._answer(ask))

    async def _answer(self, ask: AskReplay | AskSnapshot) -> None:
        if ask.cause is not Cause.GAP:
            pause = self._last_ask_at + max(self._times.between_asks, self._again_pause) - self._clock()
            await asyncio.sleep(max(pause, _SUBSCRIBE_SECONDS))
        self._last_ask_at = self._clock()
        try:
            async with asyncio.timeout(self._times.replay_total):
                if isinstance(ask, AskReplay):
                    await self._replay(ask)
                elif self._fetch_snapshot is not None:
                    self._feed(SnapshotTaken(ask.ticket, await self._fetch_snapshot()))
        except (TimeoutError, zmq.ZMQError, WireError, WorkerError) as error:
            self._log_refusal(ask, str(error) or "no answer in time")
            self._feed(AskFailed(ask.ticket))

    def _log_refusal(self, ask: AskReplay | AskSnapshot, reason: str) -> None:
        if ask.ticket == self._state.ticket and self._is_log_due("refusal"):
            self._log.info("cache events could not be asked for again", reason=reason)

    async def _replay(self, ask: AskReplay) -> None:
        """Ask with a DEALER, as many answers follow; each is ``[b"", (topic,) sequence, payload]``."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.rcvhwm = 0
        try:
            dealer.connect(str(self._source.replay_endpoint))
            await dealer.send_multipart([b"", encode_sequence(ask.start)])
            number = 0
            while ask.ticket == self._state.ticket:
                number += 1
                async with asyncio.timeout(self._times.replay_idle):
                    frames = await dealer.recv_multipart()
                if len(frames) < 3:
                    raise WireError(f"a replay part of {len(frames)} frames, expected 4")
                if frames[-2] == REPLAY_END:
                    self._feed(ReplayEnd(ask.ticket))
                    return
                sequence = decode_sequence(frames[-2])
                batch = await self._decode(sequence, frames[-1])
                part = Damaged(sequence, ask.ticket) if batch is None else ReplayPart(ask.ticket, sequence, batch)
                self._feed(part)
                await self._reactions.over()
                if number % _YIELD_EVERY_MESSAGES == 0:
                    await asyncio.sleep(0)
        finally:
            dealer.close()
