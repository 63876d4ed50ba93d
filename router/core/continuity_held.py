"""Messages of a rank's event stream that are held, and how they are applied: parts of ``continuity``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from router.core.continuity_types import Action, Apply, Continuity, Phase
from router.wire.kv_events import EventBatch

Step = tuple[Continuity, list[Action]]


def hold(state: Continuity, sequence: int, batch: EventBatch) -> Continuity:
    """Keep a message by its number, once of each process."""
    at = bisect_left(state.held, sequence, key=lambda item: item[0])
    if any(
        item[0] == sequence and item[1].epoch == batch.epoch
        for item in state.held[at : at + len(state.seen_epochs) + 1]
    ):
        return state
    return replace(state, held=(*state.held[:at], (sequence, batch), *state.held[at:]))


def drain(state: Continuity) -> Step:
    """Apply what is held and follows without a gap."""
    expected, timestamp = state.expected, state.last_timestamp
    if expected is None or not state.is_verified:
        return state, []
    actions: list[Action] = []
    for sequence, batch in state.held:
        if sequence != expected:
            break
        actions.append(Apply(batch))
        expected, timestamp = sequence + 1, batch.timestamp
    applied, held = state.held[: len(actions)], state.held[len(actions) :]
    since = (*state.since, *applied) if state.phase is Phase.SNAPSHOT else ()
    return replace(state, expected=expected, last_timestamp=timestamp, held=held, since=since), actions


def settle(state: Continuity, actions: list[Action]) -> Step:
    """Be live. Without a picture, begin with the last unbroken run of what is held: only that surely still holds."""
    state = replace(state, phase=Phase.LIVE, is_verified=True, checked=None, since=())
    if state.expected is None and state.held:
        epoch = state.epoch or state.held[-1][1].epoch
        held = tuple(item for item in state.held if item[1].epoch == epoch)
        start = len(held) - 1
        while start and held[start - 1][0] == held[start][0] - 1:
            start -= 1
        first = held[start][0]
        state = replace(state, expected=first, epoch=epoch, held=held[start:], is_whole=not first)
    return then(actions, drain(state))


def then(first: list[Action], step: Step) -> Step:
    """A step with other actions before its own."""
    state, actions = step
    return state, [*first, *actions]
