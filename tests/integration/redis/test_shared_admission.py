"""Two replicas that hold requests for want of cache share the ranks' room over a real Redis."""

from __future__ import annotations

import json

from redis import Redis

from router.core.types import Engine, RankId, RankStatus
from router.fleet.target import Target
from router.proxy.brain import RouterBrain
from router.proxy.holding import HeldRequest
from router.proxy.types import Attempt, Outcome
from router.settings import RoutingSettings
from router.wire.openai import Endpoint, parse_request
from tests.fakes.proxy_rig import until
from tests.fakes.router_cluster import RedisServer, needs_redis
from tests.integration.redis.test_redis_state import Replica, client, replica, server

__all__ = ["client", "server"]

pytestmark = needs_redis

POOL_TOKENS = 10_000


class Router:
    """A replica's brain over one rank of ``POOL_TOKENS``."""

    def __init__(self, made: Replica) -> None:
        self.made = made
        for slot in (0, 1):
            made.fleet.remove_rank(slot)
        slot = made.fleet.add_rank(
            RankId("w", 2),
            target=Target("127.0.0.1", 1, 2, 3, Engine.SHIM),
            models=frozenset({"m"}),
            block_tokens=None,
            pool_tokens=POOL_TOKENS,
        )
        made.fleet.set_status(slot, RankStatus.READY)
        settings = RoutingSettings(admission="guarded")
        self.brain = RouterBrain(made.fleet, settings=settings, metrics=made.metrics)

    async def ask(self, session: str, tokens: int, *, end: bool = True) -> Attempt | HeldRequest:
        """A prompt of so many tokens, told by its bytes, of an answer of 1; it is held or answered."""
        text = f"{session} " + 4 * tokens * "x"
        body = json.dumps({"model": "m", "prompt": text, "max_tokens": 1}).encode()
        request = parse_request(Endpoint.COMPLETIONS, body)
        prepared = await self.brain.prepare(request, {"x-session-id": session}, tenant="t")
        held = self.brain.hold(prepared, lambda: None)
        if isinstance(held, HeldRequest):
            return held
        attempt = self.brain.choose(prepared)
        attempt.lease.first_byte()
        if end:
            attempt.lease.close(Outcome.OK, None)
        return attempt

    @property
    def own_tokens(self) -> float:
        """Charged by this replica."""
        return self.made.sample("admission_charged_tokens")

    @property
    def other_tokens(self) -> int:
        """Charged by the other."""
        return self.made.fleet.view.ranks[0].load.charged_tokens


async def test_two_replicas_fill_a_pool_once(server: RedisServer, client: Redis) -> None:
    """6,000 of 10,000 tokens are charged at A: B has no room for 4,000 more, and room again when A has gone."""
    async with replica(server, "b") as second:
        b = Router(second)
        async with replica(server, "a") as first:
            a = Router(first)
            assert isinstance(await a.ask("s1", 6_000), Attempt)
            await until(lambda: b.other_tokens > 6_000)
            assert isinstance(await b.ask("s2", 1_000), Attempt)
            held = await b.ask("s3", 4_000)
            assert isinstance(held, HeldRequest)
            assert b.own_tokens < 1_200
        await until(lambda: b.other_tokens == 0)
        await until(lambda: held.position() is None)


async def test_who_is_admitted_at_one_replica_is_at_the_other(server: RedisServer, client: Redis) -> None:
    """A session that changes replica with every turn passes, beside a full pool, and is charged once, where it is."""
    async with replica(server, "a") as first, replica(server, "b") as second:
        a, b = Router(first), Router(second)

        def is_charged_once() -> bool:
            """What one replica charges is what the other hears, and together they charge for two conversations."""
            told = (a.own_tokens, b.own_tokens) == (b.other_tokens, a.other_tokens)
            return told and 8_000 < a.own_tokens + b.own_tokens < 9_000

        assert isinstance(await a.ask("s", 4_000), Attempt)
        await until(lambda: b.other_tokens > 4_000)
        assert isinstance(await b.ask("other", 4_000), Attempt)
        await until(is_charged_once)
        for turn in range(1, 7):
            router = b if turn % 2 else a
            before = router.own_tokens
            assert isinstance(await router.ask("s", 4_000 + 50 * turn), Attempt)
            assert router.own_tokens > before + 4_000
            await until(is_charged_once)
            held = await router.ask("newcomer", 2_000)
            assert isinstance(held, HeldRequest)
            held.leave()
