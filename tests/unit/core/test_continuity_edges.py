"""The event stream's state machine: turns that come seldom."""

from __future__ import annotations

import pytest

from router.core.continuity import HOLD_LIMIT
from router.core.continuity_types import (
    Apply,
    AskReplay,
    Cause,
    Clear,
    Continuity,
    Damaged,
    Joined,
    Message,
    Phase,
    ReplayDone,
    ReplayEnd,
    ReplayPart,
    ReplayResult,
)
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
