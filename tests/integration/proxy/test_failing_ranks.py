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
FULL: Script = (answer(429, b'{"full": 1}', headers={"Retry-After": "9"}),)
IN_TURN = RoutingSettings(policy=Policy.ROUND_ROBIN)


@asynccontextmanager
async def fleet(
    *scripts: list[Script], routing: RoutingSettings, retry_reserve: int = 1000
) -> AsyncIterator[tuple[FleetRig, list[FaultWorker]]]:
    """A router before workers that play these scripts, the last one again and again. Its fleet's clock stands still:
    what is remembered for a second is, however long that takes.
    """
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        workers = [await stack.enter_async_context(FaultWorker(each)) for each in scripts]
        world = FleetRig(*(worker.port for worker in workers), routing=routing, retry_reserve=retry_reserve)
        now = world.clock()
        world.clock = lambda: now
        await world.start()
        stack.push_async_callback(world.plane.drain, 0)
        yield world, workers


async def test_a_request_at_fault_hides_no_broken_rank() -> None:
    """Five answers of 500 open a rank's breaker, with a 400 after each. Of its trials a 400 tells nothing, and the next
    is made at once; the first answer closes it.
    """
    routing = RoutingSettings(policy=Policy.ROUND_ROBIN, breaker_failures=5, breaker_seconds=60.0)
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
        now = world.clock()
        world.clock = lambda: now + 60.0
        for asked in (10, 11):
            await until_asked(asked)
            assert state() is BreakerState.TRIAL
        await until_asked(12)
        assert state() is BreakerState.CLOSED


async def test_a_full_fleet_is_asked_once_a_request() -> None:
    """Of twelve full ranks the first request tries all; the others are told by the first what all have just said. None
    of that wears out the budget of retries.
    """
    async with fleet(*([FULL],) * 12, routing=IN_TURN, retry_reserve=30) as (world, workers):
        answers = [await world.ask(number) for number in range(60)]
        assert {each.status for each in answers} == {429}
        assert {each.headers["retry-after"] for each in answers} == {"9"}
        assert answers[0].headers["x-homing-attempts"] == "12"
        assert sum(len(worker.requests) for worker in workers) == 60 + 11
        assert world.count("homing_retries_denied_total") == 0


async def test_the_one_rank_that_is_not_full_is_tried_second() -> None:
    """And no other before it, though it is the last in turn."""
    async with fleet([FULL], [FULL], [FULL, OK], routing=IN_TURN) as (world, workers):
        assert (await world.ask("s")).status == 429
        world.fleet.full.forget(2)
        answer_ = await world.ask("s")
        assert (answer_.status, answer_.headers["x-homing-worker"]) == (200, "w2")
        assert sum(len(worker.requests) for worker in workers) <= 3 + 2


async def test_full_ranks_are_asked_before_a_failure_is_told() -> None:
    """A request that failed, and that nobody has turned away yet, is tried on a rank that has just turned others away;
    once that turns it away too, no other is tried.
    """
    async with fleet([FULL, BROKEN], [FULL], [FULL], routing=IN_TURN) as (world, workers):
        assert (await world.ask("s")).status == 429
        answer_ = await world.ask("s")
        assert (answer_.status, answer_.headers["x-homing-attempts"]) == (429, "2")
        assert sum(len(worker.requests) for worker in workers) == 3 + 2


async def test_an_answer_says_that_there_is_room() -> None:
    """A rank that turned one request away and has served another since is tried second again."""
    async with fleet([FULL, OK, FULL], [FULL, OK], routing=IN_TURN) as (world, workers):
        assert (await world.ask("s")).status == 429
        assert [(await world.ask("s")).headers["x-homing-attempts"] for _ in range(3)] == ["1", "1", "2"]
        assert [len(worker.requests) for worker in workers] == [3, 3]
