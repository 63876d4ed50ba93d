"""What routers make of shared state: they agree on new sessions, and follow each other's homes without a tokenizer."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.app import _shared_state
from router.core.cost import CostParameters
from router.core.policy import Affinity
from router.core.types import (
    Engine,
    FleetView,
    RankId,
    RankLoad,
    RankPace,
    RankStatus,
    Reason,
    RouteRequest,
    SessionKey,
)
from router.errors import ConfigError
from router.fleet.fleet import Fleet
from router.fleet.shared import HomeBook, SharedHome
from router.fleet.target import Target
from router.proxy.brain import RouterBrain
from router.proxy.types import Attempt, Outcome
from router.settings import RoutingSettings, Settings, SharedSettings
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics
from router.wire.openai import Endpoint, parse_request
from router.wire.redis import session_digest
from tests.fakes.rank_views import rank_view

# --- new sessions ------------------------------------------------------------------------------------------


def view(*, seed: int, busy: int | None = None) -> FleetView:
    """Four idle ranks whose paces and recent work one router has learnt by itself: within a tenth of each other."""
    noise = random.Random(seed)
    return FleetView(
        tuple(
            rank_view(
                slot,
                load=RankLoad(
                    waiting=int(slot == busy),
                    waiting_seconds=60.0 * (slot == busy),
                    recent_seconds=noise.uniform(0.0, 2.0),
                ),
                pace=RankPace(token_seconds=noise.uniform(5.0e-5, 5.5e-5), attention_seconds=0.0),
            )
            for slot in range(4)
        )
    )


def place(policy: Affinity, session: int, fleet: FleetView, **known: Any) -> tuple[int, Reason]:
    request = RouteRequest("m", 20_000, 100, session=SessionKey("t", f"s{session}"), **known)
    decision = policy(fleet, request, random.Random(0), 0.0)
    assert decision is not None
    return decision.slot, decision.reason


def test_routers_that_see_slightly_different_prices_agree_on_new_sessions() -> None:
    """Two hundred sessions: both routers send each to the same rank, and a quarter or so to each."""
    one, other = (Affinity(CostParameters(), agree=True) for _ in range(2))
    mine = [place(one, session, view(seed=1)) for session in range(200)]
    assert mine == [place(other, session, view(seed=2)) for session in range(200)]
    counts = [sum(slot == rank for slot, _ in mine) for rank in range(4)]
    assert min(counts) >= 25
    alone = [place(Affinity(CostParameters()), session, view(seed=1))[0] for session in range(200)]
    assert len(set(alone)) == 1, "one router alone takes the cheapest"


def test_agreement_ends_where_a_rank_is_busy_or_something_is_cached() -> None:
    """The sessions of a busy rank go to the next on the ring, the others stay; a cached prefix is worth more."""
    policy = Affinity(CostParameters(), agree=True)
    for session in range(50):
        idle, _ = place(policy, session, view(seed=1))
        busy, _ = place(policy, session, view(seed=1, busy=2))
        assert busy == idle if idle != 2 else busy != 2
        assert place(policy, session, view(seed=1), reusable_tokens={3: 16_000}) == (3, Reason.PREFIX)
        assert place(policy, session, view(seed=1), reusable_tokens={3: 16_000}, home=3) == (3, Reason.HOME)


# --- homes, without a tokenizer ----------------------------------------------------------------------------


class Channel:
    """Shared state of several brains in one process: one book for each, and all news at once."""

    is_shared = True

    def __init__(self, clock: list[float], others: list[Channel]) -> None:
        self.clock = clock
        self.others = others
        self.asked: list[SessionKey] = []
        self.homes = HomeBook(max_sessions=100, idle_seconds=3600.0)
        others.append(self)

    def home(self, model: str, session: SessionKey, *, is_prefill: bool = False) -> SharedHome | None:
        return self.homes.get(session_digest(model, *session, is_prefill=is_prefill), now=self.clock[0])

    async def look_up(self, model: str, session: SessionKey, *, in_pairs: bool = False) -> None:
        self.asked.append(session)

    def bound(
        self, model: str, session: SessionKey, rank: RankId, *, prompt_tokens: int, is_prefill: bool = False
    ) -> None:
        digest, now = session_digest(model, *session, is_prefill=is_prefill), self.clock[0]
        self.homes.use(digest, rank, prompt_tokens=prompt_tokens, now=now)
        for other in self.others:
            if other is not self:
                other.homes.hear(digest, rank, used_at=now, prompt_tokens=prompt_tokens, now=now)


class Router:
    """A brain without tokenizer over four ranks."""

    def __init__(self, clock: list[float], others: list[Channel]) -> None:
        metrics, routing = Metrics(CollectorRegistry()), RoutingSettings()
        self.channel = Channel(clock, others)
        self.fleet = Fleet(routing, metrics, clock=lambda: clock[0], shared=self.channel)
        self.brain = RouterBrain(self.fleet, settings=routing, metrics=metrics)
        for rank in range(4):
            slot = self.fleet.add_rank(
                RankId("w", rank),
                target=Target("127.0.0.1", 1, rank, 4, Engine.SHIM),
                models=frozenset({"m"}),
                block_tokens=16,
                pool_tokens=None,
            )
            self.fleet.set_status(slot, RankStatus.READY)

    async def ask(self, prompt: str, session: str, *, exclude: frozenset[int] = frozenset()) -> Attempt:
        request = parse_request(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())
        prepared = await self.brain.prepare(request, {"x-session-id": session}, tenant="t")
        return self.brain.choose(prepared, exclude=exclude)


async def test_a_session_that_alternates_keeps_its_rank_where_only_text_is_known() -> None:
    """The second router has never seen the text: the home and the size of the last prompt tell it what is there."""
    clock, others = [0.0], list[Channel]()
    one, other = Router(clock, others), Router(clock, others)
    prompt, slots = "word " * 20_000, list[int]()
    for turn in range(6):
        clock[0] += 5.0
        attempt = await (one, other)[turn % 2].ask(prompt, "s")
        if turn:
            assert attempt.decision.reason is Reason.HOME
            assert attempt.decision.expected_cached_tokens > 20_000
        slots.append(attempt.decision.slot)
        attempt.lease.first_byte()
        attempt.lease.close(Outcome.OK, None)
        prompt += "more " * 200
    assert len(set(slots)) == 1
    assert len(one.channel.asked) == len(other.channel.asked) == 3


async def test_a_retry_elsewhere_moves_the_home_for_all() -> None:
    """The first rank failed at one router: the other one follows."""
    clock, others = [0.0], list[Channel]()
    one, other = Router(clock, others), Router(clock, others)
    prompt = "word " * 20_000
    failed = await one.ask(prompt, "s")
    failed.lease.close(Outcome.CONNECT, None)
    clock[0] += 0.1
    retried = await one.ask(prompt, "s", exclude=frozenset({failed.decision.slot}))
    clock[0] += 0.1
    assert (await other.ask(prompt, "s")).decision.slot == retried.decision.slot != failed.decision.slot


async def test_what_a_router_told_itself_is_no_return() -> None:
    """Two requests at once, the second looked for later than the first was sent: the others are told at that moment."""
    clock, others = [0.0], list[Channel]()
    one, other = Router(clock, others), Router(clock, others)
    bound = one.channel.bound

    def tell_later(*args: Any, **known: Any) -> None:
        clock[0] += 0.001
        bound(*args, **known)

    one.channel.bound = tell_later  # type: ignore[method-assign]
    first = await one.ask("word " * 100, "s")
    await one.ask("word " * 100, "s")
    assert one.fleet.sessions.at_home == {}
    assert one.fleet.sessions.is_beginning("m", SessionKey("t", "s"))

    first.lease.close(Outcome.OK, None)
    clock[0] += 1.0
    await other.ask("word " * 100, "s")
    assert sum(other.fleet.sessions.at_home.values()) == 1, "it comes back to another router"


# --- settings ------------------------------------------------------------------------------------------------


def test_without_redis_the_metric_says_that_nothing_is_missing() -> None:
    """Embedded state is always up, for one router."""
    metrics = Metrics(CollectorRegistry())
    assert _shared_state(Settings(), metrics, make_logger(level="info", form="json")) is None
    sample = metrics.registry.get_sample_value
    assert sample("homing_shared_state_up", {"backend": "embedded"}) == 1.0
    assert sample("homing_shared_state_replicas") == 1.0


def test_a_missing_client_library_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package redis is an extra."""
    monkeypatch.setitem(__import__("sys").modules, "router.fleet.redis_state", None)
    settings = Settings(shared=SharedSettings(redis_url="redis://127.0.0.1:1/0"))
    with pytest.raises(ConfigError, match=r"pip install 'homing\[redis\]'"):
        _shared_state(settings, Metrics(CollectorRegistry()), make_logger(level="info", form="json"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"redis_url": "http://x"},
        {"prefix": "a b"},
        {"lease_seconds": 0.2, "publish_seconds": 0.1},
        {"lookup_seconds": 1},
    ],
)
def test_bad_settings_refuse_to_start(wrong: dict[str, Any]) -> None:
    """Another scheme, a prefix with a space, a lease shorter than three signs of life, a long wait."""
    with pytest.raises(ValueError, match=r"shared|redis_url|prefix|lookup_seconds"):
        SharedSettings(**wrong)
