"""Two or three replicas' states over a real Redis, in one process: what is told, heard, looked up and survived."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import cast

import pytest
import structlog
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ResponseError

from router.core.types import Engine, RankId, SessionKey
from router.fleet.fleet import Fleet
from router.fleet.redis_state import RedisState
from router.fleet.registry import Registry
from router.fleet.target import Target
from router.settings import RoutingSettings, SharedSettings
from router.telemetry.metrics import Metrics
from router.wire import redis as wire
from tests.fakes.proxy_rig import until
from tests.fakes.router_cluster import RedisServer, needs_redis

pytestmark = needs_redis

R0, R1 = RankId("w", 0), RankId("w", 1)
PATIENT = 10.0
"""Seconds for an answer of Redis where what it says is tested, and not how soon."""
LEASE_SECONDS = 4.0
"""Of news, where nothing is said of their end: longer than a busy machine keeps anybody from telling them."""


def session(name: str) -> SessionKey:
    return SessionKey("tenant-secret", name)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    running = RedisServer()
    running.start()
    yield running
    running.kill()


@pytest.fixture
def client(server: RedisServer) -> Iterator[Redis]:
    with server.client() as connected:
        connected.flushall()
        yield connected


class NoWorkers:
    """A registry in which nothing happens."""

    def workers(self) -> list[object]:
        return []


class Replica:
    """One router's fleet of two ranks and its state."""

    def __init__(
        self,
        server: RedisServer,
        name: str,
        *,
        lookup_seconds: float | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.metrics = Metrics(CollectorRegistry())
        shared = SharedSettings(redis_url=server.url, lease_seconds=lease_seconds)
        if lookup_seconds is not None:  # the setting allows less
            shared = shared.model_copy(update={"lookup_seconds": lookup_seconds})
        self.state = RedisState(
            shared,
            max_sessions=1000,
            idle_seconds=3600.0,
            replica=name,
            metrics=self.metrics,
            log=structlog.get_logger(),
            clock=time.monotonic,
        )
        self.fleet = Fleet(RoutingSettings(), self.metrics, clock=time.monotonic, shared=self.state)
        for rank in (R0, R1):
            self.fleet.add_rank(
                rank,
                target=Target("127.0.0.1", 1, rank.rank, 2, Engine.SHIM),
                models=frozenset({"m"}),
                block_tokens=16,
                pool_tokens=None,
            )

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"homing_{name}", labels) or 0.0

    def home(self, name: str) -> RankId | None:
        found = self.state.home("m", session(name))
        return found.rank if found else None

    def bind(self, name: str, rank: RankId) -> None:
        self.state.bound("m", session(name), rank, prompt_tokens=100)

    def inflight(self) -> list[int]:
        """What prices see of each rank."""
        return [rank.load.inflight for rank in self.fleet.view.ranks]


@contextlib.asynccontextmanager
async def replica(server: RedisServer, name: str, **settings: float) -> AsyncIterator[Replica]:
    made = Replica(server, name, **settings)
    running = asyncio.ensure_future(made.state.run(made.fleet, cast("Registry", NoWorkers())))
    try:
        await until(lambda: made.state.is_up)
        yield made
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_home_bound_at_one_replica_is_known_at_the_other(server: RedisServer, client: Redis) -> None:
    """By the news, before any look-up; and the latest binding is everybody's."""
    async with replica(server, "a") as a, replica(server, "b") as b:
        a.bind("s", R1)
        await until(lambda: b.home("s") == R1)
        assert b.fleet.home("m", session("s"), now=time.monotonic()) == 1
        b.bind("s", R0)
        await until(lambda: a.home("s") == R0)
        await b.state.look_up("m", session("s"))
        assert b.sample("shared_state_lookups_total", result="found") == 0


async def test_a_replica_that_joins_late_looks_a_home_up(server: RedisServer, client: Redis) -> None:
    """It has heard no news of the session; one question tells."""
    async with replica(server, "a") as a:
        a.bind("s", R1)
        await until(lambda: bool(client.keys("homing:home:*")))
        async with replica(server, "c", lookup_seconds=PATIENT) as c:
            assert c.home("s") is None
            await c.state.look_up("m", session("s"))
            assert c.home("s") == R1
            await c.state.look_up("m", session("unheard of"))
            assert c.sample("shared_state_lookups_total", result="found") == 1
            assert c.sample("shared_state_lookups_total", result="new") == 1


async def test_a_state_that_cannot_ask_yet_is_not_up(
    server: RedisServer, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears itself already: the requests' questions have a connection of their own."""
    is_let, answer = asyncio.Event(), RedisState._answer

    async def let(state: RedisState, redis: AsyncRedis) -> None:
        await is_let.wait()
        await answer(state, redis)

    monkeypatch.setattr(RedisState, "_answer", let)
    a = Replica(server, "a")
    running = asyncio.ensure_future(a.state.run(a.fleet, cast("Registry", NoWorkers())))
    try:
        await until(lambda: a.state._echo_at > 0)
        assert not a.state.is_up
        is_let.set()
        await until(lambda: a.state.is_up)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_an_answer_that_has_come_is_read_however_late_the_replica_is(server: RedisServer, client: Redis) -> None:
    """A busy machine keeps the replica from running for ten times its budget: Redis has answered long before."""

    def be_late() -> None:
        for _ in range(2):  # what was asked before the second of these has been answered
            client.ping()
        time.sleep(0.03)

    async with replica(server, "a") as a:
        a.bind("s", R1)
        await until(lambda: bool(client.keys("homing:home:*")))
        async with replica(server, "c") as c:
            asking = asyncio.ensure_future(c.state.look_up("m", session("s")))
            for _ in range(4):
                await asyncio.sleep(0)  # it is asked
            asyncio.get_running_loop().call_soon(be_late)
            await asking
            assert c.home("s") == R1
            assert c.sample("shared_state_lookups_total", result="found") == 1


async def test_requests_that_are_cancelled_while_they_look_up_disturb_nobody(
    server: RedisServer, client: Redis
) -> None:
    """A hundred go away midway; every other one still gets its own answer."""
    async with replica(server, "a") as a:
        for number in range(200):
            a.bind(f"s{number}", (R0, R1)[number % 3 == 0])
        await until(lambda: len(client.keys("homing:home:*")) == 200)
        async with replica(server, "c", lookup_seconds=PATIENT) as c:
            asking = [asyncio.ensure_future(c.state.look_up("m", session(f"s{number}"))) for number in range(200)]
            await asyncio.sleep(0)
            for task in asking[::2]:
                task.cancel()
            await asyncio.wait(asking)
            for number in range(1, 200, 2):
                assert c.home(f"s{number}") == (R0, R1)[number % 3 == 0]


async def test_load_is_that_of_all_replicas(server: RedisServer, client: Redis) -> None:
    """Requests in flight at one replica are in the prices of the other, until they end or their replica stops."""
    async with replica(server, "b") as b:
        async with replica(server, "a") as a:
            claims = [
                a.fleet.loads.open(1, prompt_tokens=500, prefill_tokens=400, seconds=2.0, now=time.monotonic())
                for _ in range(3)
            ]
            await until(lambda: b.inflight() == [0, 3])
            load = b.fleet.view.ranks[1].load
            assert (load.inflight_tokens, load.waiting, load.waiting_tokens) == (1500, 3, 1200)
            assert load.waiting_seconds == pytest.approx(6.0)
            assert (load.recent_seconds, load.lasting_seconds) == pytest.approx((6.0, 6.0), rel=0.1)
            assert b.fleet.member(1).load.inflight == 0
            b.fleet.loads.open(1, prompt_tokens=10, prefill_tokens=10, seconds=0.1, now=time.monotonic())
            assert b.inflight() == [0, 4]
            await until(lambda: a.inflight() == [0, 4])
            a.fleet.loads.close(claims[0], now=time.monotonic())
            await until(lambda: b.inflight() == [0, 3])
            assert b.sample("shared_state_replicas") == 2
        await until(lambda: b.inflight() == [0, 1])
        assert b.sample("shared_state_replicas") == 1


async def test_a_frozen_redis_costs_a_request_milliseconds_and_load_ends_with_its_lease(
    server: RedisServer, client: Redis
) -> None:
    """The first that asks waits for its budget, and not until the connection is given up, those after it not at all;
    then all is in touch again.
    """

    def given_up() -> float:
        return b.sample("shared_state_errors_total", operation="look_up", trouble="slow")

    async with replica(server, "a", lease_seconds=1.0) as a, replica(server, "b", lease_seconds=1.0) as b:
        a.fleet.loads.open(0, prompt_tokens=1, prefill_tokens=1, seconds=1.0, now=time.monotonic())
        await until(lambda: b.inflight() == [1, 0])
        server.send(signal.SIGSTOP)
        try:
            await b.state.look_up("m", session("first"))
            await asyncio.sleep(0.01)
            for number in range(100):
                await b.state.look_up("m", session(f"later {number}"))
            assert given_up() == 0
            assert b.sample("shared_state_lookups_total", result="late") == 1
            assert b.sample("shared_state_lookups_total", result="skipped") == 100
            await until(lambda: b.inflight() == [0, 0])
            await until(lambda: b.sample("shared_state_up", backend="redis") == 0)
            await until(lambda: given_up() >= 1)
            b.bind("meanwhile", R1)
        finally:
            server.send(signal.SIGCONT)
        await until(lambda: a.home("meanwhile") == R1)
        await until(lambda: b.inflight() == [1, 0])
        await until(lambda: b.sample("shared_state_up", backend="redis") == 1)


async def test_what_cannot_be_read_is_counted_and_passed_over(server: RedisServer, client: Redis) -> None:
    """Garbage on the channel, as a home and among the workers."""
    async with replica(server, "a", lookup_seconds=PATIENT) as a:
        client.publish("homing:news", b"garbage")
        client.publish("homing:news", b"\x93\xa5novel\x01\x02")
        await until(lambda: a.sample("shared_state_errors_total", operation="listen", trouble="damaged") == 2)
        digest = wire.session_digest("m", *session("s"))
        client.set(wire.Names("homing").home(digest), "garbage")
        await a.state.look_up("m", session("s"))
        assert a.home("s") is None
        assert a.sample("shared_state_errors_total", operation="look_up", trouble="damaged") == 1
        client.hset("homing:workers", "w", f"1 {2**45} not JSON")
        await until(lambda: a.sample("shared_state_errors_total", operation="workers", trouble="damaged") == 1)
        client.hset("homing:workers", b"\xff", f"1 {2**45} {{}}")
        await until(lambda: a.sample("shared_state_errors_total", operation="workers", trouble="damaged") == 2)
        a.bind("s", R0)
        await until(lambda: (client.get(wire.Names("homing").home(digest)) or b"").endswith(b" 100 w/0"))


async def test_nothing_in_redis_names_a_client_and_everything_ends(server: RedisServer, client: Redis) -> None:
    """Keys and values hold digests; each key has a time to live, no longer than the session's."""
    async with replica(server, "a") as a:
        for number in range(20):
            a.bind(f"private-{number}", R0)
        await until(lambda: len(client.keys("*")) == 20)
        for key in client.keys("*"):
            assert 0 < client.pttl(key) <= 3_600_000
            text = key + (client.get(key) or b"")
            assert b"private" not in text
            assert b"secret" not in text


def test_of_two_homes_in_redis_the_one_used_later_stays(client: Redis) -> None:
    """A replica that was cut off tells an old home after a newer one: the newer one stays."""
    key = wire.Names("p").home(b"\x01" * 16)
    began = time.monotonic()

    def bind(rank: int, age_seconds: float) -> bytes:
        home = wire.Home(b"\x01" * 16, "w", rank, 7, age_seconds)
        client.eval(wire.BIND.text, 1, key, *wire.bind_arguments([home], idle_seconds=100.0))
        return (client.get(key) or b"").split()[-1]

    assert bind(0, 5.0) == b"w/0"
    assert bind(1, 9.0) == b"w/0"
    assert bind(2, 2.0) == b"w/2"
    left_ms = client.pttl(key)
    assert 97_000 - 1000 * (time.monotonic() - began) < left_ms <= 98_000
    assert bind(3, 200.0) == b"w/2"
    seconds, microseconds = client.time()
    read = wire.read_home(b"\x01" * 16, client.get(key), now_ms=seconds * 1000 + microseconds // 1000)
    assert (read.worker, read.rank, read.prompt_tokens) == ("w", 2, 7)
    assert 1.5 < read.age_seconds < 2.5 + time.monotonic() - began


def test_of_two_deeds_on_a_worker_the_later_stays_until_its_lease_ends(client: Redis) -> None:
    """Stamps decide; what is not renewed ends; a first stamp is made from the age. A field that somebody else wrote
    there is in nobody's way.
    """
    client.hset("p:workers", b"\xff", f"1 {2**45} record")

    def tell(lease_seconds: float = 10.0, **entries: wire.WorkerEntry) -> dict[str, wire.WorkerEntry]:
        arguments = wire.workers_arguments(entries, lease_seconds=lease_seconds, removal_seconds=20.0)
        read = wire.read_workers(client.eval(wire.WORKERS.text, 1, "p:workers", *arguments))
        return {name: entry for name, entry in read.items() if entry is not None}

    assert tell(a=wire.WorkerEntry("configured", 1)) == {"a": wire.WorkerEntry("configured", 1)}
    assert tell(a=wire.WorkerEntry("configured otherwise", 1))["a"].record == "configured"
    began_ms = time.time() * 1000
    removed = tell(a=wire.WorkerEntry("", None, age_seconds=3.0))["a"]
    assert removed.record == ""
    assert removed.stamp_ms is not None
    assert began_ms - 4500 < removed.stamp_ms < time.time() * 1000 - 1500
    assert tell(a=wire.WorkerEntry("configured", 1))["a"] == removed
    added = tell(a=wire.WorkerEntry("again", None))["a"]
    assert added.record == "again"
    assert tell(a=removed)["a"] == added
    assert tell(0.05, a=added)["a"] == added
    time.sleep(0.1)
    assert tell() == {}
    assert tell(a=wire.WorkerEntry("configured", 1))["a"].record == "configured"


def test_a_full_redis_refuses_scripts_that_write(client: Redis) -> None:
    """What the router relies on to see that Redis is full."""
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(ResponseError, match="maxmemory"):
            client.eval(wire.BIND.text, 1, "k", *wire.bind_arguments([wire.Home(b"", "w", 0, 0, 0.0)], idle_seconds=9))
        assert client.publish("homing:news", b"still passed on") == 0
    finally:
        client.config_set("maxmemory", 0)
