"""Replay a capture through the code the router runs, and compare what it predicts with what the engine reports.

The router under test is given what a router would have: messages at the time they arrived, its own requests from the
moment they were sent, their tokens as they had come, resets made through it, the groups of layers that its probe of a
new worker shows. Each request goes to the rank that served it; where that was is not judged here, only how much of the
prompt was expected to be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from router.capture.format import Capture, Frame, Reset, Sent
from router.capture.restarts import noticed_restarts
from router.core.continuity import advance
from router.core.continuity_types import Apply, Clear, Continuity, Damaged, Event, Load, Message, Restarted
from router.core.types import Engine, RankId, RankStatus
from router.errors import NoWorker
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.proxy.brain import RouterBrain
from router.proxy.types import Lease, Outcome
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.kv_events import BlockStored
from router.wire.usage import Usage

_WORKER = "capture"
#: An answer comes after its request, even where a recorder's clock saw no time pass.
_MOMENT = 1e-6
#: A capture says when a reset was answered. It was asked for no longer before.
_RESET_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One scored request: tokens expected to be cached when it was sent, and tokens that the engine reports."""

    tag: str
    at_seconds: float
    rank: int
    prompt_tokens: int
    predicted_tokens: int
    actual_tokens: int


@dataclass(frozen=True, slots=True)
class Group:
    """An attention group as its events describe it."""

    number: int
    kind: str
    block_tokens: int
    window_tokens: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a capture. ``verdicts`` is None where it has frames only."""

    name: str
    frames: int
    damaged: int
    clears: int
    groups: Sequence[Group]
    verdicts: Sequence[Verdict] | None
    #: Answered requests that say too little: no token ids of their prompts, or nothing of what was reused.
    without_ids: int = 0
    without_counts: int = 0

    @property
    def exact(self) -> int:
        """Requests predicted to the token."""
        return sum(verdict.predicted_tokens == verdict.actual_tokens for verdict in self.verdicts or ())

    @property
    def over(self) -> int:
        """Requests that reused less than predicted."""
        return sum(verdict.predicted_tokens > verdict.actual_tokens for verdict in self.verdicts or ())

    @property
    def under(self) -> int:
        """Requests that reused more than predicted."""
        return sum(verdict.predicted_tokens < verdict.actual_tokens for verdict in self.verdicts or ())


def check(capture: Capture) -> Report:
    """Replay a capture and judge every scored request in it."""
    replay = _Replay(capture)
    for at, happen in _in_order(replay, capture):
        replay.now = at
        happen()
    whole = [request for request in capture.requests or () if not request.is_failed and not request.is_cut]
    return Report(
        name=capture.name,
        frames=len(capture.frames),
        damaged=sum(frame.batch is None for frame in capture.frames),
        clears=replay.clears,
        groups=_groups(capture.frames),
        verdicts=replay.verdicts if capture.requests is not None else None,
        without_ids=sum(not request.prompt for request in whole),
        without_counts=sum(bool(request.prompt) and request.cached_tokens is None for request in whole),
    )


class _Replay:
    """A router without sockets, at a time that the capture sets."""

    def __init__(self, capture: Capture) -> None:
        self.now = 0.0
        self.clears = 0
        self.verdicts: list[Verdict] = []
        self._capture = capture
        self._leases: dict[int, Lease] = {}
        requests = capture.requests or ()
        models = _served(capture)
        ranks = sorted({0, *(frame.rank for frame in capture.frames), *(request.rank or 0 for request in requests)})
        metrics = Metrics(CollectorRegistry())
        settings = RoutingSettings()
        self._fleet = Fleet(settings, metrics, clock=lambda: self.now)
        self._brain = RouterBrain(self._fleet, settings=settings, metrics=metrics)
        for model in models:
            self._fleet.set_geometry(model, capture.geometry)
        for adapter in capture.adapters if capture.engine is not Engine.SGLANG else ():
            self._brain.set_adapter(adapter)
        self._slots: dict[int, int] = {}
        for rank in ranks:
            self._slots[rank] = slot = self._fleet.add_rank(
                RankId(_WORKER, rank),
                target=Target(host="", port=0, rank=rank, dp_size=ranks[-1] + 1, engine=capture.engine),
                models=models,
                block_tokens=capture.block_tokens,
                pool_tokens=capture.pool_tokens,
                pool_blocks=capture.pool_blocks,
                prefill_chunk_tokens=capture.prefill_chunk_tokens,
                max_running_requests=capture.max_running_requests,
                retention_tokens=capture.retention_tokens,
            )
            for index in self._fleet.indexes(min(models)):
                index.meet(slot, _probed(capture.frames, rank))
            self._fleet.set_status(slot, RankStatus.READY)
        self._all_slots = frozenset(self._slots.values())
        self._streams = {rank: Continuity(has_replay=False, has_snapshot=False) for rank in ranks}

    # --- the streams ----------------------------------------------------------------------------------

    def frame(self, frame: Frame) -> None:
        """A message arrived."""
        if frame.batch is None or frame.sequence is None:
            self._feed(frame.rank, Damaged(frame.sequence))
        else:
            self._feed(frame.rank, Message(frame.sequence, frame.batch))

    def reset(self, reset: Reset) -> None:
        """All ranks' caches were emptied, or the process is another one."""
        for rank, slot in self._slots.items():
            if reset.is_restart:
                self._feed(rank, Restarted())
            else:
                self._fleet.expect_clear(slot, since=self.now - _RESET_SECONDS)

    def _feed(self, rank: int, event: Event) -> None:
        slot = self._slots[rank]
        self._streams[rank], actions = advance(self._streams[rank], event)
        for action in actions:
            match action:
                case Apply(batch):
                    self._fleet.apply(slot, batch, now=self.now)
                case Load(snapshot):
                    self._fleet.load_snapshot(slot, snapshot, now=self.now)
                case Clear(cause):
                    self.clears += 1
                    self._fleet.clear(slot, cause)
                case _:
                    pass

    # --- the requests ---------------------------------------------------------------------------------

    def send(self, number: int, request: Sent) -> None:
        """A request leaves for the rank that served it."""
        rank = request.rank if request.rank is not None or len(self._slots) > 1 else 0
        if not request.prompt or rank is None:
            return
        prepared = self._brain.prepare_tokens(
            self._brain.resolve(request.model).model,
            request.prompt,
            fields=request.fields,
            most_tokens=request.most_tokens,
            is_whole=request.is_whole,
        )
        try:
            attempt = self._brain.choose(prepared, exclude=self._all_slots - {self._slots[rank]})
        except NoWorker:
            return
        self._leases[number] = attempt.lease
        if request.cached_tokens is not None:
            self.verdicts.append(
                Verdict(
                    tag=request.tag,
                    at_seconds=self.now,
                    rank=rank,
                    prompt_tokens=len(request.prompt),
                    predicted_tokens=attempt.decision.expected_cached_tokens,
                    actual_tokens=request.cached_tokens,
                )
            )

    def first_token(self, number: int, request: Sent) -> None:
        """Its answer begins. When the other tokens came no capture tells: they are taken to have come evenly."""
        if number not in self._leases:
            return
        began, tokens = self.now, len(request.output)
        seconds = 0.0 if request.first_token_at is None else request.finished_at - request.first_token_at
        pace = tokens / max(seconds, _MOMENT)
        self._leases[number].first_byte(lambda: min(tokens, 1 + int((self.now - began) * pace)))

    def finish(self, number: int, request: Sent) -> None:
        """Its answer has ended."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        whole = Outcome.CLIENT_GONE if request.is_cut else Outcome.OK
        outcome = Outcome.SERVER_ERROR if request.is_failed else whole
        usage = Usage(len(request.prompt), len(request.output), request.cached_tokens)
        lease.close(outcome, usage, output=request.output)


def _in_order(replay: _Replay, capture: Capture) -> Sequence[tuple[float, Callable[[], None]]]:
    """All that happened, in the order in which a router would have seen it."""
    restarts = noticed_restarts(capture.frames, capture.requests or (), capture.resets)
    happenings: list[tuple[float, int, Callable[[], None]]] = [
        *((frame.at, 0, partial(replay.frame, frame)) for frame in capture.frames),
        *((reset.at, 1, partial(replay.reset, reset)) for reset in (*capture.resets, *restarts)),
    ]
    for number, request in enumerate(capture.requests or ()):
        first = request.first_token_at if request.first_token_at is not None else request.finished_at
        happenings.append((request.at, 4, partial(replay.send, number, request)))
        if not request.is_failed:
            happenings.append((max(request.at + _MOMENT, first), 2, partial(replay.first_token, number, request)))
        happenings.append((max(request.at + _MOMENT, request.finished_at), 3, partial(replay.finish, number, request)))
    start = min((at for at, _, _ in happenings), default=0.0)
    return [(at - start, happen) for at, _, happen in sorted(happenings, key=lambda item: item[:2])]


def _probed(frames: Sequence[Frame], rank: int) -> Sequence[BlockStored]:
    """Events that show what groups of layers a rank has. A router knows before the first request: the chat that it
    sends as a worker registers (``fleet/parity``) makes the rank tell of each.
    """
    groups: dict[int, BlockStored] = {}
    for event in (event for frame in frames if frame.rank == rank and frame.batch for event in frame.batch.events):
        known = groups.get(event.group) if isinstance(event, BlockStored) else None
        if isinstance(event, BlockStored) and (known is None or event.block_tokens > known.block_tokens):
            groups[event.group] = event
    return list(groups.values())


def _served(capture: Capture) -> frozenset[str]:
    """The models that were asked for, without the adapters that SGLang's clients name behind a colon."""
    names = {request.model for request in capture.requests or ()} or {""}
    if capture.engine is not Engine.SGLANG:
        return frozenset(names)

    def served(name: str) -> str:
        base, adapter = name.rpartition(":")[::2]
        return base if base and (base in names or adapter in capture.adapters) else name

    return frozenset(map(served, names))


def _groups(frames: Sequence[Frame]) -> Sequence[Group]:
    groups: dict[int, Group] = {}
    for frame in frames:
        for event in frame.batch.events if frame.batch else ():
            if isinstance(event, BlockStored):
                found = Group(event.group, event.kind or "full_attention", event.block_tokens, event.window_tokens)
                groups.setdefault(event.group, found)
    return [groups[number] for number in sorted(groups)]
