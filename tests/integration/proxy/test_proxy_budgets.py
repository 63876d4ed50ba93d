"""What bounds the work that failures make: the retry budget, and breakers over a real fleet."""

from __future__ import annotations

import asyncio
import time

import structlog
from prometheus_client import CollectorRegistry

from router.core.breaker import BreakerState
from router.core.types import RankId, RankStatus
from router.fleet.fleet import Fleet
from router.proxy.brain import RouterBrain
from router.proxy.plane import DataPlane
from router.settings import RoutingSettings, ServerSettings, UpstreamSettings
from router.telemetry.metrics import Metrics
from tests.fakes.fault_worker import OK, FaultWorker, Move, Script, answer
from tests.fakes.proxy_rig import Client, RawAnswer, rig, target

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BUSY: Script = (answer(503, b"{}"),)
BROKEN: Script = (answer(500, b"{}"),)


async def test_retries_end_with_the_budget() -> None:
    """With two retries at hand and a fifth earned by each request, the third failing request is tried once only."""
    settings = UpstreamSettings(retry_reserve=2, retry_ratio=0.2)
    async with (
        FaultWorker([(Move.RESET,)]) as bad,
        FaultWorker() as good,
        rig(target(bad.port), target(good.port), upstream=settings) as it,
    ):
        statuses = [(await it.ask(ASK)).status for _ in range(4)]
        assert statuses == [200, 200, 502, 502]
        assert len(good.requests) == 2
        assert it.count("homing_retries_denied_total") == 2


class Fleeted:
    """A data plane with the real brain over ranks that need no discovery."""

    def __init__(self, *ports: int, routing: RoutingSettings) -> None:
        metrics = Metrics(CollectorRegistry())
        self.fleet = Fleet(routing, metrics, clock=time.monotonic)
        for number, port in enumerate(ports):
            slot = self.fleet.add_rank(
                RankId(f"w{number}", 0),
                target=target(port),
                models=frozenset({"m"}),
                block_tokens=None,
                pool_tokens=None,
            )
            self.fleet.set_status(slot, RankStatus.READY)
        self.brain = RouterBrain(self.fleet, settings=routing, metrics=metrics)
        log = structlog.wrap_logger(structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(0))
        upstream = UpstreamSettings(first_byte_seconds=0.2)
        self.plane = DataPlane(self.brain, metrics, ServerSettings(port=0), upstream, log)  # type: ignore[arg-type]
        self.metrics = metrics

    async def ask(self, port: int, number: int) -> RawAnswer:
        """One request of a session of its own."""
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        try:
            await client.send(ASK, headers={"x-session-id": f"s{number}"})
            return await client.answer()
        finally:
            await client.close()

    def states(self) -> list[BreakerState]:
        """Of all ranks, by slot."""
        return [rank.breaker for rank in self.fleet.ranks()]


async def _after(script: Script, *, asks: int = 24) -> tuple[list[int], int, list[BreakerState], float]:
    """Statuses of requests over one rank that plays ``script`` and two good ones; what the first was sent; states."""
    routing = RoutingSettings(breaker_failures=3, breaker_seconds=60.0)
    async with FaultWorker([script]) as bad, FaultWorker() as one, FaultWorker() as other:
        world = Fleeted(bad.port, one.port, other.port, routing=routing)
        port = await world.plane.start()
        try:
            statuses = [(await world.ask(port, number)).status for number in range(asks)]
            states = world.states()
            gauge = world.metrics.registry.get_sample_value("homing_rank_breaker_open", {"worker": "w0", "rank": "0"})
        finally:
            await world.plane.drain(0)
        return statuses, len(bad.requests), states, gauge or 0.0


async def test_a_rank_that_keeps_failing_is_left_alone() -> None:
    """After three failures in a row the rank gets nothing more, nobody has seen an error, and operators see it."""
    for script in ((Move.RESET,), BROKEN, (b"nonsense\r\n\r\n",)):
        statuses, sent, states, gauge = await _after(script)
        assert set(statuses) == {200}
        assert sent == 3
        assert states == [BreakerState.OPEN, BreakerState.CLOSED, BreakerState.CLOSED]
        assert gauge == 1.0


async def test_full_or_refusing_ranks_are_not_broken() -> None:
    """429, 503 and 4xx open no breaker: the rank is still asked."""
    for script in (BUSY, (answer(429, b"{}"),), (answer(400, b"{}"),)):
        _, sent, states, gauge = await _after(script)
        assert sent > 3
        assert states == [BreakerState.CLOSED] * 3
        assert gauge == 0.0


async def test_when_nothing_else_is_left_open_breakers_are_tried() -> None:
    """Of two ranks one may be out; the other fails too and stays in; when it leaves, the first is asked after all."""
    routing = RoutingSettings(breaker_failures=1, breaker_seconds=60.0)
    async with FaultWorker([(Move.RESET,), OK]) as first, FaultWorker([(Move.RESET,)]) as second:
        world = Fleeted(first.port, second.port, routing=routing)
        port = await world.plane.start()
        try:
            assert (await world.ask(port, 0)).status == 502
            assert sorted(world.states()) == [BreakerState.CLOSED, BreakerState.OPEN]
            open_slot = world.states().index(BreakerState.OPEN)
            world.fleet.set_status(1 - open_slot, RankStatus.DOWN)
            await world.ask(port, 1)
            assert [len(first.requests), len(second.requests)][open_slot] == 2
        finally:
            await world.plane.drain(0)
