"""What happens to a rank's event stream, and what is done about it: the nouns of ``continuity``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from router.wire.kv_events import EventBatch, Snapshot


class Cause(StrEnum):
    """Why messages are asked for again, or a picture is thrown away. A label of ``homing_kv_resyncs_total``."""

    JOIN = "join"
    CHECK = "check"  # the connection was made again, or nothing came for long: is the tail whole?
    GAP = "gap"
    RESTART = "restart"
    REPLAY = "replay"  # a replay failed or did not reach back far enough
    SNAPSHOT = "snapshot"  # a snapshot could not be had
    DAMAGE = "damage"
    LAYOUT = "layout"  # blocks of another size turned up, and the index had to begin anew
    OVERFLOW = "overflow"  # more was held than may be


#: After these another process may publish: its cache may be laid out in another way.
MAY_BE_ANOTHER = frozenset({Cause.RESTART, Cause.CHECK, Cause.REPLAY})


class ReplayResult(StrEnum):
    """How a replay ended. A label of ``homing_kv_event_replays_total``."""

    WHOLE = "whole"
    UNCHANGED = "unchanged"  # a check: nothing had been missed
    INCOMPLETE = "incomplete"
    FAILED = "failed"


# --- events: what happened to the streams ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """The subscription is connected, for the first time or again."""


@dataclass(frozen=True, slots=True)
class Check:
    """It is time to ask whether the last message was lost, the publisher replaced, or a picture can be had at last."""


@dataclass(frozen=True, slots=True)
class Message:
    """A live message."""

    sequence: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class Damaged:
    """A live message, or part of replay ``ticket``, that could not be decoded."""

    sequence: int | None
    ticket: int | None = None


@dataclass(frozen=True, slots=True)
class ReplayPart:
    """One message of the replay asked for with ``ticket``."""

    ticket: int
    sequence: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """The replay's end marker came."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """A snapshot came."""

    ticket: int
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class AskFailed:
    """A replay or snapshot did not come in time, or broke."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """Somebody else knows that the worker is a new process."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """The index could not keep its picture of the rank, and must be told everything again."""

    cause: Cause = Cause.LAYOUT


Event = Joined | Check | Message | Damaged | ReplayPart | ReplayEnd | SnapshotTaken | AskFailed | Restarted | Discarded


# --- actions: what the shell must do, in this order -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Apply:
    """Enter these events into the index."""

    batch: EventBatch


@dataclass(frozen=True, slots=True)
class Load:
    """Replace the rank's picture by this snapshot."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget the rank's picture."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask for the messages from ``start`` on; answers carry ``ticket``. Replaces any ask still open."""

    start: int
    ticket: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask for a snapshot; the answer carries ``ticket``. Replaces any ask still open."""

    ticket: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class ReplayDone:
    """A replay is over; for the metrics."""

    result: ReplayResult


Action = Apply | Load | Clear | AskReplay | AskSnapshot | ReplayDone


# --- where a stream stands ------------------------------------------------------------------------


class Phase(StrEnum):
    """What the state machine waits for."""

    LIVE = "live"  # the next message
    REPLAYING = "replaying"  # the parts of a replay
    SNAPSHOT = "snapshot"  # a snapshot


Held = tuple[tuple[int, EventBatch], ...]


@dataclass(frozen=True, slots=True)
class Continuity:
    """Where one rank's stream stands. ``expected`` is the next sequence number to apply; None: no picture yet."""

    has_replay: bool
    has_snapshot: bool
    phase: Phase = Phase.LIVE
    expected: int | None = None
    live_next: int | None = None
    epoch: str | None = None  # of the picture
    seen_epochs: tuple[str, ...] = ()  # in the order in which they were first seen
    asked_epochs: tuple[str, ...] = ()  # those seen when the open ask was made: its answer tells which one lives
    past_epochs: tuple[str, ...] = ()
    last_timestamp: float | None = None
    ticket: int = 0
    asked_next: int = 0  # messages below this had been published when the open replay was asked for
    checked: int | None = None  # the open ask is only to tell whether there is anything from this number on
    is_whole: bool = False  # the picture has all from before its first message, too
    is_last_resort: bool = False  # the open replay is to fill an empty picture
    is_verified: bool = True  # the open replay is known to come from the publisher of the picture
    has_parts: bool = False  # the open replay has brought something
    held: Held = ()  # by sequence, none below ``expected``
    since: Held = ()  # applied since a snapshot was asked for that is to replace a picture

    @property
    def lacks_past(self) -> bool:
        """Whether there is a picture, and a snapshot would have more."""
        return self.has_snapshot and self.expected is not None and not self.is_whole

    @property
    def is_checked_easily(self) -> bool:
        """Whether a check asks no more than one message of a rank that answers in no time."""
        return self.has_snapshot and self.has_replay and self.expected is not None and self.is_whole
