"""A registry that runs over a real fleet."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

import httpx
from prometheus_client import CollectorRegistry

from router.core.types import RankStatus
from router.core.ways import can_spare
from router.errors import ConfigError
from router.fleet.event_stream import StreamTimes
from router.fleet.fleet import Fleet
from router.fleet.registry import Registry
from router.fleet.worker import Hooks, Worker
from router.settings import ProbeSettings, RoutingSettings
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics


class Control:
    """A running registry over a real fleet."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        self.metrics = Metrics(CollectorRegistry())
        self.fleet = Fleet(RoutingSettings(), self.metrics, clock=loop.time)
        self.log = io.StringIO()
        self.greeted: list[str] = []
        self.streaming = False
        self.registry = Registry(
            self.fleet,
            ProbeSettings(interval_seconds=0.05, timeout_seconds=0.1, failures=3),
            client=client,
            metrics=self.metrics,
            log=make_logger(level="info", form="json", stream=self.log),
            clock=loop.time,
            wall_clock=lambda: 0.0,
            hooks=Hooks(
                on_worker_ready=self._greet,
                has_progress=lambda _: self.streaming,
                can_spare=lambda slots, leaving: can_spare(self.fleet.view, slots, leaving),
            ),
            stream_times=StreamTimes(replay_idle=0.3, between_asks=0.01),
        )

    async def _greet(self, worker: Worker) -> None:
        self.greeted.append(worker.name)
        if "damaged" in worker.name:
            raise ConfigError("tokenizer.json cannot be read")

    def statuses(self) -> list[tuple[str, RankStatus]]:
        return [(str(rank.id), rank.status) for rank in self.fleet.ranks()]


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 (the thing waited for has no event)
            await asyncio.sleep(0.01)
