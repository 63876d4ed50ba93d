"""Explaining decisions: what the admin plane says of a request equals what the policy was given and what came of it."""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from router.admin.explain import explain_routes, sampled_log
from router.core.types import Decision, Engine, FleetView, RankId, RankStatus, Reason, SessionKey
from router.errors import NotFound
from router.fleet.decisions import Decided, DecisionLog, session_hash
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.proxy.brain import RouterBrain
from router.proxy.tokenization import Given
from router.proxy.types import Attempt, Outcome
from router.settings import RoutingSettings
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored, EventBatch
from router.wire.openai import Endpoint, parse_request
from router.wire.usage import Usage

BLOCK = 16
SECRET = "alice-and-her-project"


class World:
    """Three ranks, a brain, and the admin paths over them."""

    def __init__(self, log: DecisionLog | None = None) -> None:
        self.now = 100.0
        self.metrics = metrics = Metrics(CollectorRegistry())
        self.fleet = Fleet(RoutingSettings(), metrics, clock=lambda: self.now)
        self.brain = RouterBrain(self.fleet, settings=RoutingSettings(), metrics=metrics, decisions=log)
        for number in range(3):
            slot = self.fleet.add_rank(
                RankId("w", number),
                target=Target("127.0.0.1", 1, number, 3, Engine.SHIM),
                models=frozenset({"m"}),
                block_tokens=BLOCK,
                pool_tokens=10_000,
            )
            self.fleet.set_status(slot, RankStatus.READY)
        self.brain.set_tokenizer("m", _TakesIds())  # type: ignore[arg-type]
        app = FastAPI()
        app.include_router(explain_routes(self.brain))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")

    def holds(self, slot: int, tokens: list[int]) -> None:
        keys = block_keys(tokens, block_tokens=BLOCK, parent=namespace_seed("", ""))
        self.fleet.apply(slot, EventBatch(0.0, (BlockStored(tuple(keys), None, tuple(tokens), BLOCK),)), now=self.now)

    async def ask(self, tokens: list[int], request_id: str, *, exclude: frozenset[int] = frozenset()) -> Attempt:
        request = parse_request(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": tokens}).encode())
        headers = {"x-session-id": SECRET}
        prepared = await self.brain.prepare(request, headers, tenant="t", request_id=request_id)
        return self.brain.choose(prepared, exclude=exclude)

    async def explained(self, request_id: str) -> dict[str, Any]:
        answer = await self.http.get("/admin/explain", params={"request_id": request_id})
        assert answer.status_code == 200
        told: dict[str, Any] = answer.json()
        return told


class _TakesIds:
    """A tokenizer for prompts that are ids already."""

    special_ids: frozenset[int] = frozenset()

    def start(self, request: Any, *, most_tokens: int) -> Any:
        return Given(array("I", request.prompt))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.http.aclose()


async def test_every_rank_is_priced_in_terms_that_add_up(world: World) -> None:
    """Reuse and trust of each rank; the chosen one first, then by price; the policy's own prices.

    Rank 1's 96 tokens are a head that another conversation goes on from.
    """
    tokens = list(range(1, 161))
    world.holds(1, tokens[:96] + list(range(1000, 4008)))
    world.fleet.member(1).trust.ratio = 0.75
    attempt = await world.ask(tokens, "r1")

    told = await world.explained("r1")
    (only,) = told["attempts"]
    assert (told["model"], told["prompt_tokens"], told["keyed"]) == ("m", 160, "tokens")
    assert (only["rank"], only["reason"], only["outcome"]) == ("w/1", "prefix", None)
    assert only["ranks"][0]["rank"] == "w/1"
    assert {rank["rank"]: (rank["reusable_tokens"], rank["trust_ratio"]) for rank in only["ranks"]} == {
        "w/0": (0, 1.0),
        "w/1": (96, 0.75),
        "w/2": (0, 1.0),
    }
    for rank in only["ranks"]:
        price = rank["price_seconds"]
        assert price.keys() == {"wait", "work", "decode", "evict", "move", "transfer", "total"}
        assert price["total"] == pytest.approx(sum(price.values()) - price["total"], abs=3e-6)
    decided = {price.slot: price.total_seconds for price in attempt.decision.prices}
    assert {rank["rank"]: rank["price_seconds"]["total"] for rank in only["ranks"]} == {
        f"w/{slot}": pytest.approx(total, abs=1e-6) for slot, total in decided.items()
    }


async def test_what_came_of_it_stands_beside_what_was_expected(world: World) -> None:
    """Reported cached tokens, seconds to the first token, and the attempts that failed before."""
    tokens = list(range(1, 161))
    first = await world.ask(tokens, "r1")
    first.lease.close(Outcome.RESET, None)
    prepared = first.lease.prepared  # type: ignore[attr-defined]
    second = world.brain.choose(prepared, exclude=frozenset({first.decision.slot}))
    world.now += 0.25
    second.lease.first_byte()
    world.now += 1.0
    second.lease.close(Outcome.OK, Usage(prompt_tokens=160, completion_tokens=5, cached_tokens=64))

    failed, served = (await world.explained("r1"))["attempts"]
    assert (failed["outcome"], failed["first_token_seconds"]) == ("reset", None)
    assert (served["reason"], served["outcome"], served["actual_cached_tokens"]) == ("retry", "ok", 64)
    assert (served["first_token_seconds"], served["seconds"]) == (0.25, 1.25)
    recent = (await world.http.get("/admin/decisions")).json()["decisions"]
    assert [(item["request_id"], item["attempts"], item["rank"]) for item in recent] == [("r1", 2, served["rank"])]


async def test_a_body_is_explained_without_being_sent(world: World) -> None:
    """The same decision as the next request's, no load, no session, nothing in the log or the metrics, nothing seen."""
    tokens = list(range(1, 161))
    world.holds(2, tokens)
    question = {
        "endpoint": "completions",
        "body": {"model": "m", "prompt": tokens},
        "headers": {"X-Session-Id": SECRET},
    }
    (told,) = (await world.http.post("/admin/explain", json=question)).json()["attempts"]

    assert (told["rank"], told["expected_cached_tokens"]) == ("w/2", 144)
    assert world.fleet.member(2).load.inflight == len(world.fleet.sessions) == len(world.brain.decisions) == 0
    assert not [
        sample
        for family in world.metrics.registry.collect()
        for sample in family.samples
        if sample.value and sample.name in ("homing_prompts_total", "homing_tokenize_seconds_count")
    ]
    asked = await world.ask(tokens, "r")
    assert str(asked.decision.id) == told["rank"]
    assert (await world.explained("r"))["ideal_cached_tokens"] == 0


async def test_no_client_is_recognised(world: World) -> None:
    """Sessions are told apart by a hash; no prompt is shown."""
    await world.ask([7] * 40, "r1")
    await world.ask([7] * 40, "r2")

    texts = [json.dumps(await world.explained(name)) for name in ("r1", "r2")]
    assert SECRET not in "".join(texts)
    hashes = {json.loads(text)["session_hash"] for text in texts}
    assert len(hashes) == 1
    assert None not in hashes
    assert "7, 7" not in "".join(texts)


async def test_an_unknown_id_is_not_found(world: World) -> None:
    """The admin app turns the error into its 404, with a code of its own: the path is known."""
    with pytest.raises(NotFound, match="No request 'nobody'") as raised:
        await world.http.get("/admin/explain", params={"request_id": "nobody"})
    assert raised.value.code == "unknown_request_id"


def note(log: DecisionLog, request_id: str, *, ranks: int = 2) -> None:
    decided = Decided(request_id, "m", tenant="t", session=None, keyed="tokens", prompt_tokens=1, ideal_tokens=0)
    log.open(decided)
    world = World()
    view = FleetView(world.fleet.view.ranks[:ranks], version=ranks)
    decision = Decision(0, RankId("w", 0), Reason.COLD, 0, 0, 0.0)
    log.add(decided, decision, view=view, reusable={}, now=0.0)


def test_the_log_is_bounded_by_requests_and_by_ranks() -> None:
    """The oldest go; one id counts once, as its last request; the last one stays whatever its size."""
    log = DecisionLog(max_requests=3, max_rows=5)
    for name in "abcd":
        note(log, name, ranks=1)
    assert [decided.request_id for decided in log.recent(10)] == ["d", "c", "b"]
    note(log, "c", ranks=3)
    assert [decided.request_id for decided in log.recent(10)] == ["c", "d", "b"]
    note(log, "e", ranks=3)
    assert [decided.request_id for decided in log.recent(10)] == ["e"]
    note(log, "f", ranks=3)
    assert [decided.request_id for decided in log.recent(1)] == ["f"]


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 0, 0), (0.3, 200, 400), (1.0, 1000, 1000)])
async def test_a_share_of_decisions_is_logged_with_their_outcome(ratio: float, low: int, high: int) -> None:
    """JSON lines; a request's id decides whether it is in. 1,000 draws at 0.3: 200 to 400 but once in 10^11."""
    stream = io.StringIO()
    logger = make_logger(level="info", form="json", stream=stream)
    world = World(DecisionLog(on_close=sampled_log(logger, ratio=ratio)))
    for number in range(1000):
        attempt = await world.ask([number + 1] * 20, f"r{number}")
        attempt.lease.close(Outcome.OK, Usage(20, 1, 0))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert low <= len(lines) <= high
    for line in lines:
        assert (line["event"], line["outcome"], line["actual_cached_tokens"]) == ("decision", "ok", 0)
        assert line["price_seconds"] > 0
        assert SECRET not in json.dumps(line)


def test_session_keys_that_join_alike_hash_apart() -> None:
    """The parts of a key are kept apart."""
    assert session_hash(SessionKey("a", "b", "")) != session_hash(SessionKey("a", "", "b"))
    assert session_hash(None) is None
