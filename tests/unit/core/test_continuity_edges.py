"""The event stream's state machine: turns that come seldom."""

from __future__ import annotations

import pytest

from router.core.continuity import HOLD_LIMIT
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
    Joined,
    Load,
    Message,
    Phase,
    ReplayDone,
    ReplayEnd,
    ReplayPart,
    ReplayResult,
    SnapshotTaken,
)
from router.wire.kv_events import Snapshot
from tests.fakes.stream_turns import batch, feed, live


@pytest.mark.parametrize("sequence", [0, 1, 2, 3])
def test_a_damaged_part_of_what_is_known_is_passed_over(sequence: int) -> None:
    """Messages 0 to 2 are applied, 3 and 4 lost. A replay's parts that repeat what is known may be damaged; number 3
    may not."""
    state, _ = feed(live(), Message(5, batch(5)))
    state, actions = feed(state, ReplayPart(1, 2, batch(2)), Damaged(sequence, ticket=1))
    assert actions == ([Clear(Cause.DAMAGE)] if sequence == 3 else [])
    _, actions = feed(state, ReplayPart(1, 3, batch(3)), ReplayPart(1, 4, batch(4)))
    assert actions == [Apply(batch(number)) for number in ((4, 5) if sequence == 3 else (3, 4, 5))]


def test_a_replay_longer_than_may_be_held_begins_with_its_first_part() -> None:
    """Into an empty picture: the buffer goes back to 7, and more follows than is held."""
    state, _ = feed(Continuity(has_replay=True, has_snapshot=False), Joined())
    parts = range(7, 7 + HOLD_LIMIT + 1)
    state, actions = feed(state, *(ReplayPart(1, number, batch(number)) for number in parts))
    assert actions == [Apply(batch(number)) for number in parts]
    state, actions = feed(state, ReplayPart(1, parts.stop, batch(parts.stop)), ReplayEnd(1))
    assert actions == [Apply(batch(parts.stop)), ReplayDone(ReplayResult.WHOLE)]


def test_two_processes_messages_that_meet_in_one_number_are_a_restart() -> None:
    """Live message 5 and the replay's number 5 differ: one of them is another process's."""
    state, _ = feed(live(), Message(5, batch(5)))
    state, _ = feed(state, ReplayPart(1, 2, batch(2)), ReplayPart(1, 3, batch(3)))
    _, actions = feed(state, ReplayPart(1, 5, batch(5, start=100)))
    assert actions == [Clear(Cause.RESTART), AskReplay(start=0, ticket=2, cause=Cause.RESTART)]


def test_what_was_held_from_an_earlier_connection_is_not_applied() -> None:
    """Number 9 was held when the connection was made again. The replay ends with number 3, and is all that counts."""
    state, _ = feed(live(), Message(9, batch(9)))
    state, actions = feed(state, Joined())
    assert actions == [AskReplay(start=2, ticket=2, cause=Cause.CHECK)]
    assert state.held == ()
    state, actions = feed(state, *(ReplayPart(2, number, batch(number)) for number in (2, 3)), ReplayEnd(2))
    assert [action for action in actions if isinstance(action, Apply)] == [Apply(batch(3))]
    assert (state.phase, state.expected) == (Phase.LIVE, 4)


def test_few_epochs_are_remembered() -> None:
    """However often a publisher is started anew."""
    state = Continuity(has_replay=False, has_snapshot=False)
    for number in range(50):
        state, _ = feed(state, Message(0, batch(0, epoch=f"e{number}", start=100.0 * number)))
    assert len(state.seen_epochs) <= 8
    assert state.seen_epochs[-1] == "e49"


def test_after_an_empty_replay_only_the_last_processs_messages_count() -> None:
    """Two processes' messages are held while the buffer is asked for, which has nothing."""
    state, _ = feed(Continuity(has_replay=True, has_snapshot=False), Joined())
    state, actions = feed(state, Message(0, batch(0, epoch="a")), Message(1, batch(1, epoch="b", start=100)))
    assert actions == []
    state, actions = feed(state, ReplayEnd(1))
    assert Apply(batch(0, epoch="a")) not in actions
    assert state.epoch == "b"


def partial(*, has_replay: bool = True) -> Continuity:
    """A picture of message 9 and what follows: neither snapshot nor replay was to be had."""
    state, _ = feed(Continuity(has_replay=has_replay, has_snapshot=True), Joined(), Message(9, batch(9)), AskFailed(1))
    return feed(state, AskFailed(2))[0] if has_replay else state


@pytest.mark.parametrize("has_replay", [False, True])
def test_a_picture_that_begins_in_the_middle_serves_until_the_whole_comes(has_replay: bool) -> None:
    """A check asks for a snapshot. What comes meanwhile is applied, and again behind the snapshot."""
    state = partial(has_replay=has_replay)
    state, actions = feed(state, Check())
    assert actions == [AskSnapshot(ticket=state.ticket, cause=Cause.CHECK)]
    state, actions = feed(state, Message(10, batch(10)), Message(11, batch(11)))
    assert actions == [Apply(batch(10)), Apply(batch(11))]
    snapshot = Snapshot(10, batch(10))
    state, actions = feed(state, SnapshotTaken(state.ticket, snapshot))
    assert actions == [Load(snapshot), Apply(batch(11))]
    assert (state.expected, state.since) == (12, ())


def test_a_snapshot_that_fails_again_takes_nothing_away() -> None:
    """The tail is looked after by a replay then, where there is one."""
    state, _ = feed(partial(), Check(), Message(10, batch(10)))
    state, actions = feed(state, AskFailed(state.ticket))
    assert actions == [AskReplay(start=10, ticket=state.ticket, cause=Cause.CHECK)]
    state, actions = feed(state, ReplayPart(state.ticket, 10, batch(10)), ReplayEnd(state.ticket))
    assert actions == [ReplayDone(ReplayResult.UNCHANGED)]

    state, _ = feed(partial(has_replay=False), Check())
    state, actions = feed(state, AskFailed(state.ticket), Message(10, batch(10)))
    assert actions == [Apply(batch(10))]


def test_what_comes_while_the_whole_is_asked_for_is_bounded() -> None:
    """The asking is given up, not the picture."""
    state, _ = feed(partial(), Check())
    numbers = range(10, 10 + HOLD_LIMIT + 2)
    state, actions = feed(state, *(Message(number, batch(number)) for number in numbers))
    assert actions == [Apply(batch(number)) for number in numbers]
    assert (state.phase, state.since) == (Phase.LIVE, ())


@pytest.mark.parametrize(("sequence", "is_lost"), [(2, False), (4, True)])
def test_without_replays_a_snapshot_tells_of_a_lost_tail(sequence: int, is_lost: bool) -> None:
    """Messages 0 to 2 are known, and nothing more comes."""
    snapshot = Snapshot(sequence, batch(sequence))
    state, asked = feed(live(has_replay=False, has_snapshot=True), Check())
    assert asked == [AskSnapshot(ticket=1, cause=Cause.CHECK)]
    _, actions = feed(state, SnapshotTaken(1, snapshot))
    assert actions == ([Load(snapshot)] if is_lost else [])


def test_a_snapshot_from_before_what_is_known_is_of_another_process() -> None:
    """Its numbers began anew, and nothing else tells."""
    state, _ = feed(live(has_replay=False, has_snapshot=True), Check())
    state, actions = feed(state, SnapshotTaken(1, Snapshot(0, batch(0))))
    assert actions == [Clear(Cause.RESTART), AskSnapshot(ticket=2, cause=Cause.RESTART)]
    state, _ = feed(state, SnapshotTaken(2, Snapshot(0, batch(0))))
    assert feed(state, Message(1, batch(1)))[1] == [Apply(batch(1))]
