"""The brain's decisions and leases: what one history leads to, and what is left when it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.model.needle_text import filler
from router.core.types import Decision, Engine, RankId, RankStatus
from router.errors import NoWorker
from router.fleet.target import Target
from router.proxy.promises import PROVISIONAL_SECONDS
from router.proxy.types import Attempt, Outcome
from router.settings import Policy
from router.wire.usage import Usage
from tests.fakes.brain_world import BLOCK, FAILURES, World, prompt_of

# --- the same seed and inputs decide the same ----------------------------------------------------------

STEP = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 5), st.integers(1, 200), st.sampled_from([None, "s0", "s1", "s2"])),
    st.tuples(st.just("chat"), st.integers(0, 3), st.integers(1, 4), st.none()),
    st.tuples(st.just("first_byte"), st.integers(0, 9), st.none(), st.none()),
    st.tuples(st.just("close"), st.integers(0, 9), st.sampled_from(Outcome), st.integers(0, 200)),
    st.tuples(st.just("publish"), st.integers(0, 9), st.none(), st.none()),
    st.tuples(st.just("status"), st.integers(0, 2), st.sampled_from(RankStatus), st.none()),
    st.tuples(st.just("replace"), st.integers(0, 2), st.none(), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.001, 0.1, 1.0, 5.0]), st.none(), st.none()),
)
Script = list[tuple[Any, ...]]


@dataclass
class Run:
    """What a script led to."""

    world: World
    decisions: list[Decision | str] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)


async def play(script: Script, **settings: Any) -> Run:
    """Play a script on a new world, and close whatever is still open."""
    run = Run(World(ranks=3, **settings))
    world = run.world
    for what, one, two, three in script:
        match what:
            case "ask" | "chat":
                prompt: Any = prompt_of(two, start=one * 1000)
                if what == "chat":
                    prompt = [{"role": "user", "content": filler(20, seed=one * 10 + turn)} for turn in range(two)]
                try:
                    attempt = await world.ask(prompt, three)
                except NoWorker as error:
                    run.decisions.append(error.message)
                else:
                    run.decisions.append(attempt.decision)
                    run.attempts.append(attempt)
            case "wait":
                world.now += one
            case "status":
                world.fleet.set_status(one, two)
            case "replace":
                world.fleet.remove_rank(one)
                world.add(f"w{one}")
            case _ if run.attempts:
                attempt = run.attempts[one % len(run.attempts)]
                if what == "first_byte":
                    attempt.lease.first_byte()
                elif what == "close":
                    attempt.lease.close(two, Usage(200, 1, three))
                else:
                    world.publish(attempt.decision.slot, prompt_of(64, start=one * 1000))
    for attempt in run.attempts:
        attempt.lease.close(Outcome.OK, None)
    return run


@settings(max_examples=150, deadline=None)
@given(script=st.lists(STEP, min_size=5, max_size=40), policy=st.sampled_from(Policy), seed=st.integers(0, 3))
async def test_two_routers_with_one_seed_and_one_history_decide_alike(
    script: Script, policy: Policy, seed: int
) -> None:
    """Decision by decision, with all prices, over sessions, failures, events, and ranks that come and go."""
    one = await play(script, policy=policy, seed=seed)
    other = await play(script, policy=policy, seed=seed)

    assert one.decisions == other.decisions


async def test_a_worker_that_is_not_reached_is_doubted() -> None:
    """All ranks at its address are as good as gone, and whoever probes it is told at once."""
    world = World(ranks=2)
    elsewhere = world.fleet.add_rank(
        RankId("far", 0),
        target=Target("127.0.0.1", 2, 0, 1, Engine.SHIM),
        models=frozenset({"m"}),
        block_tokens=BLOCK,
        pool_tokens=100_000,
    )
    doubted: list[str] = []
    world.fleet.on_unreachable = doubted.append
    for outcome in FAILURES:
        attempt = world.brain.choose(await world.prepare("hello"), exclude=frozenset({elsewhere}))
        assert attempt.lease.beside() == {0, 1}
        attempt.lease.close(outcome, None)
        assert doubted == ([attempt.decision.id.worker] if outcome is Outcome.CONNECT else [])
        doubted.clear()


async def test_another_seed_decides_otherwise() -> None:
    """Thirty cold requests among equals: the draw is the seed's."""

    async def slots(seed: int) -> list[int]:
        world = World(ranks=8, seed=seed)
        chosen = []
        for number in range(30):
            attempt = await world.ask(prompt_of(40, start=number * 100))
            attempt.lease.close(Outcome.PUSHBACK, None)
            world.now += 10_000.0
            chosen.append(attempt.decision.slot)
        return chosen

    assert await slots(1) == await slots(1) != await slots(2)
    assert len(set(await slots(1))) > 4


# --- leases -----------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(script=st.lists(STEP, min_size=5, max_size=40))
async def test_nothing_is_left_once_all_has_ended(script: Script) -> None:
    """After any history the gauges stand at zero, no block is promised, and no session holds a request."""
    run = await play(script)
    world = run.world
    world.now += PROVISIONAL_SECONDS
    for slot in world.slots:
        world.fleet.set_status(slot, RankStatus.READY)
    (await world.ask([1])).lease.close(Outcome.CONNECT, None)

    for member in world.fleet.members():
        load = member.load
        assert (load.inflight, load.inflight_tokens, load.waiting, load.waiting_tokens) == (0, 0, 0, 0)
        assert (load.waiting_seconds, world.rank_sample("rank_inflight_requests", member.slot)) == (0.0, 0.0)
        assert 0.0 <= member.trust.ratio <= 1.0
        assert member.pace.factor > 0.0
    (index,) = world.fleet.indexes("m")
    assert (len(index.provisional), index.provisional.dense) == (0, {})
    assert all(binding.inflight == 0 for _, binding in world.fleet.sessions.recent())


async def test_a_lease_counts_while_it_is_open() -> None:
    """100 tokens wait for their prefill until the first byte, and are in flight until the end, once."""
    world = World(ranks=1)
    lease = (await world.ask(prompt_of(100))).lease
    assert (world.rank_sample("rank_inflight_requests", 0), world.rank_sample("rank_waiting_tokens", 0)) == (1, 100)

    world.now += 0.5
    lease.first_byte()
    lease.first_byte()
    assert (world.rank_sample("rank_inflight_requests", 0), world.rank_sample("rank_waiting_tokens", 0)) == (1, 0)
    lease.close(Outcome.OK, Usage(100, 5, 0))
    lease.close(Outcome.RESET, Usage(100, 5, 0))
    lease.first_byte()
    assert (world.rank_sample("rank_inflight_requests", 0), world.rank_sample("prompt_tokens_total", 0)) == (0, 100)


async def test_a_lease_knows_whether_its_worker_answers_probes() -> None:
    """Down: it does not. Gone: nobody probes it."""
    world = World(ranks=1)
    lease = (await world.ask([1])).lease
    answers = [lease.worker_answers()]
    world.fleet.set_status(0, RankStatus.DOWN)
    answers.append(lease.worker_answers())
    world.fleet.remove_rank(0)
    answers.append(lease.worker_answers())
    lease.close(Outcome.OK, None)
    assert answers == [True, False, None]


async def test_a_ranks_speed_is_learned_from_its_first_byte() -> None:
    """20,000 tokens/s are assumed. 2,000 tokens in 0.2 s is half of it: a factor of two (attention's share, a half at
    100,000 tokens, is 1/200 here)."""
    world = World(ranks=1, prefill_tokens_per_second=20_000)
    lease = (await world.ask(prompt_of(2000), stream=True)).lease
    world.now += 0.2
    lease.first_byte()

    assert world.fleet.member(0).pace.factor == pytest.approx(2 / 1.005)


async def test_a_copy_in_a_lower_tier_draws_its_conversation_and_teaches_no_speed() -> None:
    """Rank 1 has 1,984 of 2,000 tokens in host memory: 0.02 s instead of 0.1, which says nothing of how it computes.

    It is asked nine times, with other prompts, since ties are drawn.
    """
    world = World(prefill_tokens_per_second=20_000)
    for number in range(9):
        prompt = prompt_of(2000, start=10_000 * number)
        world.publish(1, prompt, medium="CPU")
        attempt = await world.ask(prompt)
        assert (attempt.decision.slot, attempt.decision.expected_cached_tokens) == (1, 0)
        assert attempt.decision.expected_prefill_seconds == pytest.approx(0.2 * 0.1, rel=0.05)
        world.now += 0.001
        attempt.lease.first_byte()
        attempt.lease.close(Outcome.OK, None)

    assert world.fleet.member(1).pace.factor == 1.0
