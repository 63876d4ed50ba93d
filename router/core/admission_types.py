"""What admission is told and answers: whether a request may go, where, and why; or why it is held."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Passage(StrEnum):
    """Why a request may go."""

    OFF = "off"  # the guard sees no use in holding
    KEYLESS = "keyless"  # no conversation to charge
    UNSERVED = "unserved"  # no rank can take it: waiting for room in a cache is of no use
    CHILD = "child"  # its parent waits for it
    ADMITTED = "admitted"  # its conversation is charged already
    WARM = "warm"  # most of it is cached where it still fits
    ROOM = "room"  # a rank has room for it


class Barrier(StrEnum):
    """Why a request is held."""

    QUEUE = "queue"  # others came first
    COLD_START = "cold_start"  # where there is room, another cold conversation is being computed
    BUDGET = "budget"  # no rank has room


@dataclass(frozen=True, slots=True)
class Admit:
    """May be sent, to one of ``slots`` (None: wherever the policy likes)."""

    why: Passage
    slots: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Must wait; ``position`` counts from 1 for who waits longest."""

    ticket: int
    position: int
    why: Barrier


@dataclass(frozen=True, slots=True)
class Released:
    """A held request that may go now."""

    ticket: int
    admit: Admit


@dataclass(frozen=True, slots=True)
class AdmissionParameters:
    """Shares of a rank's pool that charges may fill, and how long a conversation is idle before it may lapse.

    A budget below the pool leaves room for contexts to grow; ``warm_budget_ratio`` is how far they may. A prompt is
    warm if ``warm_ratio`` of it is cached, in whatever tier. Room is kept for an idle conversation in proportion to
    what its context costs to get back: for the part ``idle_ratio`` of the time in which the rank could fill its whole
    pool, by computing or, where a lower tier has the context, by loading; within bounds.
    """

    budget_ratio: float = 0.85
    warm_budget_ratio: float = 1.05
    warm_ratio: float = 0.7
    idle_ratio: float = 0.3
    least_idle_seconds: float = 15.0
    most_idle_seconds: float = 120.0
