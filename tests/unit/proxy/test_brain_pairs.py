"""The brain over a fleet with roles: leases on both ranks of a pair, where a session is at home, what is learnt."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.core.pd import HANDOVER_SECONDS
from router.core.types import (
    Decision,
    Engine,
    FleetView,
    Handover,
    Part,
    RankId,
    RankStatus,
    Reason,
    RouteRequest,
    WorkerRole,
)
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.proxy.brain import RouterBrain
from router.proxy.prepared import PreparedRequest
from router.proxy.types import Attempt, Outcome
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored, EventBatch
from router.wire.openai import Endpoint, parse_request
from router.wire.usage import Usage
from tests.fakes.brain_world import BLOCK, TOKENIZER

PROMPT = list(range(100, 1100))
PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


class World:
    """Two prefill ranks (slots 0 and 1) and two decode ranks (2 and 3), and a clock in hand."""

    def __init__(self, *, handover: Handover = Handover.BOOTSTRAP, sufficient: bool = False) -> None:
        self.now = 1000.0
        self.metrics = Metrics(CollectorRegistry())
        settings = RoutingSettings(admission="guarded", prefill_tokens_per_second=10_000.0)
        self.fleet = Fleet(settings, self.metrics, clock=lambda: self.now)
        self.brain = RouterBrain(self.fleet, settings=settings, metrics=self.metrics)
        self.brain.set_tokenizer("m", TOKENIZER)
        for number, role in enumerate((PREFILL, PREFILL, DECODE, DECODE)):
            part = Part(role, handover, sufficient)
            slot = self.fleet.add_rank(
                RankId(f"w{number}", 0),
                target=Target("127.0.0.1", 1, 0, 1, Engine.SHIM, part=part),
                models=frozenset({"m"}),
                block_tokens=BLOCK,
                pool_tokens=100_000,
            )
            assert slot == number
            self.fleet.set_status(slot, RankStatus.READY)

    async def prepare(self, tokens: int, session: str | None = "s", **fields: Any) -> PreparedRequest:
        body = json.dumps({"model": "m", "prompt": PROMPT[:tokens], **fields}).encode()
        headers = {"x-session-id": session} if session else {}
        request = parse_request(Endpoint.COMPLETIONS, body)
        return await self.brain.prepare(request, headers, tenant="t", request_id="r")

    async def ask(self, tokens: int = 1000, session: str | None = "s", **fields: Any) -> Attempt:
        prepared = await self.prepare(tokens, session, **fields)
        assert self.brain.hold(prepared, lambda: None) is None
        return self.brain.choose(prepared)

    def publish(self, slot: int, tokens: int) -> None:
        keys = block_keys(PROMPT[:tokens], block_tokens=BLOCK, parent=namespace_seed("", ""))
        event = BlockStored(tuple(keys), None, tuple(PROMPT[: len(keys) * BLOCK]), BLOCK)
        self.fleet.apply(slot, EventBatch(self.now, (event,)), now=self.now)

    def sample(self, name: str, slot: int, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"homing_{name}", {"worker": f"w{slot}", "rank": "0", **labels})
        return found or 0.0


def finish(attempt: Attempt, *, usage: Usage | None = None, decode_usage: Usage | None = None) -> None:
    """Both legs end well."""
    if attempt.prefill is not None:
        attempt.prefill.lease.first_byte()
        attempt.prefill.lease.close(Outcome.OK, usage)
    attempt.lease.first_byte()
    attempt.lease.close(Outcome.OK, decode_usage)


def legs(attempt: Attempt) -> tuple[int | None, int]:
    return attempt.prefill.decision.slot if attempt.prefill else None, attempt.decision.slot


async def test_both_ranks_are_charged() -> None:
    """The prompt waits on the prefill rank; the decode rank has the answer and a transfer before it. Then nothing."""
    world = World()
    attempt = await world.ask()
    prefill, decode = legs(attempt)
    assert prefill in (0, 1)
    assert decode in (2, 3)
    computing, answering = world.fleet.loads.load(prefill), world.fleet.loads.load(decode)
    assert (computing.waiting_tokens, answering.waiting_tokens) == (1000, 0)
    assert computing.waiting_seconds == pytest.approx(attempt.decision.expected_prefill_seconds)
    assert answering.waiting_seconds == pytest.approx(HANDOVER_SECONDS + 1000 / 200_000)
    assert (computing.inflight, answering.inflight) == (1, 1)
    finish(attempt)
    for load in (computing, answering):
        assert (load.inflight, load.waiting, load.waiting_seconds, load.inflight_tokens) == (0, 0, 0.0, 0)


async def test_a_session_has_two_homes() -> None:
    """Its prompts stay on one prefill rank and its answers on one decode rank; the homes end with their ranks."""
    world = World()
    ways = []
    for turn in range(5):
        attempt = await world.ask(400 + 100 * turn)
        ways.append(legs(attempt))
        finish(attempt)
        world.now += 30.0
        prefill, decode = legs(attempt)
        world.publish(prefill, 400 + 100 * turn)
        world.publish(decode, 400 + 100 * turn)
        assert attempt.decision.reason is (Reason.HOME if turn else Reason.COLD)
    assert len(set(ways)) == 1
    prefill, decode = ways[0]
    for slot in (prefill, decode):
        world.fleet.remove_rank(slot)
    assert legs(await world.ask(900)) == (1 - prefill, 5 - decode)


async def test_a_childs_parent_has_two_homes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child pushes out of either is wanted back."""
    world, asked = World(), list[RouteRequest]()
    parent = await world.ask()
    policy = world.brain._policy

    def hear(view: FleetView, request: RouteRequest, rng: Random, now: float) -> Decision | None:
        asked.append(request)
        return policy(view, request, rng, now)

    monkeypatch.setattr(world.brain, "_policy", hear)
    body = json.dumps({"model": "m", "prompt": PROMPT[:500]}).encode()
    headers = {"x-session-id": "s", "x-claude-code-agent-id": "reader"}
    request = parse_request(Endpoint.COMPLETIONS, body)
    world.brain.choose(await world.brain.prepare(request, headers, tenant="t", request_id="r"))
    assert [(each.prefill_parent_home, each.parent_home) for each in asked] == [legs(parent)]


async def test_expectations_are_the_prefill_ranks() -> None:
    """What is promised of a pair is what the prefill rank holds, and its own usage is held against that."""
    world = World()
    world.publish(0, 640)
    attempt = await world.ask(session=None)
    assert legs(attempt)[0] == 0
    assert attempt.decision.expected_cached_tokens == 640
    assert attempt.decision.expected_prefill_seconds == attempt.prefill.decision.expected_prefill_seconds
    finish(attempt, usage=Usage(1000, 1, 640), decode_usage=Usage(1000, 20, 999))
    decode = legs(attempt)[1]
    assert (world.sample("prompt_tokens_total", 0), world.sample("cached_tokens_total", 0)) == (1000, 640)
    assert world.sample("predicted_cached_tokens_total", 0) == 640
    assert world.sample("prompt_tokens_total", decode) == 0
    assert world.fleet.member(decode).trust.ratio == 1.0


async def test_the_prompt_will_be_on_both_ranks() -> None:
    """Before any event says so, a second request of the session expects the first one's blocks."""
    world = World(handover=Handover.PARAMS)
    attempt = await world.ask(800)
    finish(attempt)
    again = await world.ask(1000)
    assert legs(again) == legs(attempt)
    assert again.decision.expected_cached_tokens == 800
    assert again.decision.transfer_tokens == 200


async def test_what_is_handed_over_counts_once_it_has_come() -> None:
    """Until its first byte a decode rank has nothing of the prompt, while the prefill rank has taken it on."""
    world = World(sufficient=True)
    attempt = await world.ask(800)
    prefill, decode = legs(attempt)
    prepared = await world.prepare(1000)
    assert dict(world.brain._knowledge.reusable(prepared)) == {prefill: 800}
    attempt.lease.first_byte()
    assert dict(world.brain._knowledge.reusable(prepared)) == {prefill: 800, decode: 800}


async def test_a_failed_leg_leaves_nothing_expected() -> None:
    """Promises of a pair that failed are taken back on both ranks, and only the failed rank is counted out."""
    world = World()
    attempt = await world.ask(800)
    prefill, decode = legs(attempt)
    attempt.prefill.lease.close(Outcome.RESET, None)
    attempt.lease.close(Outcome.ABANDONED, None)
    again = await world.ask(1000)
    assert again.decision.expected_cached_tokens == 0
    failures = {slot: breaker.failures for slot, breaker in world.fleet.breakers._breakers.items()}
    assert failures == {prefill: 1}
    assert decode not in failures


@pytest.mark.parametrize("handover", list(Handover))
async def test_paces_are_learnt_of_the_right_legs(handover: Handover) -> None:
    """The prompt's time is the prefill rank's; vLLM's decode rank shows, once it is asked, what a transfer takes."""
    world = World(handover=handover)
    attempt = await world.ask(stream=True)
    prefill, decode = (world.fleet.member(slot) for slot in legs(attempt))
    before = decode.pace.transfer_token_seconds
    world.now += 1.0
    attempt.prefill.lease.first_byte()
    attempt.prefill.lease.close(Outcome.OK, None)
    attempt.lease.handed()
    world.now += HANDOVER_SECONDS + 0.1
    attempt.lease.first_byte()
    attempt.lease.close(Outcome.OK, None)
    assert prefill.pace.factor > 1.5  # 1,000 tokens in a second, where 10,000 were assumed
    if handover is Handover.PARAMS:
        assert decode.pace.transfer_token_seconds > 1.5 * before  # 10,000 a second, where 200,000 were assumed
    else:
        assert decode.pace.transfer_token_seconds == before


async def test_a_batch_goes_whole_where_it_cannot_be_handed_over() -> None:
    """Two prompts under vLLM's contract: a decode rank by itself. Under SGLang's a pair."""
    world = World(handover=Handover.PARAMS, sufficient=True)
    attempt = await world.ask(prompt=["a b c", "d e f"])
    assert legs(attempt)[0] is None
    assert attempt.decision.reason is Reason.DEGRADED
    attempt = await World().ask(prompt=["a b c", "d e f"])
    assert legs(attempt)[0] in (0, 1)


async def test_explained() -> None:
    """The log has the rank that computed the prompt, both ranks' prices, and what either way would have cost."""
    world = World(sufficient=True)
    attempt = await world.ask()
    (decided,) = world.brain.decisions.recent(1)
    (noted,) = decided.attempts
    prefill, decode = legs(attempt)
    assert (noted.prefill_id, noted.id) == (RankId(f"w{prefill}", 0), RankId(f"w{decode}", 0))
    assert noted.pair_seconds < noted.alone_seconds
    prices = {weighed.id.worker: weighed.price for weighed in noted.ranks()}
    assert all(price is not None for price in prices.values())
    paired = [prices[f"w{slot}"] for slot in (prefill, decode)]
    assert sum(price.total_seconds for price in paired) == pytest.approx(noted.pair_seconds)
    attempt.lease.first_byte()
    preview = await world.brain.preview(
        parse_request(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": PROMPT}).encode()), {}, tenant="t"
    )
    (now,) = preview.attempts  # the decode rank will hold all but the last tokens, and prefill ranks are busy
    assert (now.prefill_id, now.id, now.reason) == (None, noted.id, Reason.BYPASS)
    assert now.alone_seconds < now.pair_seconds
    finish(attempt, usage=Usage(1000, 1, 0), decode_usage=Usage(1000, 20, 999))
    assert (noted.outcome, noted.prompt_tokens, noted.cached_tokens) == (Outcome.OK, 1000, 0)


def charged(world: World) -> list[int]:
    return [world.brain._holding._admission.charged_tokens(rank.slot) for rank in world.fleet.view.ranks]


async def test_a_pair_is_charged_on_both_ranks() -> None:
    """The prompt of 1,000 here, and there with the answer, 500 as long as nothing is known of answers; of what ended,
    the 20 tokens that it had. What fails leaves nothing; a bypass, nothing on the prefill rank.
    """
    world = World(sufficient=True)
    attempt = await world.ask(max_tokens=200)
    prefill, decode = legs(attempt)
    expected = [0, 0, 0, 0]
    expected[prefill], expected[decode] = 1000, 1200
    assert charged(world) == expected
    finish(attempt, usage=Usage(1000, 1, 0), decode_usage=Usage(1000, 20, 0))
    expected[decode] = 1020
    assert charged(world) == expected

    failed = await world.ask(session="other", prompt=list(range(2_000, 3_000)))
    failed.prefill.lease.close(Outcome.RESET, None)
    failed.lease.close(Outcome.ABANDONED, None)
    assert charged(world) == expected

    world.publish(decode, 1000)
    again = await world.ask()
    assert legs(again) == (None, decode)
    finish(again, decode_usage=Usage(1000, 20, 999))
    assert sum(charged(world)) == 1020


async def test_a_newcomer_waits_for_a_prefill_rank_that_is_done() -> None:
    """Both compute cold prompts: the third waits until one of them has, though both decode ranks are free."""
    world = World()
    first, second, third = (list(range(start, start + 1000)) for start in (2_000, 4_000, 6_000))
    computing = await world.ask(session="a", prompt=first)
    await world.ask(session="b", prompt=second)
    went: list[bool] = []
    prepared = await world.prepare(1000, "c", prompt=third)
    held = world.brain.hold(prepared, lambda: went.append(True))
    assert held is not None
    assert computing.prefill is not None
    computing.prefill.lease.first_byte()
    assert went == [True]
    assert legs(world.brain.choose(prepared))[0] == legs(computing)[0]
