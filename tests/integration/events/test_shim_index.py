"""The router's picture against the shims' own snapshots: through eviction, kill -9, lost frames, a router's restart."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from router.core.index import PrefixIndex
from router.fleet.event_stream import StreamTimes
from router.fleet.fleet import Fleet
from router.fleet.registry import Registry
from router.fleet.worker_api import fetch_snapshot
from router.settings import ProbeSettings, RoutingSettings, WorkerSpec
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics
from tests.fakes.ports import reserve

#: A pool of 128 pages of 16 tokens: the load below fills it several times over.
_SHIM = ("shim", "--runner", "sim", "--sim-prefill-rate", "inf", "--sim-decode-step", "1", "--pool-tokens", "2048")
_AGREE_SECONDS = 20.0


class Shim:
    """A shim process that can be killed and started again on the same ports, which nobody else gets meanwhile."""

    def __init__(self) -> None:
        self.places = [reserve() for _ in range(3)]
        self.ports = tuple(str(place.getsockname()[1]) for place in self.places)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        named = zip(("--port", "--kv-events-port", "--replay-port"), self.ports, strict=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "router.cli", *_SHIM, *(word for pair in named for word in pair)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert " ready " in line, line

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.communicate()
            self._process = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"


@contextlib.contextmanager
def a_shim() -> Iterator[Shim]:
    shim = Shim()
    shim.start()
    try:
        yield shim
    finally:
        shim.kill()
        for place in shim.places:
            place.close()


class Relay:
    """Stands between a publisher and the router, and loses messages on demand."""

    def __init__(self, context: zmq.asyncio.Context, port: str) -> None:
        self.is_losing = False
        self.received = self.lost = 0
        self._in, self._out = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._in.subscribe(b"")
        self._in.connect(f"tcp://127.0.0.1:{port}")
        self.endpoint = f"tcp://127.0.0.1:{self._out.bind_to_random_port('tcp://127.0.0.1')}"

    async def run(self) -> None:
        try:
            while True:
                parts = await self._in.recv_multipart()
                self.received += 1
                if self.is_losing:
                    self.lost += 1
                else:
                    await self._out.send_multipart(parts)
        finally:
            self._in.close(linger=0)
            self._out.close(linger=0)


class Control:
    """The control side of a router: a registry over a fleet."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        self.client = client
        self.metrics = Metrics(CollectorRegistry())
        self.fleet = Fleet(RoutingSettings(), self.metrics, clock=loop.time)
        self.registry = Registry(
            self.fleet,
            ProbeSettings(interval_seconds=0.1, timeout_seconds=10.0, failures=2, parity=False),
            client=client,
            metrics=self.metrics,
            log=make_logger(level="error", form="json", stream=io.StringIO()),
            clock=loop.time,
            wall_clock=loop.time,
            stream_times=StreamTimes(between_asks=0.01),
        )

    def count(self, name: str, **labels: str) -> float:
        found = [
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"homing_{name}_total" and labels.items() <= sample.labels.items()
        ]
        return sum(found)

    async def agrees(self, url: str) -> None:
        """Soon the index holds what the shim's own snapshot says, group by group."""
        async with asyncio.timeout(_AGREE_SECONDS):
            while True:
                ranks = self.fleet.members()
                if ranks and ranks[0].index is not None:
                    held = {group: keys for group, keys in ranks[0].index.residency(ranks[0].slot).items() if keys}
                    if held == await self._own_word(url, ranks[0].index.block_tokens):
                        return
                await asyncio.sleep(0.02)

    async def _own_word(self, url: str, block_tokens: int) -> dict[int, frozenset[int]]:
        snapshot = await fetch_snapshot(self.client, url, "/kv_snapshot?dp_rank=0")
        index = PrefixIndex(block_tokens=block_tokens)
        index.add_rank(0, domain="shim")
        for event in snapshot.batch.events:
            index.apply(0, event)
        return {group: keys for group, keys in index.residency(0).items() if keys}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def a_router(client: httpx.AsyncClient, spec: WorkerSpec) -> AsyncIterator[Control]:
    control = Control(client)
    control.registry.add(spec)
    running = asyncio.ensure_future(control.registry.run())
    try:
        await until(lambda: control.registry.worker(spec.name).status == "ready")
        yield control
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def load(client: httpx.AsyncClient, url: str, rng: random.Random, requests: int) -> None:
    """Sessions that share a head and grow, a few at a time: stores, twins and evictions."""
    head = [5 + rng.randrange(200) for _ in range(96)]

    async def session() -> None:
        prompt = list(head)
        for _ in range(3):
            prompt += [5 + rng.randrange(200) for _ in range(rng.randrange(20, 120))]
            body = {"model": "needle", "prompt": prompt, "max_tokens": 4}
            (await client.post(url + "/v1/completions", json=body)).raise_for_status()

    for _ in range(requests // 12):
        await asyncio.gather(*(session() for _ in range(4)))


async def test_the_picture_is_the_shims_own_through_every_fault() -> None:
    """Eviction, frames lost, kill -9 and a new process on the same ports, a router that starts anew beside it."""
    rng = random.Random(4)
    context = zmq.asyncio.Context()
    with a_shim() as shim:
        relay = Relay(context, shim.ports[1])
        relaying = asyncio.ensure_future(relay.run())
        spec = WorkerSpec(url=shim.url, id="w", kv_events=relay.endpoint, kv_replay=f"tcp://127.0.0.1:{shim.ports[2]}")
        try:
            async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                async with a_router(client, spec) as control:
                    await load(client, shim.url, rng, 60)
                    await control.agrees(shim.url)
                    assert control.count("kv_events", type="BlockRemoved") > 10
                    assert control.count("kv_event_gaps") == 0

                    before = control.count("kv_event_replays", result="whole")
                    relay.is_losing = True
                    await load(client, shim.url, rng, 12)
                    relay.is_losing = False
                    await load(client, shim.url, rng, 12)
                    await control.agrees(shim.url)
                    assert relay.lost > 0
                    # A gap before the next message, or a check found it when none came for a moment.
                    assert control.count("kv_event_gaps") + control.count("kv_event_replays", result="whole") > before
                    assert control.count("kv_resyncs") == 0

                    relay.is_losing = True
                    await load(client, shim.url, rng, 12)
                    relay.is_losing = False
                    await control.agrees(shim.url)  # though nothing follows
                    assert control.count("kv_resyncs") == 0

                    shim.kill()
                    shim.start()
                    received = relay.received
                    while relay.received == received:  # until the relay itself is connected again
                        await load(client, shim.url, rng, 12)
                    await load(client, shim.url, rng, 12)
                    await control.agrees(shim.url)
                    # Noticed by the new process's first message, or by a replay that it cannot answer.
                    assert (
                        control.count("kv_resyncs", cause="restart") + control.count("kv_resyncs", cause="replay") >= 1
                    )

                async with a_router(client, spec) as control:
                    await control.agrees(shim.url)
                    assert control.fleet.ranks()[0].resident_blocks > 0
                    assert control.count("kv_event_gaps") == 0
        finally:
            relaying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await relaying
            context.destroy(linger=0)
