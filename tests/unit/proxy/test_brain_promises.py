"""What the brain expects of ranks: promises, sessions, and who can serve at all."""

from __future__ import annotations

import json

import pytest

from router.core.types import Engine, RankStatus, Reason
from router.errors import NotFound, NoWorker
from router.proxy.promises import PROVISIONAL_SECONDS
from router.proxy.types import Outcome
from router.wire.usage import Usage
from tests.fakes.brain_world import FAILURES, World, prompt_of

# --- promises ----------------------------------------------------------------------------------------------


async def test_the_same_prompt_at_once_is_expected_on_the_same_rank() -> None:
    """100 tokens hold 6 whole blocks; no event has come yet."""
    world = World(ranks=4)
    first = await world.ask(prompt_of(100), "s")
    second = await world.ask(prompt_of(100), "s")

    assert (first.decision.expected_cached_tokens, second.decision.expected_cached_tokens) == (0, 96)
    assert (second.decision.slot, second.decision.reason) == (first.decision.slot, Reason.HOME)


async def test_of_an_sglang_only_what_is_computed_in_pieces_counts_at_once() -> None:
    """Of 300 tokens in pieces of 128, two pieces enter the tree before the last: 256 are found, and with the first
    token all 18 blocks. A prompt of 100 is one piece.
    """
    world = World(ranks=0)
    slot = world.add("sglang", engine=Engine.SGLANG, prefill_chunk_tokens=128)
    short = await world.ask(prompt_of(100, start=9000))
    assert await world.promised(prompt_of(100, start=9000)) == {}
    short.lease.first_byte()

    attempt = await world.ask(prompt_of(300))
    assert await world.promised(prompt_of(300)) == {slot: 256}
    attempt.lease.first_byte()
    assert await world.promised(prompt_of(300)) == {slot: 288}


async def test_the_pieces_of_a_prompt_that_failed_are_taken_back() -> None:
    """Nothing of it will be there."""
    world = World(ranks=0)
    world.add("sglang", engine=Engine.SGLANG, prefill_chunk_tokens=128)
    attempt = await world.ask(prompt_of(300))
    attempt.lease.close(Outcome.RESET, None)

    assert await world.promised(prompt_of(300)) == {}


async def test_an_sglang_that_does_not_say_how_it_cuts_prompts_promises_nothing_at_once() -> None:
    """What is in flight together misses."""
    world = World(ranks=0)
    world.add("sglang", engine=Engine.SGLANG)
    await world.ask(prompt_of(300))

    assert await world.promised(prompt_of(300)) == {}


async def test_a_prompt_of_whole_blocks_keeps_one_token_to_compute() -> None:
    """96 tokens are 6 blocks, of which 5 can be reused."""
    world = World(ranks=1)
    await world.ask(prompt_of(96))

    assert (await world.ask(prompt_of(96))).decision.expected_cached_tokens == 80


@pytest.mark.parametrize("outcome", FAILURES)
async def test_a_failure_takes_its_promise_back_at_once(outcome: Outcome) -> None:
    """Whatever the failure was, nothing will be there."""
    world = World()
    attempt = await world.ask(prompt_of(100))
    attempt.lease.close(outcome, None)

    assert await world.promised(prompt_of(100)) == {}


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.CLIENT_GONE])
async def test_a_promise_outlives_its_request_by_the_lag_of_events(outcome: Outcome) -> None:
    """However long the request ran; then events speak alone."""
    world = World()
    attempt = await world.ask(prompt_of(100))
    slot = attempt.decision.slot
    world.now += 500.0
    attempt.lease.close(outcome, None)
    for waited, expected in ((PROVISIONAL_SECONDS - 0.1, {slot: 96}), (0.2, {})):
        world.now += waited
        (await world.ask([1])).lease.close(Outcome.CONNECT, None)
        assert await world.promised(prompt_of(100)) == expected


@pytest.mark.parametrize(("outcome", "expected"), [(Outcome.OK, 96), (Outcome.CLIENT_GONE, 112)])
async def test_the_last_token_of_an_answer_that_is_cut_off_has_been_computed(outcome: Outcome, expected: int) -> None:
    """100 tokens and 12 are seven blocks, if the rank was making a thirteenth: vLLM and SGLang both are."""
    world = World(ranks=1)
    attempt = await world.ask(prompt_of(100))
    attempt.lease.first_byte()
    attempt.lease.close(outcome, None, output=prompt_of(112)[100:])

    assert await world.promised(prompt_of(120)) == {0: expected}


async def test_events_confirm_a_promise() -> None:
    """What the rank announced stays when the promise ends."""
    world = World()
    attempt = await world.ask(prompt_of(100))
    world.publish(attempt.decision.slot, prompt_of(64))
    attempt.lease.close(Outcome.RESET, None)

    assert await world.promised(prompt_of(100)) == {attempt.decision.slot: 64}


async def test_a_promise_does_not_lean_on_another_that_may_break() -> None:
    """Two requests share a head that neither has computed; the first fails, and the second computes all of it."""
    world = World(ranks=1)
    first = await world.ask(prompt_of(100))
    await world.ask(prompt_of(200))
    first.lease.close(Outcome.RESET, None)
    assert await world.promised(prompt_of(200)) == {0: 192}


async def test_salts_divide_the_cache() -> None:
    """The same tokens under another salt are other blocks."""
    world = World(ranks=1)
    await world.ask(prompt_of(100), cache_salt="a")

    assert (await world.ask(prompt_of(100), cache_salt="b")).decision.expected_cached_tokens == 0
    assert (await world.ask(prompt_of(100), cache_salt="a")).decision.expected_cached_tokens == 96


# --- sessions -----------------------------------------------------------------------------------------------


async def test_first_requests_of_one_session_bind_once() -> None:
    """Sent together they have one home, though nothing is cached and others are idle."""
    world = World(ranks=8)
    attempts = [await world.ask(prompt_of(600 + number), "s") for number in range(3)]

    assert len({attempt.decision.slot for attempt in attempts}) == 1
    assert len(world.fleet.sessions) == 1


async def test_configured_headers_name_the_session_first() -> None:
    """The operator's own, in the spelling of the settings."""
    world = World(session_headers=("X-My-Agent",))
    prepared = await world.prepare([1], {"x-my-agent": "a", "x-session-id": "b"})

    assert prepared.session is not None
    assert (prepared.session.tenant, prepared.session.session) == ("t", "a")


# --- who can serve --------------------------------------------------------------------------------------------


async def test_a_model_that_nobody_serves_does_not_exist() -> None:
    """404 with the model's name; 503 while there is no worker at all."""
    with pytest.raises(NotFound, match="'other'") as refusal:
        await World().prepare([1], model="other")
    assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")

    with pytest.raises(NoWorker, match="registered"):
        await World(ranks=0).prepare([1])


async def test_a_rank_that_is_not_ready_takes_nothing_new() -> None:
    """Not while it starts, is down, or is drained; a drained one keeps its own sessions."""
    world = World(ranks=1)
    (await world.ask([1, 2], "mine")).lease.close(Outcome.OK, None)
    assert world.brain.ready()
    for status in (RankStatus.PENDING, RankStatus.DOWN, RankStatus.DRAINING):
        world.fleet.set_status(0, status)
        assert not world.brain.ready()
        with pytest.raises(NoWorker, match="ready for 'm'"):
            await world.ask([1, 2], "other")

    assert (await world.ask([1, 2], "mine")).decision.slot == 0


async def test_ranks_that_failed_are_left_out() -> None:
    """The next attempts go elsewhere and say so, until nobody is left."""
    world = World(ranks=3)
    prepared = await world.prepare(prompt_of(100))
    failed: frozenset[int] = frozenset()
    reasons = []
    for _ in range(3):
        attempt = world.brain.choose(prepared, exclude=failed)
        attempt.lease.close(Outcome.CONNECT, None)
        assert attempt.decision.slot not in failed
        reasons.append(attempt.decision.reason)
        failed |= {attempt.decision.slot}

    assert reasons == [Reason.COLD, Reason.RETRY, Reason.RETRY]
    with pytest.raises(NoWorker, match="No other worker"):
        world.brain.choose(prepared, exclude=failed)


@pytest.mark.parametrize("outcome", list(Outcome))
async def test_what_is_held_against_a_rank(outcome: Outcome) -> None:
    """Whoever leaves, runs out of time, errs, or finds it full says nothing of its health; all other failures do."""
    world = World(ranks=3, breaker_failures=3)
    for _ in range(3):
        world.brain.choose(await world.prepare("hello"), exclude=frozenset({1, 2})).lease.close(outcome, None)

    is_blamed = outcome in {Outcome.CONNECT, Outcome.RESET, Outcome.TIMEOUT, Outcome.PROTOCOL, Outcome.SERVER_ERROR}
    assert world.fleet.breakers.closed_to(now=world.now) == (frozenset({0}) if is_blamed else frozenset())


async def test_models_and_aliases() -> None:
    """The list is the union of what workers serve; an alias means its model."""
    world = World(ranks=1)
    world.add("big", models=frozenset({"m", "large"}))
    world.brain.set_alias("gpt", "m")

    assert [card["id"] for card in json.loads(world.brain.model_list())["data"]] == ["gpt", "large", "m"]
    assert (await world.prepare([1], model="gpt")).model == "m"


async def test_a_rank_may_leave_while_it_serves() -> None:
    """Its requests end without an error, and the rank that gets its slot begins with nothing."""
    world = World(ranks=1)
    attempts = [await world.ask(prompt_of(100), "s") for _ in range(3)]
    attempts[0].lease.first_byte()
    world.fleet.remove_rank(0)
    world.add("w0")
    assert await world.promised(prompt_of(100)) == {}

    mine = await world.ask(prompt_of(100), "s")
    attempts[1].lease.first_byte()
    for attempt in attempts:
        attempt.lease.close(Outcome.RESET, None)
    load = world.fleet.member(0).load
    assert (load.inflight, load.inflight_tokens, load.waiting, load.waiting_tokens) == (1, 100, 1, 100)
    assert await world.promised(prompt_of(100)) == {0: 96}

    world.now += 1e6  # far beyond idleness: the request that runs keeps its session
    assert (await world.ask(prompt_of(100), "s")).decision.reason is Reason.ONLY
    assert len(world.fleet.sessions) == 1
    mine.lease.close(Outcome.OK, None)


# --- answers -----------------------------------------------------------------------------------------------


def of_vllm() -> World:
    world = World(ranks=0)
    world.add("vllm", engine=Engine.VLLM)
    return world


async def test_an_answer_counts_as_it_streams_where_it_tells_its_ids() -> None:
    """100 tokens and 13 are seven blocks, once the last of them has been computed; 128 tokens are eight."""
    world, tokens = of_vllm(), prompt_of(140)
    attempt = await world.ask(tokens[:100])
    attempt.lease.first_byte()
    for told, expected in ((12, 96), (13, 112), (28, 112), (29, 128), (29, 128)):
        attempt.lease.generated(tokens[100 : 100 + told])
        assert await world.promised(tokens) == {0: expected}, told
    attempt.lease.close(Outcome.OK, None, output=tokens[100:129])

    assert await world.promised(tokens) == {0: 128}
    world.now += PROVISIONAL_SECONDS + 0.1
    (await world.ask([1])).lease.close(Outcome.CONNECT, None)
    assert await world.promised(tokens) == {}


async def test_of_an_answer_that_streams_its_chain_is_remembered_once() -> None:
    """Not once a block: of a prompt of 100,000 tokens and an answer of 16,000 that was 56 MB. Prompt and answer are
    two, until they are nobody's.
    """
    world, tokens = of_vllm(), prompt_of(500)
    attempt = await world.ask(tokens[:100])
    attempt.lease.first_byte()
    index = world.fleet.member(0).index
    assert index is not None
    for told in range(400):
        attempt.lease.generated(tokens[100 : 100 + told])
    chains = [(len(chain.keys), chain.start) for chain in index.provisional.expected(0)]
    assert chains == [(31, 6), (6, None)]

    attempt.lease.close(Outcome.RESET, None)
    assert [*index.provisional.expected(0)] == []


async def test_an_answer_that_breaks_is_taken_back() -> None:
    """Of what has been promised of it nothing is left."""
    world, tokens = of_vllm(), prompt_of(140)
    attempt = await world.ask(tokens[:100])
    attempt.lease.first_byte()
    attempt.lease.generated(tokens[100:130])
    attempt.lease.close(Outcome.RESET, None)

    assert await world.promised(tokens) == {}


@pytest.mark.parametrize("engine", [Engine.SHIM, Engine.SGLANG])
async def test_other_engines_keep_an_answer_when_it_has_ended(engine: Engine) -> None:
    """Then it is entered whole."""
    world, tokens = World(ranks=0), prompt_of(140)
    world.add("w", engine=engine)
    attempt = await world.ask(tokens[:100])
    attempt.lease.first_byte()
    attempt.lease.generated(tokens[100:130])
    assert await world.promised(tokens) == {0: 96}
    attempt.lease.close(Outcome.OK, Usage(100, 30, 0), output=tokens[100:130])

    assert await world.promised(tokens) == {0: 128}


async def test_ids_that_are_not_all_there_are_no_answer() -> None:
    """The worker counts 30 tokens and told of 29."""
    world, tokens = of_vllm(), prompt_of(140)
    attempt = await world.ask(tokens[:100])
    attempt.lease.first_byte()
    attempt.lease.close(Outcome.OK, Usage(100, 30, 0), output=tokens[100:129])

    assert await world.promised(tokens) == {0: 96}
