"""The router's indexes: one bound for all models, and none is kept without ranks."""

from __future__ import annotations

import asyncio
import io

import pytest
from prometheus_client import CollectorRegistry

from router.core.types import Engine, RankId
from router.fleet.chores import do_chores
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.settings import RoutingSettings
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics
from router.wire.kv_events import BlockStored, EventBatch

MOST = 1024
TARGET = Target(host="", port=0, rank=0, dp_size=1, engine=Engine.VLLM)


def fleet_of(*, most: int = MOST) -> tuple[Fleet, CollectorRegistry]:
    registry = CollectorRegistry()
    return Fleet(RoutingSettings(max_index_blocks=most), Metrics(registry), clock=lambda: 0.0), registry


def add(fleet: Fleet, name: str, models: frozenset[str]) -> int:
    return fleet.add_rank(RankId(name, 0), target=TARGET, models=models, block_tokens=16, pool_tokens=None)


def store(fleet: Fleet, slot: int, number: int, *, blocks: int = 100) -> None:
    names = tuple(range(number * blocks, (number + 1) * blocks))
    tokens = [number] * 16 * blocks
    event = BlockStored(names, None, tokens, 16, kind="full_attention")
    fleet.apply(slot, EventBatch(1.0, (event,), 0), now=0.0)


def test_twenty_models_share_one_bound() -> None:
    """What they hold together is what one may hold, each a fair part; what is forgotten stays counted."""
    fleet, registry = fleet_of()
    slots = [add(fleet, f"w{number}", frozenset({f"m{number}"})) for number in range(20)]
    for number in range(20):
        for slot in slots:
            store(fleet, slot, number)
    assert registry.get_sample_value("homing_index_entries") == MOST
    assert registry.get_sample_value("homing_index_used_blocks") == MOST
    assert registry.get_sample_value("homing_index_evicted_blocks") == 20 * 20 * 100 - MOST

    for slot in slots:
        fleet.remove_rank(slot)
    assert registry.get_sample_value("homing_index_entries") == 0
    assert registry.get_sample_value("homing_index_used_blocks") == 0
    assert registry.get_sample_value("homing_index_evicted_blocks") == 20 * 20 * 100 - MOST


@pytest.mark.parametrize("goes", ["clear", "leave"])
def test_chores_end_without_events(goes: str) -> None:
    """A rank with thousands of short chains is cleared, or leaves, and nobody says anything more."""
    fleet, registry = fleet_of(most=1 << 20)
    slot = add(fleet, "w", frozenset({"m"}))
    for number in range(5_000):
        store(fleet, slot, number, blocks=1)
    assert not fleet.let_go()
    if goes == "clear":
        fleet.clear(slot, "restart")
    else:
        fleet.remove_rank(slot)
    assert registry.get_sample_value("homing_index_used_blocks") != 0

    async def until_done() -> None:
        chores = asyncio.create_task(do_chores(fleet.let_go, log=make_logger(level="error", form="json")))
        async with asyncio.timeout(30):
            while registry.get_sample_value("homing_index_used_blocks"):  # noqa: ASYNC110 (it has no event)
                await asyncio.sleep(0.01)
        chores.cancel()

    asyncio.run(until_done())
    assert registry.get_sample_value("homing_index_entries") == 0


def test_a_chore_that_fails_ends_nothing() -> None:
    """The next one is done all the same."""
    done = asyncio.Event()
    outcomes = iter([True, False])

    def let_go() -> bool:
        if next(outcomes, None):
            return True
        done.set()
        raise ZeroDivisionError

    async def until_failed() -> None:
        log = io.StringIO()
        chores = asyncio.create_task(do_chores(let_go, log=make_logger(level="error", form="json", stream=log)))
        await done.wait()
        await asyncio.sleep(0)
        assert not chores.done()
        assert "chore of the index failed" in log.getvalue()
        chores.cancel()

    asyncio.run(until_failed())


def test_an_index_goes_with_its_last_rank() -> None:
    """A worker that registers three hundred times, each time with another adapter among its models."""
    fleet, _ = fleet_of()
    for number in range(300):
        slot = add(fleet, "w", frozenset({"m", f"adapter-{number}"}))
        store(fleet, slot, number)
        assert len(fleet.indexes("m")) == 1
        fleet.remove_rank(slot)
    assert fleet.indexes("m") == []
    assert (len(fleet._indexes), len(fleet._peers), fleet._indexes.budget.used) == (0, 0, 0)
