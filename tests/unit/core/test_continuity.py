"""The event stream's state machine: each way a picture breaks."""

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
    Event,
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

# --- one turn each --------------------------------------------------------------------------------


def test_messages_in_order_are_applied_as_they_come() -> None:
    """An unbroken stream from 0 needs nothing but applying."""
    state = Continuity(has_replay=True, has_snapshot=True)
    _, actions = feed(state, Message(0, batch(0)), Message(1, batch(1)))
    assert actions == [Apply(batch(0)), Apply(batch(1))]


def test_a_late_joiner_asks_for_a_snapshot_where_there_is_one() -> None:
    """A join with a snapshot on offer asks it, holds what comes, and drops what the snapshot covers."""
    state = Continuity(has_replay=True, has_snapshot=True)
    state, actions = feed(state, Joined())
    assert actions == [AskSnapshot(ticket=1, cause=Cause.JOIN)]
    state, actions = feed(state, Message(7, batch(7)), Message(8, batch(8)))
    assert actions == []
    snapshot = Snapshot(7, batch(7))
    state, actions = feed(state, SnapshotTaken(1, snapshot))
    assert actions == [Load(snapshot), Apply(batch(8))]
    assert state.phase is Phase.LIVE


def test_a_late_joiner_without_snapshots_replays_from_the_beginning() -> None:
    """The first message has number 5: replay from 0, then what was held."""
    state = Continuity(has_replay=True, has_snapshot=False)
    state, actions = feed(state, Message(5, batch(5)))
    assert actions == [AskReplay(start=0, ticket=1, cause=Cause.JOIN)]
    _, actions = feed(state, *(ReplayPart(1, n, batch(n)) for n in range(6)), ReplayEnd(1))
    assert actions == [*(Apply(batch(n)) for n in range(6)), ReplayDone(ReplayResult.WHOLE)]


def test_without_replay_or_snapshot_the_picture_begins_with_what_comes() -> None:
    """A publisher that offers nothing is followed from the first message seen."""
    _, actions = feed(Continuity(has_replay=False, has_snapshot=False), Joined(), Message(9, batch(9)))
    assert actions == [Apply(batch(9))]


def test_a_gap_is_filled_by_a_replay_and_live_messages_wait() -> None:
    """Messages 3 and 4 are lost: 5 and 6 are applied after the replay has brought them."""
    state, actions = feed(live(), Message(5, batch(5)))
    assert actions == [AskReplay(start=2, ticket=1, cause=Cause.GAP)]
    state, actions = feed(state, Message(6, batch(6)), ReplayPart(1, 2, batch(2)))
    assert actions == []
    _, actions = feed(state, ReplayPart(1, 3, batch(3)), ReplayPart(1, 4, batch(4)), ReplayEnd(1))
    assert actions == [*(Apply(batch(n)) for n in (3, 4, 5, 6)), ReplayDone(ReplayResult.WHOLE)]


def test_a_restart_hidden_in_a_gap_is_found_by_the_message_before_it() -> None:
    """No epoch, and the new process has already passed our number: its message 2 has another timestamp."""
    state, _ = feed(live(), Message(5, batch(5, start=100)))
    _, actions = feed(state, ReplayPart(1, 2, batch(2, start=100)))
    assert actions == [Clear(Cause.RESTART), AskReplay(start=0, ticket=2, cause=Cause.RESTART)]


def test_numbers_that_run_backwards_are_a_restart() -> None:
    """A message 0 after message 2 is the first of a new process: clear, then apply."""
    _, actions = feed(live(), Message(0, batch(0, start=100)))
    assert actions == [Clear(Cause.RESTART), Apply(batch(0, start=100))]


def test_another_epoch_is_a_restart_and_the_old_one_is_dropped_from_then_on() -> None:
    """The number fits, the epoch does not; and a straggler of the old process changes nothing."""
    state, actions = feed(live(epoch="a"), Message(3, batch(3, epoch="b")))
    assert actions == [Clear(Cause.RESTART), AskReplay(start=0, ticket=1, cause=Cause.RESTART)]
    state, _ = feed(state, *(ReplayPart(1, n, batch(n, epoch="b")) for n in range(4)), ReplayEnd(1))
    assert feed(state, Message(4, batch(4, epoch="a"))) == (state, [])
    assert feed(state, Message(4, batch(4, epoch="b")))[1] == [Apply(batch(4, epoch="b"))]


def test_a_replay_that_does_not_reach_back_far_enough_begins_anew() -> None:
    """The buffer starts at 7 while 3 is wanted: what is known is thrown away, all that is kept is read."""
    state, _ = feed(live(), Message(9, batch(9)))
    state, actions = feed(state, *(ReplayPart(1, n, batch(n)) for n in (7, 8, 9)), ReplayEnd(1))
    assert actions == [
        ReplayDone(ReplayResult.INCOMPLETE),
        Clear(Cause.REPLAY),
        AskReplay(start=0, ticket=2, cause=Cause.REPLAY),
    ]
    _, actions = feed(state, *(ReplayPart(2, n, batch(n)) for n in (7, 8, 9)), ReplayEnd(2))
    assert actions == [ReplayDone(ReplayResult.WHOLE), *(Apply(batch(n)) for n in (7, 8, 9))]


def test_a_replay_that_fails_clears_and_goes_on_with_what_is_held() -> None:
    """No answer comes: only the unbroken run at the end is trusted."""
    state, _ = feed(live(), Message(5, batch(5)), Message(7, batch(7)), Message(8, batch(8)))
    state, actions = feed(state, AskFailed(1))
    assert actions == [
        ReplayDone(ReplayResult.FAILED),
        Clear(Cause.REPLAY),
        Apply(batch(7)),
        Apply(batch(8)),
    ]
    assert feed(state, Message(9, batch(9)))[1] == [Apply(batch(9))]


def test_when_snapshot_and_replay_both_fail_the_stream_is_followed_from_here() -> None:
    """Two failures end in the live phase, not in asking for ever."""
    state, actions = feed(live(has_snapshot=True), Message(9, batch(9)))
    assert actions == [AskReplay(start=2, ticket=1, cause=Cause.GAP)]
    state, actions = feed(state, AskFailed(1))
    assert actions[-1] == AskSnapshot(ticket=2, cause=Cause.REPLAY)
    state, actions = feed(state, AskFailed(2))
    assert actions == [AskReplay(start=0, ticket=3, cause=Cause.SNAPSHOT)]
    state, actions = feed(state, Message(10, batch(10)), AskFailed(3))
    assert actions == [ReplayDone(ReplayResult.FAILED), Apply(batch(10))]
    assert state.phase is Phase.LIVE


def test_a_late_message_that_a_replay_has_already_brought_is_no_restart() -> None:
    """The replay ran ahead of the live stream; the live copies follow and are dropped."""
    state, _ = feed(live(), Check())
    state, actions = feed(state, *(ReplayPart(1, n, batch(n)) for n in (2, 3, 4)), ReplayEnd(1))
    assert actions == [Apply(batch(3)), Apply(batch(4)), ReplayDone(ReplayResult.WHOLE)]
    assert feed(state, Message(3, batch(3)), Message(4, batch(4)), Message(5, batch(5)))[1] == [Apply(batch(5))]


def test_a_connection_made_again_checks_the_tail() -> None:
    """A last message lost while the connection was down is found without waiting for the next one."""
    state, actions = feed(live(), Joined())
    assert actions == [AskReplay(start=2, ticket=1, cause=Cause.CHECK)]
    _, actions = feed(state, ReplayPart(1, 2, batch(2)), ReplayPart(1, 3, batch(3)), ReplayEnd(1))
    assert actions == [Apply(batch(3)), ReplayDone(ReplayResult.WHOLE)]


def test_a_connection_made_again_without_replay_forgets_the_picture() -> None:
    """What was missed cannot be known, so nothing is believed."""
    assert feed(live(has_replay=False), Joined())[1] == [Clear(Cause.CHECK)]


def test_damage_throws_the_picture_away_where_nothing_can_be_had_again() -> None:
    """What the message said is unknown: clear, and follow from the next one."""
    state, actions = feed(live(has_replay=False), Damaged(3))
    assert actions == [Clear(Cause.DAMAGE)]
    assert feed(state, Message(4, batch(4)))[1] == [Apply(batch(4))]


def test_a_message_damaged_on_the_way_is_asked_for_again() -> None:
    """The publisher has it whole: the picture stays, and what came meanwhile follows."""
    state, actions = feed(live(), Damaged(3))
    assert actions == [AskReplay(start=2, ticket=1, cause=Cause.DAMAGE)]
    state, actions = feed(state, Message(4, batch(4)), ReplayPart(1, 2, batch(2)), ReplayPart(1, 3, batch(3)))
    assert actions == [Apply(batch(3)), Apply(batch(4))]
    assert feed(state, ReplayEnd(1))[1] == [ReplayDone(ReplayResult.WHOLE)]


def test_a_message_that_the_publisher_has_no_better_is_not_asked_for_twice() -> None:
    """It is damaged in the replay, too: clear, and follow from the next one."""
    state, _ = feed(live(), Damaged(3))
    state, actions = feed(state, ReplayPart(1, 2, batch(2)), Damaged(3, ticket=1), ReplayEnd(1))
    assert actions == [Clear(Cause.DAMAGE), ReplayDone(ReplayResult.WHOLE)]
    assert feed(state, Message(4, batch(4)))[1] == [Apply(batch(4))]


def test_a_replay_that_does_not_bring_what_was_damaged_is_given_up() -> None:
    """The publisher's buffer is past it."""
    state, _ = feed(live(), Damaged(3), Message(4, batch(4)))
    state, actions = feed(state, ReplayPart(1, 2, batch(2)), ReplayEnd(1))
    assert actions == [ReplayDone(ReplayResult.INCOMPLETE), Clear(Cause.REPLAY), Apply(batch(4))]
    assert state.expected == 5


def test_a_first_message_that_is_damaged_is_asked_for_from_the_start() -> None:
    """Nothing was known: all there is."""
    _, actions = feed(Continuity(has_replay=True, has_snapshot=False), Damaged(7))
    assert actions == [Clear(Cause.DAMAGE), AskReplay(start=0, ticket=1, cause=Cause.DAMAGE)]


def test_damage_inside_a_replay_forgets_what_stood_before_it() -> None:
    """Part 4 is unreadable: 3 is forgotten again, 5 is kept."""
    state, _ = feed(live(), Message(6, batch(6)), ReplayPart(1, 2, batch(2)), ReplayPart(1, 3, batch(3)))
    _, actions = feed(state, Damaged(4, ticket=1), ReplayPart(1, 5, batch(5)), ReplayEnd(1))
    assert actions == [Clear(Cause.DAMAGE), Apply(batch(5)), Apply(batch(6)), ReplayDone(ReplayResult.WHOLE)]


def test_the_hold_buffer_is_bounded() -> None:
    """A replay that never answers costs no more than the limit; then the picture begins with what is held."""
    state, _ = feed(live(), Message(5, batch(5)))
    applied = 0
    for n in range(6, 6 + HOLD_LIMIT):
        state, actions = feed(state, Message(n, batch(n)))
        assert len(state.held) <= HOLD_LIMIT
        applied += sum(isinstance(action, Apply) for action in actions)
    assert applied == HOLD_LIMIT + 1
    assert state.phase is Phase.LIVE


def test_an_answer_that_a_newer_process_has_overtaken_is_not_believed() -> None:
    """Process b speaks while the snapshot of a is under way: the snapshot is thrown away and another one asked."""
    state, _ = feed(live(has_snapshot=True, epoch="a"), Joined(), AskFailed(1))
    assert state.phase is Phase.SNAPSHOT
    state, _ = feed(state, Message(9, batch(9, epoch="b")))
    state, actions = feed(state, SnapshotTaken(2, Snapshot(4, batch(4, epoch="a"))))
    assert actions == [Clear(Cause.RESTART), AskSnapshot(ticket=3, cause=Cause.RESTART)]
    snapshot = Snapshot(9, batch(9, epoch="b"))
    assert feed(state, SnapshotTaken(3, snapshot))[1] == [Load(snapshot)]


def test_a_new_connection_asks_again_and_forgets_what_the_old_one_brought() -> None:
    """A held message of the old connection may be of another process."""
    state, _ = feed(Continuity(has_replay=True, has_snapshot=False), Joined(), Message(7, batch(7)))
    state, actions = feed(state, Joined())
    assert actions == [AskReplay(start=0, ticket=2, cause=Cause.JOIN)]
    assert state.held == ()


@pytest.mark.parametrize("late", [ReplayPart(1, 3, batch(3)), ReplayEnd(1), AskFailed(1)])
def test_an_answer_to_an_older_question_is_ignored(late: Event) -> None:
    """A second ask replaces the first; what still comes for the first is not for us."""
    state, _ = feed(live(), Message(5, batch(5)), Message(0, batch(0, start=100)), Message(4, batch(4, start=100)))
    assert state.ticket == 2
    assert feed(state, late) == (state, [])


# --- checks ---------------------------------------------------------------------------------------


def test_a_check_that_fails_takes_nothing_away() -> None:
    """Nothing shows that anything was missed, whether or not the replay can be had."""
    state, actions = feed(live(), Check())
    assert actions == [AskReplay(start=2, ticket=1, cause=Cause.CHECK)]
    state, actions = feed(state, AskFailed(1))
    assert actions == [ReplayDone(ReplayResult.FAILED)]
    assert feed(state, Message(3, batch(3)))[1] == [Apply(batch(3))]


def test_a_check_that_finds_nothing_says_so() -> None:
    """Its one part is the last message that was applied."""
    _, actions = feed(live(), Check(), ReplayPart(1, 2, batch(2)), ReplayEnd(1))
    assert actions[1:] == [ReplayDone(ReplayResult.UNCHANGED)]
    _, actions = feed(live(), Check(), ReplayPart(1, 2, batch(2)), ReplayPart(1, 3, batch(3)), ReplayEnd(1))
    assert actions[1:] == [Apply(batch(3)), ReplayDone(ReplayResult.WHOLE)]


def test_a_message_in_its_order_answers_an_open_check() -> None:
    """It is applied at once, and what the replay brings after it is not looked at."""
    state, actions = feed(live(), Check(), Message(3, batch(3)))
    assert actions[1:] == [Apply(batch(3))]
    assert feed(state, ReplayPart(1, 2, batch(2, start=100)), AskFailed(1)) == (state, [])


def test_a_gap_seen_during_a_check_that_fails_is_asked_for() -> None:
    """Now something is known to be missing; when that cannot be had either, what is held is all there is."""
    state, actions = feed(live(), Check(), Message(5, batch(5)), AskFailed(1))
    assert actions[1:] == [ReplayDone(ReplayResult.FAILED), AskReplay(start=2, ticket=2, cause=Cause.GAP)]
    _, actions = feed(state, AskFailed(2))
    assert actions == [ReplayDone(ReplayResult.FAILED), Clear(Cause.REPLAY), Apply(batch(5))]


def test_damage_seen_during_a_check_that_fails_costs_the_picture() -> None:
    """What the damaged message said is not known."""
    _, actions = feed(live(), Check(), Damaged(3), AskFailed(1))
    assert actions[1:] == [ReplayDone(ReplayResult.FAILED), Clear(Cause.REPLAY)]


def test_a_new_connection_whose_replay_fails_costs_the_picture() -> None:
    """Another process may be behind it, or messages have been lost with the old one."""
    _, actions = feed(live(), Joined(), AskFailed(1))
    assert actions[1:] == [ReplayDone(ReplayResult.FAILED), Clear(Cause.REPLAY)]


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_check_of_an_empty_picture_asks_for_all_of_it(has_snapshot: bool) -> None:
    """The publisher paused when it was asked, and is idle since."""
    state = Continuity(has_replay=not has_snapshot, has_snapshot=has_snapshot)
    state, _ = feed(state, Joined(), AskFailed(1))
    state, actions = feed(state, Check())
    if has_snapshot:
        assert actions == [AskSnapshot(ticket=2, cause=Cause.JOIN)]
    else:
        assert actions == [AskReplay(start=0, ticket=2, cause=Cause.JOIN)]
        _, actions = feed(state, *(ReplayPart(2, n, batch(n)) for n in range(2)), ReplayEnd(2))
        assert actions == [Apply(batch(0)), Apply(batch(1)), ReplayDone(ReplayResult.WHOLE)]
