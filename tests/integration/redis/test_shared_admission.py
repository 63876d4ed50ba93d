"""Two replicas that hold requests for want of cache share the ranks' room over a real Redis."""

from __future__ import annotations

import json

from redis import Redis

from router.core.types import Engine, RankId, RankStatus, SessionKey
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

    async def ask(
        self, session: str, tokens: int, *, end: bool = True, outcome: Outcome = Outcome.OK
    ) -> Attempt | HeldRequest:
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
            attempt.lease.close(outcome, None)
        return attempt

    def credit(self, session: str) -> dict[int, int]:
        """What the other is known to charge the session with, by slot."""
        assert self.brain._holding is not None
        return dict(self.brain._holding.charged_elsewhere("m", SessionKey("t", session)))

    def age(self, seconds: float) -> None:
        """So long passes for the charges."""
        assert self.brain._holding is not None
        self.brain._holding._admission.charges.age(self.made.fleet.clock() + seconds)

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


async def test_nobody_is_credited_with_a_place_that_it_has_lost(server: RedisServer, client: Redis) -> None:
    """At A a session of 6,000 of 10,000 tokens falls idle for long, and another one gets its room: at B it waits, as it
    would at A. While it is charged at A it would pass at B."""
    async with replica(server, "a") as first, replica(server, "b") as second:
        a, b = Router(first), Router(second)
        assert isinstance(await a.ask("s", 6_000), Attempt)
        await until(lambda: any(tokens > 6_000 for tokens in b.credit("s").values()))
        a.age(121.0)
        assert isinstance(await a.ask("s2", 6_000), Attempt)
        await until(lambda: not b.credit("s") and any(b.credit("s2").values()) and b.other_tokens == a.own_tokens)
        held = await b.ask("s", 6_100)
        assert isinstance(held, HeldRequest)
        held.leave()
        assert isinstance(await b.ask("s2", 6_100), Attempt)


async def test_what_failed_or_is_in_flight_at_the_other_is_no_credit(server: RedisServer, client: Redis) -> None:
    """A request failed at A: nothing is charged for it. One in flight there keeps its room until it has ended; another
    of its session, of which less than 70 % is cached, finds none at B."""
    async with replica(server, "a") as first, replica(server, "b") as second:
        a, b = Router(first), Router(second)
        assert isinstance(await a.ask("failed", 6_000, outcome=Outcome.PUSHBACK), Attempt)
        assert isinstance(await a.ask("s", 6_000, end=False), Attempt)
        await until(lambda: b.other_tokens > 6_000 and list(b.credit("s").values()) == [0])
        assert b.credit("failed") == {}
        for session, tokens in (("failed", 6_000), ("s", 9_000)):
            held = await b.ask(session, tokens)
            assert isinstance(held, HeldRequest), session
            held.leave()


async def test_one_that_comes_later_hears_of_all_charges(server: RedisServer, client: Redis) -> None:
    """A has charged a session and told so before C was there: C knows all the same. Once A has gone nobody does."""
    async with replica(server, "b") as second:
        async with replica(server, "a") as first:
            a = Router(first)
            b = Router(second)
            assert isinstance(await a.ask("s", 6_000), Attempt)
            await until(lambda: any(tokens > 6_000 for tokens in b.credit("s").values()))
            async with replica(server, "c") as third:
                c = Router(third)
                await until(lambda: any(tokens > 6_000 for tokens in c.credit("s").values()))
        await until(lambda: not b.credit("s"))
