"""Is the picture of a rank's cache whole? A state machine over its numbered messages, and what to do when it is not.

    advance(state, event) -> (state, actions)

A rank's publisher numbers its messages from 0. The picture is whole while they are applied one after the other.
Ways it breaks, and the way back:

- **Gap.** Ask a replay from the missing message; live messages are held meanwhile and applied after it.
- **Restart.** The numbers run backwards, or the epoch is another one: throw the picture away, begin anew.
- **Damage.** A live message that cannot be read is asked for again like one that is missing.
- **A tail that was lost**, with nothing behind it: a check asks for a replay, or a snapshot where there are none. That
  it fails says nothing, so the picture stays.
- **Late join, a replay that is damaged or does not reach back**: begin anew.

To begin anew is to ask for a snapshot where the rank offers one, else for a replay from 0, else to apply what follows:
an empty picture plus an unbroken run of messages claims nothing that is not there. It lacks what was there before,
though: where snapshots are offered, checks ask for one until it comes, and the picture serves meanwhile.

The publisher could have restarted unseen inside a gap. So a replay begins one message *early*, at the last one applied:
only if that message comes back with its epoch, or with the timestamp it had, is it the same publisher.
"""

from __future__ import annotations

from dataclasses import replace

from router.core.continuity_held import Step, drain, hold, settle, then
from router.core.continuity_types import (
    Action,
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
    Held,
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
from router.wire.kv_events import Snapshot

#: Live messages held during a replay or snapshot. More than this and the picture begins with what is held.
HOLD_LIMIT = 4096
_EPOCHS_REMEMBERED = 8


def advance(state: Continuity, event: Event) -> Step:
    """The next state, and what to do about it. Pure; the only way to change a state."""
    match event:
        case Message():
            return _message(state, event)
        case ReplayPart():
            return _replay_part(state, event) if _is_open(state, Phase.REPLAYING, event.ticket) else (state, [])
        case ReplayEnd():
            return _replay_end(state) if _is_open(state, Phase.REPLAYING, event.ticket) else (state, [])
        case SnapshotTaken():
            return _snapshot(state, event.snapshot) if _is_open(state, Phase.SNAPSHOT, event.ticket) else (state, [])
        case AskFailed():
            return _ask_failed(state) if state.phase is not Phase.LIVE and state.ticket == event.ticket else (state, [])
        case Damaged():
            if event.ticket is None or _is_open(state, Phase.REPLAYING, event.ticket):
                return _damaged(state, event)
            return state, []
        case Joined():
            return _joined(state)
        case Check():
            return _check(state)
        case Restarted():
            return _begin_anew(state, Cause.RESTART, held=())
        case Discarded():
            return _begin_anew(state, event.cause, held=())


def _is_open(state: Continuity, phase: Phase, ticket: int) -> bool:
    return state.phase is phase and state.ticket == ticket


# --- live messages --------------------------------------------------------------------------------


def _message(state: Continuity, event: Message) -> Step:
    sequence, batch = event.sequence, event.batch
    if batch.epoch in state.past_epochs:
        return state, []
    is_restart = _is_restart(state, event)
    state = replace(_see(state, batch.epoch), live_next=sequence + 1)
    if is_restart:
        return _begin_anew(state, Cause.RESTART, held=((sequence, batch),))
    if state.expected is not None and sequence < state.expected:
        return state, []  # a replay or snapshot brought it before
    is_told = sequence == state.expected and not state.held  # what a check of the tail asks, this tells
    if state.checked is not None and is_told and (state.is_whole or state.phase is Phase.REPLAYING):
        state = replace(state, phase=Phase.LIVE, ticket=state.ticket + 1, is_verified=True, checked=None)
    state = hold(state, sequence, batch)
    if state.phase is not Phase.LIVE:
        return drain(state) if len(state.held) + len(state.since) <= HOLD_LIMIT else _overflow(state)
    if state.expected is None:
        if sequence == 0:
            return settle(state, [])
        return _begin_anew(state, Cause.JOIN, held=state.held)
    if sequence == state.expected:
        return drain(state)
    return _ask_missing(state)


def _is_restart(state: Continuity, event: Message) -> bool:
    epoch = event.batch.epoch
    if epoch is not None:
        return state.epoch is not None and epoch != state.epoch
    if state.live_next is not None and event.sequence < state.live_next:
        return True
    # The live stream may lag behind what a replay brought. Such a message is not newer than the picture.
    is_behind = state.expected is not None and event.sequence < state.expected
    return is_behind and state.last_timestamp is not None and event.batch.timestamp > state.last_timestamp


def _see(state: Continuity, epoch: str | None) -> Continuity:
    if epoch is None or epoch in state.seen_epochs:
        return state
    return replace(state, seen_epochs=(*state.seen_epochs, epoch)[-_EPOCHS_REMEMBERED:])


def _ask_missing(state: Continuity) -> Step:
    """A gap lies before what is held: ask for what is missing, or go on without it."""
    assert state.expected is not None
    if state.has_replay:
        return _ask_replay(state, Cause.GAP)
    return _begin_anew(state, Cause.GAP, held=state.held)


def _joined(state: Continuity) -> Step:
    """What is held came over an earlier connection, perhaps from another process."""
    if state.expected is None:
        return _begin_anew(state, Cause.JOIN, held=())
    if state.has_replay:
        return _ask_replay(replace(state, held=()), Cause.CHECK)
    return _begin_anew(state, Cause.CHECK, held=())


def _check(state: Continuity) -> Step:
    if state.phase is not Phase.LIVE or not (state.has_replay or state.has_snapshot):
        return state, []
    if state.expected is None:  # what was asked for failed; by now it may be had
        return _begin_anew(state, Cause.JOIN, held=())
    if state.has_snapshot and not (state.is_whole and state.has_replay):
        return _ask_snapshot(replace(state, checked=state.expected), Cause.CHECK)
    return _check_tail(state) if state.has_replay else (state, [])


def _check_tail(state: Continuity) -> Step:
    state, actions = _ask_replay(state, Cause.CHECK)
    return replace(state, checked=state.expected), actions


# --- replays --------------------------------------------------------------------------------------


def _ask_replay(state: Continuity, cause: Cause) -> Step:
    """Ask from the last message applied on."""
    start = max(0, (state.expected or 0) - 1)
    state = replace(
        state,
        phase=Phase.REPLAYING,
        ticket=state.ticket + 1,
        asked_next=state.held[-1][0] + 1 if state.held else 0,
        is_last_resort=state.expected is None,
        is_verified=not state.expected,
        has_parts=False,
        checked=None,
        since=(),
        asked_epochs=state.seen_epochs,
    )
    return state, [AskReplay(start=start, ticket=state.ticket, cause=cause)]


def _replay_part(state: Continuity, event: ReplayPart) -> Step:
    sequence, batch = event.sequence, event.batch
    if batch.epoch is not None and batch.epoch != state.epoch:
        state = _see(state, batch.epoch)
        if state.epoch is not None or _is_outdated(state, batch.epoch):
            return _begin_anew(state, Cause.RESTART, held=())
        state = _confirm(state, batch.epoch)
    state = replace(state, has_parts=True)
    if state.expected is not None and sequence < state.expected:
        if state.is_verified or sequence != state.expected - 1:
            return state, []
        if batch.epoch is None and state.last_timestamp not in (None, batch.timestamp):
            return _begin_anew(replace(state, live_next=None), Cause.RESTART, held=())
        return drain(replace(state, is_verified=True))
    if any(number == sequence and live.timestamp != batch.timestamp for number, live in state.held):
        return _begin_anew(replace(state, live_next=None), Cause.RESTART, held=())  # two processes' messages meet
    state = hold(state, sequence, batch)
    if state.expected is None and sequence == 0:
        state = replace(state, expected=0, is_whole=True)
    return drain(state) if len(state.held) <= HOLD_LIMIT else _overflow(state)


def _replay_end(state: Continuity) -> Step:
    if not state.is_verified:
        return then([ReplayDone(ReplayResult.INCOMPLETE)], _begin_anew(state, Cause.REPLAY, held=()))
    if state.expected is None and state.held:  # the buffer begins later, or there was nothing yet
        epoch = state.epoch or state.held[-1][1].epoch
        held = tuple(item for item in state.held if item[1].epoch == epoch)
        first = held[0][0] if state.has_parts else 0
        state = replace(state, expected=first, epoch=epoch, held=held, is_whole=not first)
    is_unchanged = state.checked is not None and state.checked == state.expected
    state, actions = drain(state)
    if not state.held:
        result = ReplayResult.UNCHANGED if is_unchanged and not actions else ReplayResult.WHOLE
        return settle(state, [ReplayDone(result), *actions])
    assert state.expected is not None
    if state.expected < state.asked_next:  # it was there to be had, and did not come
        return then([ReplayDone(ReplayResult.INCOMPLETE)], _give_up(state, Cause.REPLAY))
    return then([ReplayDone(ReplayResult.WHOLE), *actions], _ask_replay(state, Cause.GAP))  # lost since the asking


def _ask_failed(state: Continuity) -> Step:
    done: list[Action] = [ReplayDone(ReplayResult.FAILED)] if state.phase is Phase.REPLAYING else []
    if state.phase is Phase.SNAPSHOT and state.has_replay:
        if state.checked is None:
            return _ask_replay(replace(state, expected=None), Cause.SNAPSHOT)
        return _ask_missing(state) if state.held else _check_tail(state)
    if state.checked is not None:  # nothing shows that anything is missing, unless what came since does
        state, actions = settle(state, done)
        return then(actions, _ask_missing(state) if state.held else (state, []))
    if state.phase is Phase.REPLAYING and state.expected is None:
        return settle(state, done)
    return then(done, _give_up(state, Cause.REPLAY if done else Cause.SNAPSHOT))


# --- snapshots ------------------------------------------------------------------------------------


def _ask_snapshot(state: Continuity, cause: Cause) -> Step:
    """A picture, where there is one, serves until the snapshot has come (``checked``)."""
    state = replace(state, phase=Phase.SNAPSHOT, ticket=state.ticket + 1, since=(), asked_epochs=state.seen_epochs)
    return state, [AskSnapshot(ticket=state.ticket, cause=cause)]


def _snapshot(state: Continuity, snapshot: Snapshot) -> Step:
    epoch = snapshot.batch.epoch
    if state.checked is not None:
        if state.is_whole and (snapshot.sequence + 1, epoch) == (state.expected, state.epoch):
            return settle(state, [])  # nothing was missed
        if snapshot.sequence + 1 < state.checked:
            return _begin_anew(replace(state, live_next=None), Cause.RESTART, held=())
        state = replace(state, checked=None, held=(*state.since, *state.held), since=())
    if epoch is not None:
        state = _see(state, epoch)
        if _is_outdated(state, epoch):
            return _begin_anew(state, Cause.RESTART, held=())
        state = _confirm(state, epoch)
    state = replace(
        state,
        phase=Phase.LIVE,
        is_whole=True,
        expected=snapshot.sequence + 1,
        held=tuple(item for item in state.held if item[0] > snapshot.sequence),
        last_timestamp=None,
    )
    state, actions = drain(state)
    actions.insert(0, Load(snapshot))
    if state.held:
        return then(actions, _ask_missing(state))
    return state, actions


# --- which process lives --------------------------------------------------------------------------


def _is_outdated(state: Continuity, epoch: str) -> bool:
    """An answer of ``epoch`` says nothing once a message of a process unknown at the time of asking has come."""
    return any(batch.epoch not in (None, epoch, *state.asked_epochs) for _, batch in state.held)


def _confirm(state: Continuity, epoch: str) -> Continuity:
    """The answer names the process that lives; all others that were known are past."""
    return replace(
        state,
        epoch=epoch,
        past_epochs=tuple(other for other in state.asked_epochs if other != epoch),
        held=tuple(item for item in state.held if item[1].epoch in (None, epoch)),
    )


# --- beginning anew -------------------------------------------------------------------------------


def _begin_anew(state: Continuity, cause: Cause, *, held: Held) -> Step:
    """No picture. ``held`` is what is surely of this publisher and counts once the rest is here."""
    actions: list[Action] = [] if cause is Cause.JOIN else [Clear(cause)]
    state = replace(_without_picture(state), epoch=None, held=held, is_verified=True)
    if held and held[0][0] == 0 and held[0][1].epoch is None:
        return settle(state, actions)
    if state.has_snapshot:
        return then(actions, _ask_snapshot(state, cause))
    if state.has_replay:
        return then(actions, _ask_replay(state, cause))
    return settle(state, actions)


def _without_picture(state: Continuity) -> Continuity:
    return replace(state, expected=None, last_timestamp=None, is_whole=False, checked=None, since=())


def _give_up(state: Continuity, cause: Cause) -> Step:
    """What is missing cannot be had one by one: a snapshot, or an empty picture and what is held."""
    if state.phase is Phase.REPLAYING and not state.is_last_resort and state.has_snapshot:
        return _begin_anew(state, cause, held=())
    return settle(_without_picture(state), [Clear(cause)])


def _overflow(state: Continuity) -> Step:
    """Too much is held. A replay into an empty picture has shown its beginning by now; anything else is given up."""
    if state.phase is Phase.REPLAYING and state.expected is None:
        return drain(replace(state, expected=state.held[0][0]))
    if state.since:  # of a picture that serves; it is only not replaced now
        return settle(replace(state, ticket=state.ticket + 1), [])
    return settle(_without_picture(state), [Clear(Cause.OVERFLOW)])


def _damaged(state: Continuity, event: Damaged) -> Step:
    """What a damaged message said is unknown, so all before it is, too, unless it can be had again."""
    after = None if event.sequence is None else event.sequence + 1
    if event.ticket is not None:
        held = tuple(item for item in state.held if after is not None and item[0] >= after)
        if state.expected is not None and after is not None and after <= state.expected:
            return state, []
        state = replace(_without_picture(state), expected=after, held=held, is_verified=True)
        return then([Clear(Cause.DAMAGE)], drain(state))
    if state.has_replay and not state.has_snapshot:
        return _damaged_on_the_way(state, after)
    state = replace(_without_picture(state), expected=after, live_next=after, held=(), ticket=state.ticket + 1)
    if state.has_snapshot:
        return _begin_anew(state, Cause.DAMAGE, held=())
    return replace(state, phase=Phase.LIVE, is_verified=True), [Clear(Cause.DAMAGE)]


def _damaged_on_the_way(state: Continuity, after: int | None) -> Step:
    """The publisher keeps the message and may still have it whole: it is as good as lost."""
    is_restart = after is not None and state.live_next is not None and after <= state.live_next
    state = replace(state, live_next=state.live_next if after is None else after)
    if is_restart or (state.expected is None and state.phase is Phase.LIVE):
        return _begin_anew(state, Cause.DAMAGE, held=())
    if after is not None and state.expected is not None and after <= state.expected:
        return state, []  # a replay has brought it
    if state.phase is not Phase.LIVE:  # what comes of the open one will tell; it asks for what is missing now
        return replace(state, checked=None), []
    state, actions = _ask_replay(state, Cause.DAMAGE)
    return replace(state, asked_next=max(state.asked_next, after or 0)), actions
