"""Where a session is at home: several lines under one name, homes that were forgotten, and ranks that are drained."""

from __future__ import annotations

import pytest

from router.core.types import RankStatus, Reason
from router.proxy.types import Attempt, Outcome
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored, EventBatch
from tests.fakes.brain_world import BLOCK, World, prompt_of


def finish(attempt: Attempt) -> None:
    """Its answer begins and ends."""
    attempt.lease.first_byte()
    attempt.lease.close(Outcome.OK, None)


async def test_a_small_request_elsewhere_moves_no_conversation() -> None:
    """A title of 200 tokens goes to another rank while the conversation of 60,000 is at work. Its next turn waits eight
    seconds at home, as it would without the title; and the next title goes where the last one's head is.
    """
    world = World(ranks=4)
    history = prompt_of(60_000)
    first = await world.ask(history, "s")
    home = first.decision.slot
    finish(first)
    world.publish(home, history)
    running = await world.ask(history + prompt_of(100, start=800_000), "s")
    title = await world.ask(prompt_of(200, start=700_000), "s")
    assert title.decision.slot != home
    world.publish(title.decision.slot, prompt_of(200, start=700_000))
    finish(running)
    finish(title)
    world.fleet.loads.open(home, prompt_tokens=1, prefill_tokens=1, seconds=8.0, now=world.now)

    turn = await world.ask(history + prompt_of(200, start=900_000), "s")
    assert (turn.decision.slot, turn.decision.reason) == (home, Reason.HOME)
    assert turn.decision.expected_cached_tokens == 60_000
    finish(turn)
    another = await world.ask(prompt_of(210, start=700_000), "s")
    assert (another.decision.slot, another.decision.reason) == (title.decision.slot, Reason.HOME)


async def test_a_title_asked_first_does_not_send_its_conversation_elsewhere() -> None:
    """Two first requests of one session at once that share nothing: the second waits for the small one."""
    world = World(ranks=8)
    title = await world.ask(prompt_of(200, start=700_000), "s")
    turn = await world.ask(prompt_of(40_000), "s")

    assert turn.decision.slot == title.decision.slot


async def test_a_forgotten_home_is_found_by_its_history() -> None:
    """What one rank holds of a prompt and nobody goes on from is the session's past: worth a queue of eight seconds.

    This router never saw the session: it has been restarted, or another replica sent it there.
    """
    world = World(ranks=4)
    history = prompt_of(60_000)
    world.publish(2, history)
    world.fleet.loads.open(2, prompt_tokens=1, prefill_tokens=1, seconds=8.0, now=world.now)
    turn = await world.ask(history + prompt_of(200, start=900_000), "s")

    assert (turn.decision.slot, turn.decision.reason) == (2, Reason.HOME)


@pytest.mark.parametrize("is_known_here", [False, True])
async def test_a_shared_head_is_nobodys_history(is_known_here: bool) -> None:
    """Another conversation goes on from the head, or was sent there by this router: it is not worth four seconds."""
    world = World(ranks=4)
    head = prompt_of(60_000)
    if is_known_here:
        other = await world.ask(head, "other")
        finish(other)
        slot = other.decision.slot
        world.publish(slot, head)
    else:
        slot = 2
        world.publish(slot, head + prompt_of(4000, start=500_000))
    world.fleet.loads.open(slot, prompt_tokens=1, prefill_tokens=1, seconds=4.0, now=world.now)
    turn = await world.ask(head + prompt_of(200, start=900_000), "s")

    assert turn.decision.slot != slot


async def test_a_head_is_taken_for_a_history_once_at_most() -> None:
    """After a restart one rank holds a head, and what went on from it is forgotten: no block says that it is shared.
    Who asks first is taken to be at home there; of the others, who ask at once, most go elsewhere.
    """
    world = World(ranks=8)
    head = prompt_of(10_000)
    world.publish(0, head)
    asked = [await world.ask(head + prompt_of(208, start=10**6 + 1000 * n), f"s{n}") for n in range(64)]

    assert [attempt.decision.reason for attempt in asked].count(Reason.HOME) == 1
    assert {attempt.decision.slot for attempt in asked} == set(world.slots)
    assert sum(attempt.decision.slot == 0 for attempt in asked) <= 32


async def test_a_draining_rank_hands_its_sessions_over_one_turn_at_a_time() -> None:
    """Of three sessions each leaves with a turn, but for those that ask while one is on its way elsewhere."""
    world = World(ranks=3)
    histories = {f"s{number}": prompt_of(20_000, start=100_000 * number) for number in range(3)}
    for history in histories.values():
        world.publish(0, history)
    for name, history in histories.items():
        finish(await world.ask(history, name))
    assert {binding.slot for _, binding in world.fleet.sessions.recent()} == {0}
    world.fleet.set_status(0, RankStatus.DRAINING)

    first = await world.ask(histories["s0"], "s0")
    second = await world.ask(histories["s1"], "s1")
    assert first.decision.slot != 0
    assert (second.decision.slot, second.decision.reason) == (0, Reason.HOME)
    finish(second)
    first.lease.first_byte()
    second = await world.ask(histories["s1"], "s1")
    assert second.decision.slot != 0
    second.lease.close(Outcome.RESET, None)
    third = await world.ask(histories["s2"], "s2")
    assert third.decision.slot != 0
    finish(first)
    world.now += 10  # what was promised has been stored by now, or never will be
    world.publish(first.decision.slot, histories["s0"])
    again = await world.ask(histories["s0"], "s0")
    assert (again.decision.slot, again.decision.reason) == (first.decision.slot, Reason.HOME)


async def test_a_draining_rank_keeps_whom_no_other_can_serve() -> None:
    """The only other rank is down."""
    world = World(ranks=2)
    world.publish(0, prompt_of(2_000))
    finish(await world.ask(prompt_of(2_000), "s"))
    world.fleet.set_status(0, RankStatus.DRAINING)
    world.fleet.set_status(1, RankStatus.DOWN)

    assert (await world.ask(prompt_of(2_000), "s")).decision.slot == 0


@pytest.mark.parametrize("has_windows", [True, False])
async def test_a_head_is_made_ready_where_it_is_stored(*, has_windows: bool) -> None:
    """The first with a head leaves its last window alone, so that the second finds nothing: it makes the head ready for
    the third by going there. Without windows it finds the head, which is worth less to it than a rank without queue.
    """
    world = World(ranks=4)
    head = prompt_of(8_000)
    first = await world.ask([*head, *prompt_of(3_200, start=100_000)], "first")
    slot = first.decision.slot
    tokens = (*head, *prompt_of(3_200, start=100_000))
    keys = block_keys(tokens, block_tokens=BLOCK, parent=namespace_seed("", ""))
    world.publish(slot, tokens)
    if has_windows:
        last = BlockStored(
            (keys[-1],), keys[-2], tokens[-BLOCK:], BLOCK, group=1, kind="sliding_window", window_tokens=9
        )
        world.fleet.apply(slot, EventBatch(world.now, (last,)), now=world.now)
    second = await world.ask([*head, *prompt_of(3_200, start=200_000)], "second")

    assert (second.decision.slot == slot) is has_windows
