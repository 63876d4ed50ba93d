"""A rank's event stream as a test tells it: numbered messages, and what the state machine does about them."""

from __future__ import annotations

from router.core.continuity import advance
from router.core.continuity_types import Action, Continuity, Event, Message
from router.wire.kv_events import EventBatch


def batch(sequence: int, *, epoch: str | None = None, start: float = 0.0) -> EventBatch:
    return EventBatch(timestamp=start + sequence, events=(), epoch=epoch)


def feed(state: Continuity, *events: Event) -> tuple[Continuity, list[Action]]:
    actions: list[Action] = []
    for event in events:
        state, more = advance(state, event)
        actions += more
    return state, actions


def live(has_replay: bool = True, has_snapshot: bool = False, upto: int = 3, epoch: str | None = None) -> Continuity:
    state = Continuity(has_replay=has_replay, has_snapshot=has_snapshot)
    return feed(state, *(Message(n, batch(n, epoch=epoch)) for n in range(upto)))[0]
