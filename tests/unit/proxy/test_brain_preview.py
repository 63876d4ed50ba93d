"""A preview is what would be decided: by the ranks that fail, those that are drained, and the draw that comes next."""

from __future__ import annotations

import json

import pytest

from router.admin.explain import brief_view, decided_view
from router.core.types import RankStatus
from router.fleet.decisions import Attempted, Decided
from router.proxy.promises import PROVISIONAL_SECONDS
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


async def test_promises_that_no_event_has_kept_in_time_are_not_foretold() -> None:
    """What a request should have left counts for a while after its end, for the next one and for a preview alike."""
    world = World(ranks=1)
    finish(await world.ask(prompt_of(5_000), "s"))
    (attempt,) = (await preview(world, prompt_of(5_000), "s")).attempts
    assert attempt.expected_cached_tokens > 0

    world.now += 1 + PROVISIONAL_SECONDS
    (attempt,) = (await preview(world, prompt_of(5_000), "s")).attempts
    assert attempt.expected_cached_tokens == 0


async def test_a_rank_that_fails_is_not_foretold() -> None:
    """Its home's breaker has opened."""
    world = World(ranks=2)
    first = await world.ask(prompt_of(5_000), "s")
    finish(first)
    home = first.decision.slot
    for _ in range(8):
        world.fleet.breakers.sent(home, now=world.now)
        world.fleet.breakers.ended(home, Outcome.CONNECT.verdict, ranks=2, now=world.now)

    foretold, attempt = await agreed(world, prompt_of(5_100), "s")
    assert attempt.decision.slot != home
    failing = {weighed.id.worker: weighed.is_failing for weighed in foretold.ranks()}
    assert failing == {f"w{home}": True, f"w{attempt.decision.slot}": False}


@pytest.mark.parametrize("ranks", [1, 2])
async def test_who_is_drained_is_foretold_to_leave_if_it_can(ranks: int) -> None:
    """Where there is no other rank, it stays."""
    world = World(ranks=ranks)
    first = await world.ask(prompt_of(5_000), "s")
    finish(first)
    world.fleet.set_status(first.decision.slot, RankStatus.DRAINING)

    _, attempt = await agreed(world, prompt_of(5_100), "s")
    assert (attempt.decision.slot == first.decision.slot) is (ranks == 1)


def held_at(
    position: int | None, why: str, *, end: str | None = None, seconds: float | None = None
) -> dict[str, object]:
    return {"why": why, "position": position, "end": end, "seconds": seconds}


async def test_who_would_be_held_is_told_so() -> None:
    """One rank of 100,000 tokens with 80,000, and one request of 60,000 that waits: another would be the second, until
    the rank is free. Somebody with 10,000 would wait, too. Nobody has joined the queue by asking.
    """
    world = World(ranks=1, admission="guarded")
    full = await world.prepare(prompt_of(80_000), {"x-session-id": "full"})
    assert world.brain.hold(full, lambda: None) is None
    lease = world.brain.choose(full).lease
    lease.first_byte()
    first = decided_view(await preview(world, prompt_of(60_000, start=500_000), "s"))
    assert (first["held"], first["attempts"]) == (held_at(1, "budget"), [])
    held = world.brain.hold(await world.prepare(prompt_of(60_000, start=500_000), {"x-session-id": "s"}), lambda: None)
    assert held is not None

    for tokens in (60_000, 10_000):
        second = decided_view(await preview(world, prompt_of(tokens, start=700_000), "t"))
        assert (second["held"], second["attempts"]) == (held_at(2, "queue"), [])
    assert held.position() == 1
    assert world.sample("admission_held_requests") == 1
    held.leave()
    lease.close(Outcome.CLIENT_ERROR, None)
    third = decided_view(await preview(world, prompt_of(60_000, start=700_000), "t"))
    assert (third["held"], len(third["attempts"])) == (None, 1)


async def test_who_is_held_can_be_asked_after() -> None:
    """By its id, with its place; then it has an attempt, and waits no more. So can who has left."""
    world = World(ranks=1, admission="guarded")
    full = await world.prepare(prompt_of(80_000), {"x-session-id": "full"})
    assert world.brain.hold(full, lambda: None) is None
    lease = world.brain.choose(full).lease
    request = parse_request(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt_of(60_000)}).encode())
    prepared = await world.brain.prepare(request, {"x-session-id": "s"}, tenant="t", request_id="r1")
    went: list[bool] = []
    assert world.brain.hold(prepared, lambda: went.append(True)) is not None

    decided = world.brain.decisions.find("r1")
    assert decided is not None
    assert decided_view(decided)["held"] == held_at(1, "budget")
    assert brief_view(decided)["attempts"] == 0
    lease.close(Outcome.CLIENT_ERROR, None)
    assert went
    assert decided_view(decided)["held"] == held_at(None, "budget", end="released", seconds=0.0)
    world.brain.choose(prepared)
    found = world.brain.decisions.find("r1")
    assert found is decided
    assert [attempt["rank"] for attempt in decided_view(found)["attempts"]] == ["w0/0"]
    assert brief_view(found)["held"]["end"] == "released"

    other = await world.brain.prepare(request, {"x-session-id": "other"}, tenant="t", request_id="r2")
    waiting = world.brain.hold(other, lambda: None)
    assert waiting is not None
    world.now += 2.5
    waiting.leave()
    decided = world.brain.decisions.find("r2")
    assert decided is not None
    assert brief_view(decided)["held"] == held_at(None, "budget", end="left", seconds=2.5)


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
