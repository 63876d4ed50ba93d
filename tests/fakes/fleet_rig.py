"""A data plane with the real brain over ranks that need no discovery."""

from __future__ import annotations

import asyncio
import time

import structlog
from prometheus_client import CollectorRegistry

from router.core.types import WHOLE, Part, RankId, RankStatus
from router.fleet.fleet import Fleet
from router.proxy.brain import RouterBrain
from router.proxy.plane import DataPlane
from router.settings import QueueSettings, RoutingSettings, ServerSettings, UpstreamSettings
from router.telemetry.metrics import Metrics
from tests.fakes.proxy_rig import Client, RawAnswer, target

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class FleetRig:
    """``start`` it, and drain its ``plane`` in the end."""

    def __init__(
        self,
        *ports: int,
        routing: RoutingSettings | None = None,
        queue: QueueSettings | None = None,
        pool_tokens: int | None = None,
        first_byte_seconds: float = 30.0,
        retry_reserve: int = 1000,
    ) -> None:
        routing = routing or RoutingSettings()
        self.metrics = Metrics(CollectorRegistry())
        #: The fleet's; a test may put another one in its place.
        self.clock = time.monotonic
        self.fleet = Fleet(routing, self.metrics, clock=lambda: self.clock())
        self._pool_tokens = pool_tokens
        for port in ports:
            self.add_rank(port)
        self.brain = RouterBrain(self.fleet, settings=routing, metrics=self.metrics)
        log = structlog.wrap_logger(structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(0))
        self.plane = DataPlane(
            self.brain,  # type: ignore[arg-type]  # a protocol with a plain method cannot say what it is handed back
            self.metrics,
            ServerSettings(port=0),
            UpstreamSettings(first_byte_seconds=first_byte_seconds, retry_reserve=retry_reserve),
            log,
            queue_settings=queue,
        )
        self.port = 0

    def add_rank(self, port: int, *, part: Part = WHOLE) -> int:
        """A ready rank ``wN/0`` of a worker at ``port``; N is its slot."""
        slot = self.fleet.add_rank(
            RankId(f"w{len(self.fleet.members())}", 0),
            target=target(port)._replace(part=part, bootstrap_port=8998),
            models=frozenset({"m"}),
            block_tokens=None,
            pool_tokens=self._pool_tokens,
        )
        self.fleet.set_status(slot, RankStatus.READY)
        return slot

    async def start(self) -> None:
        """Listen."""
        self.port = await self.plane.start()

    def count(self, name: str, **labels: str) -> float:
        """A metric's value now, 0 where it has none."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def ask(self, session: object, **fields: object) -> RawAnswer:
        """One request of a session, on a connection of its own."""
        client = await self.connect()
        try:
            await client.send({**ASK, **fields}, headers={"x-session-id": f"s{session}"})
            return await client.answer()
        finally:
            await client.close()
