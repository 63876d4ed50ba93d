"""The brain over a real fleet with a clock in hand: decisions, promises, leases, and the accounts kept of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from engine_shim.model.needle_text import filler
from router.core.types import Decision, Engine, RankId, RankStatus, Reason
from router.errors import NotFound, NoWorker
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.proxy.brain import RouterBrain
from router.proxy.prepared import PreparedRequest
from router.proxy.promises import PROVISIONAL_SECONDS
from router.proxy.tokenization import PromptTokenizer
from router.proxy.types import Attempt, Outcome
from router.settings import Policy, RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored, EventBatch
from router.wire.openai import Endpoint, parse_request
from router.wire.usage import Usage

NEEDLE = Path(__file__).parents[3] / "engine_shim" / "model" / "needle"
FILES = (NEEDLE / "tokenizer.json").read_bytes(), json.loads((NEEDLE / "tokenizer_config.json").read_bytes())
BLOCK = 16
TOKENIZER = PromptTokenizer.from_files(*FILES)
FAILURES = [o for o in Outcome if o not in (Outcome.OK, Outcome.CLIENT_GONE, Outcome.DEADLINE)]


class World:
    """A fleet of ready ranks that serve ``m``, a brain, and a clock that stands still until moved."""

    def __init__(self, *, ranks: int = 2, tokens: bool = True, **settings: Any) -> None:
        self.now = 1000.0
        self.metrics = Metrics(CollectorRegistry())
        routing = RoutingSettings(**settings)
        self.fleet = Fleet(routing, self.metrics, clock=lambda: self.now)
        self.brain = RouterBrain(self.fleet, settings=routing, metrics=self.metrics)
        if tokens:
            self.brain.set_tokenizer("m", TOKENIZER)
        self.slots = [self.add(f"w{number}") for number in range(ranks)]

    def add(self, worker: str, *, models: frozenset[str] = frozenset({"m"})) -> int:
        slot = self.fleet.add_rank(
            RankId(worker, 0),
            target=Target("127.0.0.1", 1, 0, 1, Engine.SHIM),
            models=models,
            block_tokens=BLOCK,
            pool_tokens=100_000,
        )
        self.fleet.set_status(slot, RankStatus.READY)
        return slot

    async def prepare(
        self, prompt: Sequence[int] | str | list[dict[str, Any]], headers: dict[str, str] | None = None, **fields: Any
    ) -> PreparedRequest:
        """A request for token ids, text, or messages."""
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        endpoint, name = (Endpoint.CHAT, "messages") if is_chat else (Endpoint.COMPLETIONS, "prompt")
        body = json.dumps({"model": "m", name: prompt, **fields}).encode()
        return await self.brain.prepare(parse_request(endpoint, body), headers or {}, tenant="t")

    async def ask(
        self, prompt: Sequence[int] | str | list[dict[str, Any]], session: str | None = None, **fields: Any
    ) -> Attempt:
        """Prepare and choose."""
        headers = {"x-session-id": session} if session else {}
        return self.brain.choose(await self.prepare(prompt, headers, **fields))

    async def promised(self, prompt: Sequence[int]) -> dict[int, int]:
        """What each rank is believed to hold of a prompt, without asking for it."""
        return dict(self.brain._reusable(await self.prepare(prompt)))

    def publish(self, slot: int, tokens: Sequence[int], *, medium: str = "GPU") -> None:
        """The rank's events say that it holds these tokens' whole blocks."""
        keys = block_keys(tokens, block_tokens=BLOCK, parent=namespace_seed("", ""))
        if keys:
            event = BlockStored(tuple(keys), None, tuple(tokens[: len(keys) * BLOCK]), BLOCK, medium)
            self.fleet.apply(slot, EventBatch(self.now, (event,)), now=self.now)

    def sample(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"homing_{name}", labels)
        return 0.0 if value is None else value

    def rank_sample(self, name: str, slot: int) -> float:
        return self.sample(name, worker=f"w{slot}", rank="0")


def prompt_of(length: int, *, start: int = 100) -> list[int]:
    """Token ids that no other start has."""
    return list(range(start, start + length))


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
    assert all(binding.inflight == 0 for _, binding in world.fleet.sessions.items())


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
    lease = (await world.ask(prompt_of(2000))).lease
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


# --- promises ----------------------------------------------------------------------------------------------


async def test_the_same_prompt_at_once_is_expected_on_the_same_rank() -> None:
    """100 tokens hold 6 whole blocks; no event has come yet."""
    world = World(ranks=4)
    first = await world.ask(prompt_of(100), "s")
    second = await world.ask(prompt_of(100), "s")

    assert (first.decision.expected_cached_tokens, second.decision.expected_cached_tokens) == (0, 96)
    assert (second.decision.slot, second.decision.reason) == (first.decision.slot, Reason.HOME)


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


# --- accounts ---------------------------------------------------------------------------------------------------


async def test_what_was_promised_is_compared_with_what_was() -> None:
    """Three requests of 100 tokens on one rank: cold as foretold; 96 foretold and found; 96 foretold, 32 found."""
    world = World(ranks=1)
    for found in (0, 96, 32):
        (await world.ask(prompt_of(100))).lease.close(Outcome.OK, Usage(100, 7, found))

    names = ("prompt_tokens", "cached_tokens", "predicted_cached_tokens", "best_cached_tokens", "ideal_cached_tokens")
    assert [world.rank_sample(f"{name}_total", 0) for name in names] == [300, 128, 192, 192, 192]
    labels = {"worker": "w0", "rank": "0"}
    missed = [world.sample("mispredicted_requests_total", **labels, direction=name) for name in ("over", "under")]
    assert missed == [1, 0]
    assert world.fleet.member(0).trust.ratio == pytest.approx(1 - 0.1 * (1 - 32 / 96))


async def test_the_best_rank_is_counted_beside_the_chosen() -> None:
    """Taken in turn, the second request goes where 32 tokens lie, though 96 lie elsewhere; a rank that is down holds
    nothing that counts."""
    world = World(ranks=2, policy=Policy.ROUND_ROBIN)
    world.publish(0, prompt_of(96))
    world.publish(1, prompt_of(32))
    prepared = await world.prepare(prompt_of(100))
    decisions = []
    for _ in range(2):
        attempt = world.brain.choose(prepared)
        attempt.lease.close(Outcome.OK, Usage(100, 1, attempt.decision.expected_cached_tokens))
        decisions.append(attempt.decision)
    world.fleet.set_status(0, RankStatus.DOWN)
    world.now += PROVISIONAL_SECONDS
    decisions.append(world.brain.choose(prepared).decision)

    assert [(each.slot, each.expected_cached_tokens, each.best_cached_tokens) for each in decisions] == [
        (0, 96, 96),
        (1, 32, 96),
        (1, 32, 32),
    ]
    names = ("predicted_cached_tokens_total", "best_cached_tokens_total")
    assert [world.rank_sample(name, 1) for name in names] == [32, 96]


@pytest.mark.parametrize(("outcome", "usage"), [(Outcome.RESET, Usage(100, 7, 0)), (Outcome.OK, None)])
async def test_without_a_whole_answer_nothing_is_compared(outcome: Outcome, usage: Usage | None) -> None:
    """Neither a broken answer nor one without usage judges a rank."""
    world = World(ranks=1)
    world.publish(0, prompt_of(96))
    (await world.ask(prompt_of(100))).lease.close(outcome, usage)

    assert world.rank_sample("prompt_tokens_total", 0) == 0
    assert world.fleet.member(0).trust.ratio == 1.0


async def test_an_engine_that_does_not_tell_reuse_is_not_judged() -> None:
    """``cached_tokens`` absent is not zero."""
    world = World(ranks=1)
    world.publish(0, prompt_of(96))
    (await world.ask(prompt_of(100))).lease.close(Outcome.OK, Usage(100, 7, None))

    assert world.fleet.member(0).trust.ratio == 1.0


@pytest.mark.parametrize(("said", "counted"), [((-5, -5), (0, 0)), ((100, 900), (100, 100)), ((100, -1), (100, 0))])
async def test_impossible_usage_breaks_nothing(said: tuple[int, int], counted: tuple[int, int]) -> None:
    """A worker may report what it likes: counters only grow, and reuse is at most the prompt."""
    world = World(ranks=1)
    (await world.ask(prompt_of(100))).lease.close(Outcome.OK, Usage(said[0], 1, said[1]))

    assert (world.rank_sample("prompt_tokens_total", 0), world.rank_sample("cached_tokens_total", 0)) == counted


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 15), st.sampled_from("mn")),
        min_size=1,
        max_size=10,
    )
)
async def test_the_ideal_is_what_an_endless_cache_would_reuse(prompts: list[tuple[list[int], int, str]]) -> None:
    """Whole blocks shared with any earlier prompt of the model, at most all but the last token: found pair by pair."""
    world = World(ranks=1)
    world.add("other", models=frozenset({"n"}))
    world.brain.set_tokenizer("n", TOKENIZER)
    earlier: list[tuple[list[int], str]] = []
    for blocks, rest, model in prompts:
        tokens = [token for block in blocks for token in [block] * BLOCK] + [9] * rest
        shared = [0]
        for other, its_model in earlier:
            if its_model == model:
                same = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None)
                shared.append(min(len(tokens), len(other)) if same is None else same)
        expected = min(max(shared) // BLOCK, (len(tokens) - 1) // BLOCK) * BLOCK
        earlier.append((tokens, model))

        assert (await world.prepare(tokens, model=model)).ideal_tokens == expected


async def test_an_empty_prompt_is_served_like_any_other() -> None:
    """No token, no block, no negative count."""
    world = World(ranks=1)
    attempt = await world.ask("")
    attempt.lease.first_byte()
    attempt.lease.close(Outcome.OK, Usage(0, 1, 0))

    assert (attempt.decision.expected_cached_tokens, world.rank_sample("ideal_cached_tokens_total", 0)) == (0, 0)


async def test_how_prompts_were_keyed_is_counted() -> None:
    """By tokens where a tokenizer has a say, by text where it has none: of several prompts there is no single chain."""
    world = World(ranks=1)
    await world.prepare([1, 2])
    await world.prepare(["two " * 100, "prompts " * 100])

    assert (world.sample("prompts_total", keyed="tokens"), world.sample("prompts_total", keyed="text")) == (1, 1)


async def test_a_long_body_is_keyed_as_a_short_one() -> None:
    """Tokenized beside the event loop, with the same result."""
    world = World(ranks=1)
    messages = [{"role": "user", "content": filler(30_000, seed=3)}]
    long = await world.prepare(messages)

    direct = PromptTokenizer.from_files(*FILES)
    body = json.dumps({"model": "m", "messages": messages}).encode()
    assert len(body) > 64 * 1024
    assert long.tokens == direct.encode(parse_request(Endpoint.CHAT, body))


# --- without a tokenizer -------------------------------------------------------------------------------------------


async def test_text_keeps_a_conversation_on_its_rank() -> None:
    """Growing prompts without a session follow their text, while others' text goes by load."""
    world = World(ranks=6, tokens=False)
    homes = {}
    for turn in range(1, 6):
        for name in ("a", "b", "c"):
            attempt = await world.ask("".join(f"{name} says {filler(400, seed=part)}" for part in range(turn)))
            attempt.lease.first_byte()
            attempt.lease.close(Outcome.OK, None)
            world.now += 1.0
            assert attempt.decision.reason is (Reason.COLD if turn == 1 else Reason.PREFIX)
            assert homes.setdefault(name, attempt.decision.slot) == attempt.decision.slot
    assert len(set(homes.values())) == 3


async def test_text_is_counted_in_blocks_of_256_bytes_as_64_tokens() -> None:
    """A prompt of 1,000 letters is 1,002 bytes as JSON: 3 whole blocks, 192 tokens of them."""
    world = World(ranks=1, tokens=False)
    await world.ask("x" * 1000)

    assert (await world.ask("x" * 1000)).decision.expected_cached_tokens == 192


async def test_a_text_never_promises_all_of_a_prompt() -> None:
    """JSON written anew may be longer than the body was: 1e300 takes more room written out."""
    world = World(ranks=1, tokens=False)
    message = {"role": "user", "content": "x", "numbers": [10**15] * 100}
    raw = json.dumps({"model": "m", "messages": [message]}, separators=(",", ":")).replace("1000000000000000", "1e15")
    request = parse_request(Endpoint.CHAT, raw.encode())
    for _ in range(2):
        attempt = world.brain.choose(await world.brain.prepare(request, {}, tenant="t"))

    assert 0 < attempt.decision.expected_cached_tokens < len(raw) // 4
    assert world.rank_sample("rank_waiting_tokens", 0) > 0


@pytest.mark.parametrize("change", ["messages", "tools", "cache_salt"])
async def test_other_text_has_other_keys(change: str) -> None:
    """Messages, tools and salt are all part of what a prefix is."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "word " * 200}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "cache_salt": "a",
    }
    other = {
        "messages": [{"role": "system", "content": "word " * 200}],
        "tools": [{"type": "function", "function": {"name": "g"}}],
        "cache_salt": "b",
    }
    world = World(ranks=1, tokens=False)
    keys = []
    for values in (fields, dict(fields), {**fields, change: other[change]}):
        messages = values.pop("messages")
        keys.append(list((await world.prepare(messages, **values)).text_keys))

    assert keys[0] == keys[1] != keys[2]
    assert keys[0][0] != keys[2][0]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("spoken", "counts"), [(0, True), (1, True), (2, False)])
async def test_the_next_turn_tells_what_the_answer_left_behind(spoken: int, *, counts: bool) -> None:
    """Before any event: the answer's blocks count once its text is back, ended by as many tokens as it had.

    ``spoken`` tokens more than the text has were reported: the end-of-turn token may be among them, others not.
    """
    world = World(ranks=1)
    world.brain.set_tokenizer("m", PromptTokenizer.from_files(FILES[0], {"chat_template": CHATML}))
    answer = "the house by the river stood open all day and " * 8
    first = [{"role": "user", "content": "go on for a while " * 10}]
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "and then"}]
    length = len((await world.prepare(first)).tokens or ())
    said = len(TOKENIZER._tokenizer.encode(answer, add_special_tokens=False).ids)

    attempt = await world.ask(first, session="s")
    attempt.lease.close(Outcome.OK, Usage(length, said + spoken, 0))
    world.now += 0.1
    expected = (await world.ask(second, session="s")).decision.expected_cached_tokens

    computed = length + said + spoken - 1  # the last token's own keys and values are never computed
    assert expected == (computed if counts else length) // BLOCK * BLOCK
