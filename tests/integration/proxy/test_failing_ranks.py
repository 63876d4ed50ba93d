"""Ranks that fail, or are full, among others: what a fleet's requests make of it, one after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from router.core.breaker import BreakerState
from router.settings import Policy, RoutingSettings
from tests.fakes.fault_worker import OK, FaultWorker, Script, answer
from tests.fakes.fleet_rig import FleetRig

BROKEN: Script = (answer(500, b"{}"),)
BAD: Script = (answer(400, b"{}"),)


@asynccontextmanager
async def fleet(*scripts: list[Script], routing: RoutingSettings) -> AsyncIterator[tuple[FleetRig, list[FaultWorker]]]:
    """A router before workers that play these scripts, the last one again and again."""
    async with AsyncExitStack() as stack, asyncio.timeout(20):
        workers = [await stack.enter_async_context(FaultWorker(each)) for each in scripts]
        world = FleetRig(*(worker.port for worker in workers), routing=routing)
        await world.start()
        stack.push_async_callback(world.plane.drain, 0)
        yield world, workers


async def test_a_request_at_fault_hides_no_broken_rank() -> None:
    """Five answers of 500 open a rank's breaker, with a 400 after each. Of its trials a 400 tells nothing, and the next
    is made at once; the first answer closes it.
    """
    routing = RoutingSettings(policy=Policy.ROUND_ROBIN, breaker_failures=5, breaker_seconds=0.2)
    bad = [*([BROKEN, BAD] * 4), BROKEN, BAD, BAD, OK]
    async with fleet(bad, [OK], routing=routing) as (world, (broken, _)):

        def state() -> BreakerState:
            return world.fleet.breakers.state(0, now=world.fleet.clock())

        async def until_asked(times: int) -> None:
            while len(broken.requests) < times:
                await world.ask("s")

        await until_asked(8)
        assert state() is BreakerState.CLOSED
        await until_asked(9)
        assert state() is BreakerState.OPEN
        for _ in range(4):
            await world.ask("s")
        assert len(broken.requests) == 9
        await asyncio.sleep(0.2)
        for asked in (10, 11):
            await until_asked(asked)
            assert state() is BreakerState.TRIAL
        await until_asked(12)
        assert state() is BreakerState.CLOSED
