"""Two replicas before ranks with roles share both homes of a session over a real Redis: where its prompts are computed,
and where they are answered.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator

import pytest_asyncio
from redis import Redis

from router.core.types import Engine, Handover, Part, RankId, RankStatus, Reason, SessionKey, WorkerRole
from router.fleet.target import Target
from router.proxy.brain import RouterBrain
from router.proxy.types import Attempt, Outcome
from router.settings import RoutingSettings
from router.wire.openai import Endpoint, parse_request
from tests.fakes.proxy_rig import until
from tests.fakes.router_cluster import Cluster, RedisServer, needs_redis, rank
from tests.integration.redis.test_redis_state import PATIENT, Replica, client, replica, server

__all__ = ["client", "server"]

pytestmark = needs_redis

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
RANKS = 4


class Router:
    """A replica's brain, without a tokenizer, over four prefill and four decode ranks."""

    def __init__(self, made: Replica, *, admission: str = "off") -> None:
        self.made = made
        for slot in (0, 1):
            made.fleet.remove_rank(slot)
        for number in range(2 * RANKS):
            part = Part(PREFILL if number < RANKS else DECODE, Handover.PARAMS, is_self_sufficient=False)
            slot = made.fleet.add_rank(
                RankId(f"w{number}", 0),
                target=Target("127.0.0.1", 1, 0, 1, Engine.SHIM, part=part),
                models=frozenset({"m"}),
                block_tokens=None,
                pool_tokens=None,
            )
            made.fleet.set_status(slot, RankStatus.READY)
        self.brain = RouterBrain(made.fleet, settings=RoutingSettings(admission=admission), metrics=made.metrics)

    async def ask(self, session: str, words: int) -> Attempt:
        body = json.dumps({"model": "m", "prompt": f"{session} " + "word " * words, "max_tokens": 1}).encode()
        request = parse_request(Endpoint.COMPLETIONS, body)
        prepared = await self.brain.prepare(request, {"x-session-id": session}, tenant="t")
        attempt = self.brain.choose(prepared)
        assert attempt.prefill is not None
        for half in (attempt.prefill, attempt):
            half.lease.first_byte()
            half.lease.close(Outcome.OK, None)
        return attempt

    def homes(self, session: str) -> list[RankId | None]:
        """Of its prompts, and of its answers."""
        found = [self.made.state.home("m", SessionKey("t", session), is_prefill=each) for each in (True, False)]
        return [home.rank if home else None for home in found]


def legs(attempt: Attempt) -> list[RankId]:
    assert attempt.prefill is not None
    return [attempt.prefill.decision.id, attempt.decision.id]


async def test_a_session_that_alternates_between_replicas_keeps_both_ranks(server: RedisServer, client: Redis) -> None:
    """Eight sessions, six turns each; neither replica sees events or tokens, so that only the shared homes can tell.
    What the prefill rank holds is told, too: it is all of the last prompt.
    """
    async with replica(server, "a") as first, replica(server, "b") as second:
        routers = Router(first), Router(second)
        pairs = set()
        for number in range(8):
            session = f"s{number}"
            ways = legs(await routers[0].ask(session, 2_000))
            for turn in range(1, 6):
                router = routers[turn % 2]
                await until(lambda router=router, ways=ways, session=session: router.homes(session) == ways)
                attempt = await router.ask(session, 2_000 + 100 * turn)
                assert legs(attempt) == ways
                assert attempt.decision.reason is Reason.HOME
                assert attempt.decision.expected_cached_tokens >= 2_000
            pairs.add(tuple(ways))
        assert len(pairs) > 3, "the sessions are spread"


async def test_who_is_charged_on_both_ranks_at_one_replica_is_known_on_both_at_the_other(
    server: RedisServer, client: Redis
) -> None:
    """With its prompt on the prefill rank, and its prompt and answer on the decode rank."""
    async with replica(server, "a") as first, replica(server, "b") as second:
        a, b = Router(first, admission="guarded"), Router(second, admission="guarded")
        ways = legs(await a.ask("s", 2_000))
        holding, ranks = b.brain._holding, {rank.id: rank.slot for rank in second.fleet.view.ranks}
        assert holding is not None
        await until(lambda: len(holding.charged_elsewhere("m", SessionKey("t", "s"))) == 2)
        charged = holding.charged_elsewhere("m", SessionKey("t", "s"))
        assert charged[ranks[ways[1]]] == charged[ranks[ways[0]]] + 1
        assert charged[ranks[ways[0]]] > 2_000


async def test_a_replica_that_joins_late_looks_both_homes_up(server: RedisServer, client: Redis) -> None:
    """It has heard no news of the session; one question tells both."""
    async with replica(server, "a") as first:
        ways = legs(await Router(first).ask("s", 2_000))
        await until(lambda: len(client.keys("homing:home:*")) == 2)
        async with replica(server, "c", lookup_seconds=PATIENT) as late:
            router = Router(late)
            assert router.homes("s") == [None, None]
            assert legs(await router.ask("s", 2_100)) == ways
            assert late.sample("shared_state_lookups_total", result="found") == 1


@pytest_asyncio.fixture(loop_scope="function")
async def pairs() -> AsyncIterator[Cluster]:
    async with Cluster(roles=("prefill", "prefill", "decode", "decode")) as running:
        yield running


async def test_processes_agree_on_both_ranks(pairs: Cluster) -> None:
    """Real routers and shims: long turns, each at the other router, all computed by one rank and answered by one. Some
    few may be computed by the latter, as long as a machine that kept the former from its work makes it look slow.
    """
    reasons: Counter[str] = Counter()
    for number in range(4):
        session, prompt = f"s{number}", f"{number} " + " ".join(f"key-{word:04d}" for word in range(1_000))
        answer = await pairs.ask(pairs.routers[0], prompt, session)
        answered_by, computed_by = rank(answer), answer.headers["x-homing-prefill-rank"]
        for turn in range(1, 4):
            prompt += " " + " ".join(f"val-{word:04d}" for word in range(700 * turn, 700 * turn + 700))
            answer = await pairs.ask_again(pairs.routers[turn % 2], prompt, session, after=answer)
            reason = answer.headers["x-homing-reason"]
            reasons[reason] += 1
            assert rank(answer) == answered_by
            assert answer.headers.get("x-homing-prefill-rank") == (None if reason == "bypass" else computed_by)
    assert reasons.keys() <= {"home", "bypass"}
    assert reasons["home"] >= 6, reasons
