"""A worker's task that is cancelled ends, whatever comes in the same moment: else who waits for that waits for ever."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from router.fleet.probes import until_due
from router.fleet.worker_api import describe
from router.settings import WorkerSpec

MODELS = {"object": "list", "data": [{"id": "m"}]}


async def turns(count: int) -> None:
    """Of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def is_cancelled(task: asyncio.Task[object]) -> bool:
    """Cancel it and wait for its end."""
    task.cancel()
    await asyncio.wait([task], timeout=30.0)
    return task.cancelled()


@pytest.mark.parametrize("status", [200, 503])
async def test_while_it_asks(status: int) -> None:
    """At whichever turn of the loop it is cancelled, the answer's own among them."""

    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        return httpx.Response(status, json=MODELS)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        for count in range(100):
            task = asyncio.create_task(describe(client, WorkerSpec(url="http://worker:1")))
            await turns(count)
            if task.done():
                assert count > 1
                assert (task.exception() is None) == (status == 200)
                return
            assert await is_cancelled(task), count
    pytest.fail("it never ended by itself")


@pytest.mark.parametrize("between", range(5))
async def test_while_it_waits_for_the_next_probe(between: int) -> None:
    """Somebody doubts the worker just before it is removed."""
    doubted = asyncio.Event()
    task = asyncio.create_task(until_due(doubted, interval_seconds=60.0))
    await turns(3)
    doubted.set()
    await turns(between)
    assert await is_cancelled(task)
