"""The nouns of routing: ranks, requests, decisions. No behaviour but derived properties. Read this first.

A *worker* is one server process behind one address. A *rank* is one data-parallel rank inside it, with a
cache of its own; ranks are what the router chooses among. Each known rank has a *slot*: a small dense integer
that indexes bit sets and arrays, given at registration and reused after the rank has left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from router.wire.frozen import Frozen


class Engine(StrEnum):
    """What a worker runs. It decides how a rank is addressed and how its events are read."""

    VLLM = "vllm"
    SGLANG = "sglang"
    SHIM = "shim"

    __hash__ = str.__hash__  # the enum's own is a call into Python, and targets are looked up for each request


class RankStatus(StrEnum):
    """Where a rank is in its life. Only READY takes new sessions; DRAINING serves its own until they have moved."""

    PENDING = "pending"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


class WorkerRole(StrEnum):
    """Which part of a request's work a worker does."""

    UNIFIED = "unified"  # all of it
    PREFILL = "prefill"  # computes prompts and hands their keys and values to a decode rank
    DECODE = "decode"  # makes answers from what a prefill rank hands over

    __hash__ = str.__hash__


class Handover(StrEnum):
    """The contract by which a prompt's keys and values reach a decode rank. The two ranks of a pair speak the same."""

    BOOTSTRAP = "bootstrap"  # SGLang: both are asked at once, and meet in a room that the router names
    PARAMS = "params"  # vLLM: prefill is asked first, and its answer tells the decode rank where to fetch

    __hash__ = str.__hash__


class Part(NamedTuple):
    """What a rank does of a request. A decode rank that is not ``is_self_sufficient`` refuses what nobody prefilled;
    one that is not ``keeps_cache`` forgets a request's context with its end.
    """

    role: WorkerRole = WorkerRole.UNIFIED
    handover: Handover = Handover.BOOTSTRAP
    is_self_sufficient: bool = True
    keeps_cache: bool = True


#: What a rank does that has no particular role.
WHOLE = Part()


class Reason(StrEnum):
    """Why a request went where it went: a metric label, a response header, an answer of explain.

    Of a pair of ranks it says why the prompt is computed where it is.
    """

    HOME = "home"  # the rank that served this conversation before, or has its history
    PREFIX = "prefix"  # another rank, whose cache holds enough of the prompt to be the cheapest
    SPILL = "spill"  # home was known and warm, but waiting there costs more than leaving
    COLD = "cold"  # nobody holds anything useful: by load
    HASH = "hash"  # session_hash: the ring named it
    TURN = "turn"  # round_robin: it was next
    LOAD = "load"  # least_loaded: it had the least to do
    RETRY = "retry"  # an earlier attempt failed elsewhere
    ONLY = "only"  # no other rank could serve it
    BYPASS = "bypass"  # a decode rank by itself: a prefill rank would cost more, or has no room
    DEGRADED = "degraded"  # a decode rank by itself, since no prefill rank can be had

    __hash__ = str.__hash__  # the enum's own is a call into Python, several times a request


class RankId(NamedTuple):
    """A rank's stable name: the worker's id and the data-parallel rank within it."""

    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


class SessionKey(NamedTuple):
    """Who asks. ``agent`` is empty for a session's main conversation. Never made of credentials."""

    tenant: str
    session: str
    agent: str = ""


@dataclass(slots=True)
class RankLoad:
    """What the router itself has sent to a rank and not seen finished. Written by ``LoadBook`` alone.

    All seconds of work are of the speed that the rank was first taken to have. Times its pace's ``factor`` they are
    what that work takes as far as is known now: the first estimates may be many times off, and what was sent by them
    still waits when it is known better. ``recent_seconds`` and ``lasting_seconds`` are the prefill of all that was
    sent, fading within minutes (``load``), as of ``recent_at``. ``charged_tokens`` are the contexts that other routers
    have admitted to the rank; this one's own are in the books of its admission.
    """

    inflight: int = 0
    inflight_tokens: int = 0
    waiting: int = 0
    waiting_seconds: float = 0.0
    waiting_tokens: int = 0
    serving_since: float = 0.0
    recent_seconds: float = 0.0
    lasting_seconds: float = 0.0
    recent_at: float = 0.0
    charged_tokens: int = 0
    #: Of ``waiting_seconds``, those of the prompt that the rank works on since ``serving_since``.
    serving_seconds: float = 0.0


@dataclass(slots=True)
class RankPace:
    """A rank's speed as learned from its first-token times. Written by ``PaceLearner`` alone.

    Prefill of u tokens at the end of an L-token context takes ``factor * (a*u + b*u*(L - u/2))`` seconds.
    """

    token_seconds: float
    attention_seconds: float
    factor: float = 1.0
    decode_request_seconds: float = 1e-4
    decode_token_seconds: float = 1e-8
    #: What a decode rank takes to fetch a token's keys and values from a prefill rank.
    transfer_token_seconds: float = 5e-6


@dataclass(slots=True)
class Trust:
    """How much of a rank's predicted reuse to believe, 0 to 1. Written by ``core/pace`` alone."""

    ratio: float = 1.0


@dataclass(slots=True)
class Residency:
    """How much a rank is believed to hold. Written by the owner of the index."""

    tokens: int = 0


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as the decision sees it. ``load``, ``pace``, ``trust``, ``residency`` are live cells, read only here."""

    slot: int
    id: RankId
    models: frozenset[str]
    status: RankStatus
    load: RankLoad
    pace: RankPace
    trust: Trust
    pool_tokens: int | None = None
    residency: Residency | None = None
    part: Part = WHOLE

    @property
    def trust_ratio(self) -> float:
        """How far the rank's predicted reuse is believed."""
        return self.trust.ratio

    def resident_tokens(self) -> int:
        """Tokens the rank is believed to hold now."""
        return self.residency.tokens if self.residency is not None else 0


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet at one moment. A new view is published when a rank comes, goes or changes status.

    ``is_disaggregated``: some rank does a part of the work only.
    """

    ranks: tuple[RankView, ...] = ()
    version: int = 0
    is_disaggregated: bool = False


class RouteRequest(Frozen, frozen=True):
    """What a decision needs to know of a request.

    ``reusable_tokens[slot]`` is the usable cached prefix on that rank (absent: none).
    ``home`` is the slot that served this conversation, or holds its history, if that is known.
    ``loadable_tokens[slot]`` is the same prefix when lower tiers count too (absent: no more than is reusable).
    ``allowed`` are the slots that admission left open (None: all).
    ``return_ratio`` is how likely the conversation is to ask again soon, as far as is known.
    ``handovers`` are the contracts by which prompt and answer may be computed apart; none: any rank does.
    ``prefill_home`` is the slot of the prefill rank that computed this session's last prompt.
    ``charged_elsewhere[slot]`` are the tokens with which other routers charge this conversation on that rank, and will
    not once it is served here: while it has requests in flight there, none.
    ``is_beginning``: requests of the session are on their way, and none has been answered yet.
    ``stored_tokens[slot]`` is the prefix that full attention finds on that rank, of which other kinds of layers may let
    less be reused. Told of conversations without a home (absent: no more than is reusable).
    ``common_tokens`` of the prompt are of other conversations as well (None: not known).
    ``at_home[slot]`` are the sessions at home on that rank that have come back soon before (absent: none).
    ``parent_home`` is the slot of the rank that its parent is at home on, if it has one, ``prefill_parent_home`` of the
    one that computed the parent's last prompt where ranks share the work.
    """

    model: str
    prompt_tokens: int
    output_tokens: int
    reusable_tokens: Mapping[int, int] = msgspec.field(default_factory=dict)
    session: SessionKey | None = None
    home: int | None = None
    exclude: frozenset[int] = frozenset()
    loadable_tokens: Mapping[int, int] = msgspec.field(default_factory=dict)
    allowed: frozenset[int] | None = None
    return_ratio: float = 1.0
    handovers: frozenset[Handover] = frozenset()
    prefill_home: int | None = None
    is_beginning: bool = False
    charged_elsewhere: Mapping[int, int] = msgspec.field(default_factory=dict)
    stored_tokens: Mapping[int, int] = msgspec.field(default_factory=dict)
    common_tokens: int | None = None
    at_home: Mapping[int, int] = msgspec.field(default_factory=dict)
    parent_home: int | None = None
    prefill_parent_home: int | None = None


class Price(NamedTuple):
    """The expected cost of one rank, in seconds, split into its terms."""

    slot: int
    wait_seconds: float
    work_seconds: float
    decode_seconds: float
    evict_seconds: float
    move_seconds: float
    transfer_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        """What is compared."""
        return (
            self.wait_seconds
            + self.work_seconds
            + self.decode_seconds
            + self.evict_seconds
            + self.move_seconds
            + self.transfer_seconds
        )


class Decision(Frozen, frozen=True):
    """Where a request goes, why, and what is expected of it there.

    Of a pair ``prefill`` is what the prefill rank is to do; the slot is the decode rank's, which is handed
    ``transfer_tokens`` of the prompt, and the other expectations are those of the prefill rank. ``pair_seconds`` and
    ``alone_seconds`` are the prices of the cheapest pair and of the cheapest single rank, where these were weighed.
    """

    slot: int
    id: RankId
    reason: Reason
    expected_cached_tokens: int
    best_cached_tokens: int
    expected_prefill_seconds: float
    prices: Sequence[Price] = ()
    prefill: Decision | None = None
    transfer_tokens: int = 0
    pair_seconds: float | None = None
    alone_seconds: float | None = None
