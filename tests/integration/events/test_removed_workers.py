"""A worker that is removed leaves nothing behind that runs."""

from __future__ import annotations

import asyncio
import io

import httpx
from prometheus_client import CollectorRegistry

from router.core.types import RankStatus
from router.fleet.fleet import Fleet
from router.fleet.registry import Registry
from router.settings import ProbeSettings, RoutingSettings, WorkerSpec
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics

ANSWERS = {
    "/v1/models": {"object": "list", "data": [{"id": "m"}]},
    "/kv_event_sources": {
        "0": {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://127.0.0.1:1"}
    },
}


def answer(request: httpx.Request) -> httpx.Response:
    found = ANSWERS.get(request.url.path)
    return httpx.Response(404) if found is None else httpx.Response(200, json=found)


async def test_while_its_events_are_waited_for() -> None:
    """Nobody publishes yet when it goes: not even a wait for that is left."""
    loop = asyncio.get_running_loop()
    metrics = Metrics(CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        registry = Registry(
            Fleet(RoutingSettings(), metrics, clock=loop.time),
            ProbeSettings(parity=False),
            client=client,
            metrics=metrics,
            log=make_logger(level="error", form="json", stream=io.StringIO()),
            clock=loop.time,
            wall_clock=loop.time,
        )
        running = asyncio.create_task(registry.run())
        before = asyncio.all_tasks()
        worker = registry.add(WorkerSpec(url="http://127.0.0.1:1"))
        async with asyncio.timeout(10):
            while not worker.streams:  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert worker.status is RankStatus.PENDING
        await registry.remove(worker.name)
        assert asyncio.all_tasks() == before
        running.cancel()
        await asyncio.wait([running])
