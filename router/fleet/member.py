"""A rank that is known: its live cells, and how decisions and the admin plane see it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from router.core.breaker import BreakerState
from router.core.index import PrefixIndex
from router.core.pace import PaceLearner
from router.core.types import (
    RankId,
    RankLoad,
    RankPace,
    RankStatus,
    RankView,
    Residency,
    Trust,
    WorkerRole,
)
from router.fleet.target import ModelCard, Target
from router.wire.kv_events import EventBatch

#: So many store events without any effect, and a rank's stream is reported as not understood.
DEAF_EVENTS = 16


@dataclass(slots=True)
class HeldBack:
    """Events that came after a reset, but perhaps from before it: until the engine's own clear, or ``until``. Of each
    part of a batch, whether it is the last.
    """

    until: float
    batches: list[tuple[EventBatch, bool]] = field(default_factory=list)


@dataclass(slots=True)
class Member:
    """A rank that is known, with its live cells."""

    slot: int
    id: RankId
    target: Target
    models: frozenset[str]
    status: RankStatus
    pace: RankPace
    learner: PaceLearner
    load: RankLoad
    trust: Trust = field(default_factory=Trust)
    residency: Residency = field(default_factory=Residency)
    pool_tokens: int | None = None
    pool_blocks: int | None = None
    prefill_chunk_tokens: int | None = None
    max_running_requests: int | None = None
    retention_tokens: int | None = None
    index: PrefixIndex | None = None
    block_tokens: int | None = None
    #: When it last said itself that its cache is empty.
    cleared_at: float = -math.inf
    #: Store events since one had an effect.
    idle_events: int = 0
    #: Its picture was lost, and its stream has not been told.
    is_torn: bool = False
    cards: Mapping[str, ModelCard] = field(default_factory=dict)
    #: It computes prompts only. Asked for several times a request.
    is_prefill: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_prefill = self.target.part.role is WorkerRole.PREFILL

    @property
    def blocks(self) -> int:
        """What it is known to hold."""
        return self.index.blocks(self.slot) if self.index is not None else 0

    @property
    def entered_blocks(self) -> int:
        """What its events have brought in so far."""
        return self.index.applied_blocks(self.slot) if self.index is not None else 0

    @property
    def is_deaf(self) -> bool:
        """Store events arrive, and not one block of the last ones could be entered: something does not fit."""
        return self.idle_events >= DEAF_EVENTS

    @property
    def labels(self) -> tuple[str, str]:
        """Metric labels."""
        return (self.id.worker, str(self.id.rank))

    def view(self, load: RankLoad) -> RankView:
        """As decisions see it; ``load`` is that of all routers."""
        return RankView(
            slot=self.slot,
            id=self.id,
            models=self.models,
            status=self.status,
            load=load,
            pace=self.pace,
            trust=self.trust,
            pool_tokens=self.pool_tokens,
            residency=self.residency,
            part=self.target.part,
        )

    def info(self, breaker: BreakerState) -> RankInfo:
        """As the admin plane sees it."""
        return RankInfo(
            id=self.id,
            slot=self.slot,
            role=self.target.part.role,
            status=self.status,
            models=tuple(sorted(self.models)),
            inflight=self.load.inflight,
            waiting_tokens=self.load.waiting_tokens,
            prefill_tokens_per_second=1.0 / (self.pace.factor * self.pace.token_seconds),
            trust_ratio=self.trust.ratio,
            breaker=breaker,
            resident_blocks=self.blocks,
            block_tokens=self.block_tokens,
            pool_tokens=self.pool_tokens,
        )


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank as the admin plane shows it."""

    id: RankId
    slot: int
    role: WorkerRole
    status: RankStatus
    models: tuple[str, ...]
    inflight: int
    waiting_tokens: int
    prefill_tokens_per_second: float
    trust_ratio: float
    breaker: BreakerState
    resident_blocks: int
    block_tokens: int | None
    pool_tokens: int | None
