"""Admission as requests meet it in the brain: where they are sent, what of them is charged, and what ends that."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from router.core.admission import Barrier
from router.core.types import Engine, RankId, RankStatus
from router.fleet.target import Target
from router.proxy import holding
from router.proxy.brain import RouterBrain
from router.proxy.holding import HeldRequest
from router.proxy.prepared import PreparedRequest
from router.proxy.types import Attempt, Outcome
from router.wire.openai import Endpoint, parse_request
from router.wire.usage import Usage
from tests.fakes.brain_world import BLOCK, ENDS_WITH_CONTEXT, World, prompt_of


def world_of(ranks: int, **settings: Any) -> World:
    """Ranks of 100,000 tokens each."""
    return World(ranks=ranks, admission="guarded", **settings)


def hold(brain: RouterBrain, prepared: PreparedRequest) -> tuple[HeldRequest | None, list[bool]]:
    """Offer a request; the list has an entry once it may go."""
    went: list[bool] = []
    return brain.hold(prepared, lambda: went.append(True)), went


async def ask(
    world: World, session: str, tokens: int, *, start: int, end: Outcome | None = Outcome.OK, **fields: Any
) -> Attempt | None:
    """A request whose first token has come, and that has ended as ``end``; None: it is held."""
    prepared = await world.prepare(prompt_of(tokens, start=start), {"x-session-id": session}, **fields)
    held, _ = hold(world.brain, prepared)
    if held is not None:
        held.leave()
        return None
    attempt = world.brain.choose(prepared)
    if end is not Outcome.CLIENT_ERROR:
        attempt.lease.first_byte()
    if end is not None:
        attempt.lease.close(end, Usage(tokens, 50, 0) if end is Outcome.OK else None)
    return attempt


def charged(world: World) -> float:
    return world.sample("admission_charged_tokens")


async def test_a_request_goes_where_it_was_admitted_to() -> None:
    """Rank 0 has 60 % of the prompt and is the cheapest, but has no room: rank 1 gets it; so too after waiting."""
    world = world_of(2)
    full = await ask(world, "full", 70_000, start=100, end=None)
    assert full is not None
    slot, other = full.decision.slot, 1 - full.decision.slot
    second: Attempt | None = None
    for session, start in (("at once", 200_000), ("after waiting", 300_000)):
        prompt = prompt_of(40_000, start=start)
        world.publish(slot, prompt[:24_000])
        prepared = await world.prepare(prompt, {"x-session-id": session})
        held, went = hold(world.brain, prepared)
        if second is not None:
            assert held is not None
            second.lease.close(Outcome.CLIENT_ERROR, None)
            assert went
        second = world.brain.choose(prepared)
        assert second.decision.slot == other
    full.lease.close(Outcome.OK, None)


async def test_a_conversation_that_all_ranks_have_served_is_charged() -> None:
    """Both ranks have its 40,000 tokens, of which others share the first 8,000: those alone are nobody's."""
    world = world_of(2)
    prompt = prompt_of(40_000)
    for slot in world.slots:
        world.publish(slot, prompt)
        world.publish(slot, [*prompt[:8_000], *prompt_of(8_000, start=200_000)])
    assert await ask(world, "s", 40_000, start=100, end=None) is not None

    assert 32_000 <= charged(world) <= 33_000


async def test_where_the_rank_it_was_admitted_to_is_gone_another_will_do() -> None:
    """It leaves the fleet between the admission and the decision."""
    world = world_of(2)
    full = await ask(world, "full", 70_000, start=100, end=None)
    assert full is not None
    prepared = await world.prepare(prompt_of(40_000, start=200_000), {"x-session-id": "s"})
    assert hold(world.brain, prepared)[0] is None
    assert prepared.allowed == frozenset({1 - full.decision.slot})
    world.fleet.set_status(1 - full.decision.slot, RankStatus.DOWN)

    assert world.brain.choose(prepared).decision.slot == full.decision.slot


async def test_what_ends_lets_the_next_one_go_at_once() -> None:
    """No tick, no first token: the refusal of a prompt that took the rank is enough."""
    world = world_of(1)
    prepared = await world.prepare(prompt_of(60_000), {"x-session-id": "refused"})
    assert hold(world.brain, prepared)[0] is None
    refused = world.brain.choose(prepared)
    held, went = hold(world.brain, await world.prepare(prompt_of(40_000, start=200_000), {"x-session-id": "next"}))
    assert held is not None
    assert not went
    refused.lease.close(Outcome.CLIENT_ERROR, None)
    assert went


async def test_who_waits_goes_by_what_is_cached_by_then() -> None:
    """Held for a second, its prompt has come into the full rank's cache meanwhile: it is warm, and fits."""
    world = world_of(1)
    assert await ask(world, "full", 60_000, start=100, end=None) is not None
    prompt = prompt_of(40_000, start=200_000)
    held, went = hold(world.brain, await world.prepare(prompt, {"x-session-id": "s"}))
    assert held is not None
    world.publish(0, prompt[:39_000])
    world.now += 1.0
    other, _ = hold(world.brain, await world.prepare(prompt_of(40_000, start=300_000), {"x-session-id": "t"}))
    assert other is not None
    other.leave()
    assert went


@pytest.mark.parametrize("end", [o for o in Outcome if o not in ENDS_WITH_CONTEXT])
async def test_what_fails_is_charged_no_more(end: Outcome) -> None:
    """Nothing of it is in the rank's cache."""
    world = world_of(1)
    assert await ask(world, "s", 60_000, start=100, end=end) is not None
    assert charged(world) == 0


async def test_a_client_that_leaves_leaves_its_context_if_it_was_computed() -> None:
    """Before the first token there is none."""
    world = world_of(1)
    assert await ask(world, "began", 60_000, start=100, end=Outcome.CLIENT_GONE) is not None
    assert charged(world) >= 60_000
    prepared = await world.prepare(prompt_of(20_000, start=200_000), {"x-session-id": "waited"})
    assert hold(world.brain, prepared)[0] is None
    before = charged(world)
    world.brain.choose(prepared).lease.close(Outcome.CLIENT_GONE, None)
    assert charged(world) == before


async def test_answers_are_charged_as_long_as_answers_are() -> None:
    """Agents allow 32,000 tokens and answers take 50: of conversations of 2,000 tokens some forty fit 85,000."""
    world = world_of(1)
    for number in range(100):
        world.now += 1.0
        await ask(world, "taught", 10, start=9_000_000 + 100 * number, max_tokens=32_000)
    count = 0
    while await ask(world, f"s{count}", 2_000, start=100 + 10_000 * count, max_tokens=32_000):
        count += 1

    assert 36 <= count <= 42


@pytest.mark.parametrize("most", [-(10**9), 0, 10**12, 10**311, -(10**400)])
async def test_no_max_tokens_is_too_absurd(most: int) -> None:
    """A newcomer that asks for it neither waits for ever nor makes room, and it costs no more than a long answer."""
    for admission in ("guarded", "off"):
        world = World(ranks=2, admission=admission)
        for number in range(2):
            assert await ask(world, f"s{number}", 1_000, start=100 + 10_000 * number) is not None
        assert await ask(world, "absurd", 100, start=900_000, end=None, max_tokens=most) is not None
        assert await ask(world, "small", 100, start=950_000) is not None
        if admission == "guarded":
            assert 2_200 <= charged(world) <= 4_000


async def test_what_no_context_holds_is_not_waited_for() -> None:
    """The engine refuses it at once; and an answer is charged no further than the context goes."""
    world = World(ranks=0, admission="guarded")
    slot = world.fleet.add_rank(
        RankId("w0", 0),
        target=Target("127.0.0.1", 1, 0, 1, Engine.SHIM),
        models=frozenset({"m"}),
        block_tokens=BLOCK,
        pool_tokens=100_000,
        cards={"m": {"id": "m", "max_model_len": 80_000}},
    )
    world.fleet.set_status(slot, RankStatus.READY)
    assert await ask(world, "full", 79_900, start=100, end=None, max_tokens=32_000) is not None
    assert charged(world) == 80_000

    assert await ask(world, "held", 60_000, start=200_000) is None
    assert await ask(world, "too long", 80_001, start=300_000, end=Outcome.CLIENT_ERROR) is not None


@pytest.mark.parametrize("other", [None, 80_000, 90_000])
async def test_what_no_context_holds_leaves_nothing(other: int | None) -> None:
    """A prompt that every engine refuses is nowhere afterwards: no session's home, nobody's prefix, no load. Where the
    other rank might take it, or does not say, it is a prompt like any other.
    """
    world = World(ranks=0, admission="guarded")
    for number, context in enumerate((80_000, other)):
        world.add(f"w{number}", cards={"m": {"id": "m", "max_model_len": context}})
    prepared = await world.prepare(prompt_of(80_001, start=300_000), {"x-session-id": "s"})
    attempt = world.brain.choose(prepared)
    is_refused = other == 80_000
    assert (world.fleet.loads.load(attempt.decision.slot).waiting_tokens < 100) == is_refused
    attempt.lease.close(Outcome.CLIENT_ERROR, None)

    shorter = await world.prepare(prompt_of(70_000, start=300_000), {"x-session-id": "s"})
    assert (shorter.ideal_tokens == 0) == is_refused
    assert prepared.session is None if is_refused else prepared.session == shorter.session


async def test_a_rank_that_fails_has_no_room() -> None:
    """Rank 0 is full, rank 1 fails what it gets: after its breaker has opened, requests wait instead."""
    world = world_of(2, breaker_failures=2)
    full = await ask(world, "full", 70_000, start=100, end=None)
    assert full is not None
    held = 0
    for number in range(10):
        world.now += 0.1
        prepared = await world.prepare(
            prompt_of(50_000, start=5_000_000 + 100_000 * number), {"x-session-id": f"n{number}"}
        )
        if hold(world.brain, prepared)[0] is not None:
            held += 1
            continue
        attempt = world.brain.choose(prepared)
        attempt.lease.close(Outcome.RESET, None)
    assert held == 8
    assert world.fleet.breakers.closed_to(now=world.now) == {1 - full.decision.slot}


async def test_a_conversation_keeps_its_place_when_an_attempt_elsewhere_fails() -> None:
    """60,000 of 100,000 tokens at home. Both ranks push its next turn back; a newcomer of 70,000 does not get its room,
    and it goes home a second later. Where the attempt elsewhere succeeds, home is charged no more."""
    world = World(ranks=2, admission="guarded")
    base, headers = prompt_of(60_000), {"x-session-id": "s"}

    async def attempt(prompt: list[int], outcome: Outcome, exclude: frozenset[int]) -> int:
        prepared = await world.prepare(prompt, headers, max_tokens=10)
        assert world.brain.hold(prepared, lambda: None, exclude=exclude) is None
        made = world.brain.choose(prepared, exclude=exclude)
        if outcome is Outcome.OK:
            made.lease.first_byte()
        made.lease.close(outcome, Usage(len(prompt), 10, 0) if outcome is Outcome.OK else None)
        return made.decision.slot

    nothing = frozenset[int]()
    home = await attempt(base, Outcome.OK, nothing)
    (other,) = set(world.slots) - {home}
    world.publish(home, base)
    following = base + prompt_of(500, start=900_000)
    for exclude in (nothing, frozenset({home})):
        await attempt(following, Outcome.PUSHBACK, exclude)
    assert world.brain._holding is not None
    charged_tokens = world.brain._holding._admission.charged_tokens
    assert (charged_tokens(home), charged_tokens(other)) == (60_010, 0)
    newcomer = await world.prepare(prompt_of(70_000, start=2_000_000), {"x-session-id": "new"}, max_tokens=10)
    assert world.brain.hold(newcomer, lambda: None) is None
    assert newcomer.allowed == {other}
    assert await attempt(following, Outcome.OK, nothing) == home

    assert await attempt(following, Outcome.OK, frozenset({home})) == other
    assert (charged_tokens(home), charged_tokens(other)) == (0, 60_510)


@pytest.mark.parametrize("admission", ["off", "guarded"])
async def test_what_is_tried_again_is_no_return(admission: str) -> None:
    """Two hundred conversations of one request, each pushed back once: of a prior of 10 returns none is added, while
    all depart, but for the last 21, whose ten seconds are not over."""
    world = World(ranks=3, admission=admission)
    for number in range(200):
        world.now += 0.5
        prepared = await world.prepare(prompt_of(200, start=1000 * number), {"x-session-id": f"once{number}"})
        exclude = frozenset[int]()
        for outcome in (Outcome.PUSHBACK, Outcome.OK):
            assert world.brain.hold(prepared, lambda: None, exclude=exclude) is None
            made = world.brain.choose(prepared, exclude=exclude)
            made.lease.close(outcome, None)
            exclude = frozenset({made.decision.slot})

    fade = 0.5 ** (1 / 200)
    returned = departed = 10.0
    for _ in range(200 - 21):
        returned, departed = returned * fade, departed * fade + 1
    assert world.fleet.sessions.returns.ratio(prepared.model) == pytest.approx(returned / departed)


async def test_a_rank_that_takes_anothers_slot_owes_nothing() -> None:
    """The only rank is full, and replaced by another one under its slot between two requests: there is room for all."""
    world = world_of(1)
    assert await ask(world, "a", 80_000, start=100) is not None
    assert await ask(world, "b", 60_000, start=1_000_000) is None
    world.fleet.remove_rank(world.slots[0])
    assert world.add("another") == world.slots[0]

    assert await ask(world, "b", 60_000, start=1_000_000) is not None
    assert charged(world) == 60_050


async def test_who_is_drained_stays_until_there_is_room_elsewhere() -> None:
    """60,000 tokens on a rank that is drained; the other of 100,000 is charged with 80,000. The next turn was admitted
    to its home alone, and goes there; once the other rank is free, it leaves."""
    world = world_of(2)
    first = await ask(world, "s", 60_000, start=100)
    full = await ask(world, "full", 80_000, start=500_000, end=None)
    assert first is not None
    assert full is not None
    home, other = first.decision.slot, full.decision.slot
    assert home != other
    world.publish(home, prompt_of(60_000))
    world.fleet.set_status(home, RankStatus.DRAINING)

    second = await ask(world, "s", 62_000, start=100)
    assert second is not None
    assert second.decision.slot == home
    full.lease.close(Outcome.CLIENT_ERROR, None)
    third = await ask(world, "s", 62_000, start=100)
    assert third is not None
    assert third.decision.slot == other


async def test_a_place_that_should_be_free_is_foretold_as_such() -> None:
    """Nobody has come since its prompt should have been computed."""
    world = world_of(1)
    prepared = await world.prepare(prompt_of(1_000), {"x-session-id": "first"}, max_tokens=300)
    assert hold(world.brain, prepared)[0] is None
    first = world.brain.choose(prepared)
    body = json.dumps({"model": "m", "prompt": prompt_of(1_000, start=5_000)}).encode()
    asked = parse_request(Endpoint.COMPLETIONS, body)
    foretold = await world.brain.preview(asked, {"x-session-id": "second"}, tenant="t")
    assert foretold.waiting is not None

    world.now += 1.01 * first.decision.expected_prefill_seconds
    foretold = await world.brain.preview(asked, {"x-session-id": "second"}, tenant="t")
    assert foretold.waiting is None


async def test_a_place_is_looked_after_as_soon_as_it_should_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two who wait the first is let go by an end, and its prompt is short: the second does not wait for the next
    look, which is due in a minute here.
    """
    monkeypatch.setattr(holding, "_LOOK_AGAIN_SECONDS", 60.0)
    world = world_of(1)
    full = await ask(world, "full", 84_000, start=100, end=None)
    assert full is not None
    chosen: list[Attempt] = []

    def go(prepared: PreparedRequest) -> None:
        chosen.append(world.brain.choose(prepared))

    for number in (1, 2):
        prompt = prompt_of(2_000, start=200_000 * number)
        prepared = await world.prepare(prompt, {"x-session-id": f"s{number}"}, max_tokens=300)
        assert world.brain.hold(prepared, partial(go, prepared)) is not None
    full.lease.close(Outcome.CLIENT_ERROR, None)
    assert len(chosen) == 1
    world.now += 1.01 * chosen[0].decision.expected_prefill_seconds

    async with asyncio.timeout(20):
        await asyncio.sleep(chosen[0].decision.expected_prefill_seconds)
        while len(chosen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_whole_answer_frees_its_place_for_a_cold_start(is_streamed: bool) -> None:
    """When its prompt should be computed, who waits to start cold is let go. A stream's first token is awaited."""
    world = world_of(1)
    prepared = await world.prepare(prompt_of(1_000), {"x-session-id": "first"}, max_tokens=300, stream=is_streamed)
    assert hold(world.brain, prepared)[0] is None
    first = world.brain.choose(prepared)
    held, went = hold(world.brain, await world.prepare(prompt_of(1_000, start=5_000), {"x-session-id": "second"}))
    assert held is not None
    assert held.waiting.why is Barrier.COLD_START

    world.now += 1.01 * first.decision.expected_prefill_seconds
    other, _ = hold(world.brain, await world.prepare(prompt_of(1_000, start=9_000), {"x-session-id": "third"}))
    assert bool(went) is not is_streamed
    if other is not None:
        other.leave()
    held.leave()
