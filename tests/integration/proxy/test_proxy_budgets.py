"""What bounds the work that failures make: the retry budget, and breakers over a real fleet."""

from __future__ import annotations

from router.core.breaker import BreakerState
from router.core.types import RankStatus
from router.settings import RoutingSettings, UpstreamSettings
from tests.fakes.fault_worker import OK, FaultWorker, Move, Script, answer
from tests.fakes.fleet_rig import FleetRig
from tests.fakes.proxy_rig import rig, target

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


def _states(world: FleetRig) -> list[BreakerState]:
    """Of all ranks, by slot."""
    return [rank.breaker for rank in world.fleet.ranks()]


async def _after(script: Script, *, asks: int = 24) -> tuple[list[int], int, list[BreakerState], float]:
    """Statuses of requests over one rank that plays ``script`` and two good ones; what the first was sent; states."""
    routing = RoutingSettings(breaker_failures=3, breaker_seconds=60.0)
    async with FaultWorker([script]) as bad, FaultWorker() as one, FaultWorker() as other:
        world = FleetRig(bad.port, one.port, other.port, routing=routing)
        await world.start()
        try:
            statuses = [(await world.ask(number)).status for number in range(asks)]
            states = _states(world)
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
        world = FleetRig(first.port, second.port, routing=routing)
        await world.start()
        try:
            assert (await world.ask(0)).status == 502
            assert sorted(_states(world)) == [BreakerState.CLOSED, BreakerState.OPEN]
            open_slot = _states(world).index(BreakerState.OPEN)
            world.fleet.set_status(1 - open_slot, RankStatus.DOWN)
            await world.ask(1)
            assert [len(first.requests), len(second.requests)][open_slot] == 2
        finally:
            await world.plane.drain(0)
