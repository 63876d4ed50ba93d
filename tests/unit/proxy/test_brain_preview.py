"""A preview is what would be decided: by the ranks that fail, those that are drained, and the draw that comes next."""

from __future__ import annotations

import json

import pytest

from router.core.types import RankStatus
from router.fleet.decisions import Attempted, Decided
from router.proxy.types import Attempt, Outcome
from router.wire.openai import Endpoint, parse_request
from tests.fakes.brain_world import World, prompt_of


async def preview(world: World, prompt: list[int], session: str) -> Decided:
    request = parse_request(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())
    return await world.brain.preview(request, {"x-session-id": session}, tenant="t")


async def agreed(world: World, prompt: list[int], session: str) -> tuple[Attempted, Attempt]:
    """What is foretold, and what is decided next, on the same rank."""
    (foretold,) = (await preview(world, prompt, session)).attempts
    attempt = await world.ask(prompt, session)
    assert (foretold.id.worker, foretold.reason) == (f"w{attempt.decision.slot}", attempt.decision.reason)
    return foretold, attempt


def finish(attempt: Attempt) -> None:
    attempt.lease.first_byte()
    attempt.lease.close(Outcome.OK, None)


async def test_a_session_is_foretold_at_home() -> None:
    """It says where that is."""
    world = World(ranks=3)
    first = await world.ask(prompt_of(5_000), "s")
    finish(first)
    assert (await preview(world, prompt_of(5_000), "s")).home == first.decision.id
    assert (await preview(world, prompt_of(5_000), "another")).home is None


async def test_a_rank_that_fails_is_not_foretold() -> None:
    """Its home's breaker has opened."""
    world = World(ranks=2)
    first = await world.ask(prompt_of(5_000), "s")
    finish(first)
    home = first.decision.slot
    for _ in range(8):
        world.fleet.breakers.sent(home, now=world.now)
        world.fleet.breakers.ended(home, Outcome.CONNECT.verdict, ranks=2, now=world.now)

    _, attempt = await agreed(world, prompt_of(5_100), "s")
    assert attempt.decision.slot != home


@pytest.mark.parametrize("ranks", [1, 2])
async def test_who_is_drained_is_foretold_to_leave_if_it_can(ranks: int) -> None:
    """Where there is no other rank, it stays."""
    world = World(ranks=ranks)
    first = await world.ask(prompt_of(5_000), "s")
    finish(first)
    world.fleet.set_status(first.decision.slot, RankStatus.DRAINING)

    _, attempt = await agreed(world, prompt_of(5_100), "s")
    assert (attempt.decision.slot == first.decision.slot) is (ranks == 1)


async def test_looking_ahead_changes_nothing() -> None:
    """Two fleets of eight equal ranks, where ties are drawn: one is asked for previews, and both decide alike."""
    looked, other = World(ranks=8, seed=5), World(ranks=8, seed=5)
    slots: list[tuple[int, int]] = []
    for number in range(20):
        prompt = prompt_of(100, start=10_000 * number)
        _, attempt = await agreed(looked, prompt, f"s{number}")
        plain = await other.ask(prompt, f"s{number}")
        slots.append((attempt.decision.slot, plain.decision.slot))
        for each in (attempt, plain):
            finish(each)

    assert all(one == two for one, two in slots)
    assert len({one for one, _ in slots}) > 2
