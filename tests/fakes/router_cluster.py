"""A real Redis, sim shims and router replicas as processes of their own, to be stopped, frozen and killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.fakes.ports import reserve

#: Where ``.ci/run`` unpacks Debian's packages.
_UNPACKED = Path(__file__).parents[2] / "build/debian/redis/usr"
SERVER = shutil.which("redis-server") or shutil.which("redis-server", path=_UNPACKED / "bin")
needs_redis = pytest.mark.skipif(SERVER is None, reason="redis-server is missing: apt-get install redis-server")


class RedisServer:
    """A redis-server without files of its own, on a port that stays the same over restarts."""

    def __init__(self) -> None:
        place = reserve()
        weakref.finalize(self, place.close)
        self.port: int = place.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert SERVER is not None
        self._process = subprocess.Popen(
            [SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=tempfile.gettempdir(),
            env=os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, _UNPACKED.glob("lib/*/")))},
        )
        end = time.monotonic() + 30
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except RedisError:
                    assert time.monotonic() < end, "redis-server does not start"
                    time.sleep(0.02)

    def client(self) -> Redis:
        return Redis.from_url(self.url, socket_timeout=5)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@dataclass
class Part:
    """A ``homing`` process and the words of its ready line."""

    process: subprocess.Popen[str]
    words: dict[str, str] = field(default_factory=dict)

    async def ready(self) -> None:
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert " ready " in line, line
        self.words = dict(word.split("=", 1) for word in line.split() if "=" in word)

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


def start(*arguments: str) -> Part:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOMING")}
    return Part(
        subprocess.Popen(
            [sys.executable, "-m", "router.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
    )


class Cluster:
    """One Redis, two shims of two ranks, two routers; or a shim for each of ``roles``."""

    def __init__(self, *, roles: Sequence[str] = ("unified", "unified")) -> None:
        self.redis = RedisServer()
        self._roles = roles
        self.shims: list[Part] = []
        self.routers: list[Part] = []
        self.http = httpx.AsyncClient(timeout=60, trust_env=False)

    async def __aenter__(self) -> Cluster:
        try:
            self.redis.start()
            shim = ("shim", "--runner", "sim", "--model", "needle", "--dp-size", "2", "--port", "0")
            ports = ("--kv-events-port", "0", "--replay-port", "0", "--bootstrap-port", "0")
            self.shims = [start(*shim, *ports, "--role", role) for role in self._roles]
            for part in self.shims:
                await part.ready()
            await self.add_routers(2)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        for part in (*self.routers, *self.shims):
            part.kill()
        self.redis.kill()

    @property
    def shim_urls(self) -> list[str]:
        return ["http://" + shim.words["http"].removeprefix("http://") for shim in self.shims]

    async def add_routers(self, count: int, *, workers: Sequence[str] | None = None) -> list[Part]:
        """Start routers before all shims, or before those named, and wait until they are in touch."""
        urls = self.shim_urls if workers is None else workers
        added = [
            start(
                *("router", "--port", "0", "--admin-port", "0", "--probes.interval-seconds", "0.5"),
                *("--shared.redis-url", self.redis.url),
                *(word for url in urls for word in ("--worker", url)),
            )
            for _ in range(count)
        ]
        self.routers += added
        for router in added:
            await router.ready()
            if urls:
                await until(lambda router=router: self.is_ready(router, ranks=2 * len(urls)))
            await until(lambda router=router: self.is_up(router))
        return added

    async def is_ready(self, router: Part, *, ranks: int) -> bool:
        return sum(worker["status"] == "ready" for worker in await self.workers(router)) * 2 == ranks

    async def workers(self, router: Part) -> list[dict[str, Any]]:
        answer = await self.http.get(router.words["admin"] + "/admin/workers")
        workers: list[dict[str, Any]] = answer.json()["workers"]
        return workers

    async def metric(self, router: Part, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        text = (await self.http.get(router.words["admin"] + "/metrics")).text
        total = 0.0
        for line in text.splitlines():
            sample, _, value = line.rpartition(" ")
            has_labels = all(f'{key}="{wanted}"' in sample for key, wanted in labels.items())
            if sample.partition("{")[0] == f"homing_{name}" and has_labels:
                total += float(value)
        return total

    async def is_up(self, router: Part) -> bool:
        return await self.metric(router, "shared_state_up") == 1.0

    async def is_down(self, router: Part) -> bool:
        return await self.metric(router, "shared_state_up") == 0.0

    async def ask(self, router: Part, prompt: str, session: str, *, max_tokens: int = 4) -> httpx.Response:
        """One completion."""
        body = {"model": "needle", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        url = router.words["data"] + "/v1/completions"
        return await self.http.post(url, json=body, headers={"x-session-id": session})

    async def takes_home(self, router: Part, prompt: str, session: str, *, like: httpx.Response) -> bool:
        """Whether it would go by the session's home, and where ``like`` went: news need a moment, which no client that
        has read its answer leaves them on an idle machine. Or to its decode rank by itself, which may be the cheaper
        where the machine kept the prefill rank from working, and with it what it is believed to be able to do.
        """
        body = {"model": "needle", "prompt": prompt, "max_tokens": 4}
        question = {"body": body, "headers": {"x-session-id": session}, "endpoint": "completions"}
        answer = await self.http.post(router.words["admin"] + "/admin/explain", json=question)
        assert answer.status_code == 200, answer.text
        (attempt,) = answer.json()["attempts"]
        went = (rank(like), like.headers.get("x-homing-prefill-rank"))
        goes = (attempt["rank"], attempt["prefill_rank"])
        return (
            goes == (went[0], None) if attempt["reason"] == "bypass" else (*goes, attempt["reason"]) == (*went, "home")
        )

    async def ask_again(self, router: Part, prompt: str, session: str, *, after: httpx.Response) -> httpx.Response:
        """The next turn at another router, once that knows where the last one went."""
        await until(lambda: self.takes_home(router, prompt, session, like=after))
        return await self.ask(router, prompt, session)


def rank(answer: httpx.Response) -> str:
    """Where it was served."""
    assert answer.status_code == 200, answer.text
    return f"{answer.headers['x-homing-worker']}/{answer.headers['x-homing-rank']}"


async def until(holds: Callable[[], Any], seconds: float = 60) -> None:
    """Wait for an awaitable condition; what cannot be asked does not hold."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if await holds():
                return
        assert time.monotonic() < end, "did not become true in time"
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as running:
        yield running
