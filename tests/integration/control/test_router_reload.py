"""A router that changes while it runs, and one that stops: no request of a client is dropped."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from loadtest.faulty_worker import MODEL, FaultyWorker
from tests.integration.control.test_router_process import Running, homing

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def _workers(count: int) -> AsyncIterator[list[FaultyWorker]]:
    workers = [FaultyWorker(reset_ratio=0.0, rng=random.Random(0)) for _ in range(count)]
    for worker in workers:
        await worker.start()
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.kill()


@asynccontextmanager
async def _router(*arguments: str) -> AsyncIterator[Running]:
    """A router as a process, started and ended without stopping this loop, on which the workers live."""
    ports = ("--port", "0", "--admin-port", "0", "--probes.interval-seconds", "0.2", "--log-level", "debug")
    manager = homing("router", *ports, *arguments)
    running = await asyncio.to_thread(manager.__enter__)
    try:
        yield running
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


def _door(running: Running, name: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=running.words[name], trust_env=False, timeout=30)


def _write(file: Path, *workers: FaultyWorker, policy: str) -> None:
    file.write_text(json.dumps({"workers": [worker.url for worker in workers], "routing": {"policy": policy}}))


async def _ready(admin: httpx.AsyncClient, *workers: FaultyWorker) -> None:
    """Wait until these workers and no others are known and ready."""
    expected = {worker.url: "ready" for worker in workers}
    async with asyncio.timeout(60):
        while True:
            known = (await admin.get("/admin/workers")).json()["workers"]
            if {worker["url"]: worker["status"] for worker in known} == expected:
                return
            await asyncio.sleep(0.05)


async def test_workers_and_policy_change_under_load(tmp_path: Path) -> None:
    """SIGHUP and the admin call take over workers and policy, but no bad file; all requests meanwhile are answered."""
    config = tmp_path / "router.yaml"
    async with _workers(3) as (first, second, third):
        _write(config, first, second, policy="affinity")
        async with (
            _router("--config", str(config)) as running,
            _door(running, "data") as data,
            _door(running, "admin") as admin,
        ):
            await _ready(admin, first, second)
            statuses: list[int] = []
            done = asyncio.Event()

            async def ask() -> None:
                while not done.is_set():
                    answer = await data.post("/v1/chat/completions", json={**ASK, "stream": len(statuses) % 2 == 0})
                    statuses.append(answer.status_code if "error" not in answer.text else 500)

            asking = [asyncio.create_task(ask()) for _ in range(4)]
            _write(config, second, third, policy="round_robin")
            running.process.send_signal(signal.SIGHUP)
            await _ready(admin, second, third)
            assert (await admin.get("/admin/fleet")).json()["policy"] == "round_robin"

            config.write_text("workers: nonsense")
            refused = await admin.post("/admin/reload")
            assert refused.status_code == 409
            (complaint,) = refused.json()["complaints"]
            assert "workers" in complaint
            await _ready(admin, second, third)

            _write(config, third, policy="round_robin")
            taken = await admin.post("/admin/reload")
            assert (taken.status_code, taken.json()) == (200, {"complaints": []})
            await _ready(admin, third)

            _write(config, first, policy="round_robin")  # every worker is another
            running.process.send_signal(signal.SIGHUP)
            await _ready(admin, first)
            renamed = [{"url": first.url, "id": "renamed"}]
            config.write_text(json.dumps({"workers": renamed, "routing": {"policy": "round_robin"}}))
            assert (await admin.post("/admin/reload")).json() == {"complaints": []}
            async with asyncio.timeout(60):
                while [each["id"] for each in (await admin.get("/admin/workers")).json()["workers"]] != ["renamed"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            typo = [{"url": "http://127.0.0.1:9", "id": "renamed"}]
            config.write_text(json.dumps({"workers": typo, "routing": {"policy": "round_robin"}}))
            assert (await admin.post("/admin/reload")).json() == {"complaints": []}
            down = "nothing listens at http://127.0.0.1:9/v1/models"
            async with asyncio.timeout(60):
                while (await admin.get("/admin/workers")).json()["workers"][0]["reason"] != down:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            shown = (await admin.get("/admin/workers")).json()["workers"]
            assert [(each["status"], each["leaves_after"], each["reason"]) for each in shown] == [
                ("down", None, down),
                ("ready", ["renamed"], "is off the list and serves until renamed can"),
            ]
            done.set()
            await asyncio.gather(*asking)
            assert len(statuses) > 10
            assert set(statuses) == {200}
            assert sum(third.answered.values()) > 0
            _, logged = await asyncio.to_thread(running.stop)
            assert (logged.count("not taken over"), logged.count("reloaded")) == (1, 5)  # of six


async def test_not_ready_first_then_no_more_then_the_end() -> None:
    """After SIGTERM /readyz says no while new clients are served; a running stream ends whole; exit status 0."""
    async with _workers(1) as (worker,):
        options = ("--worker", worker.url, "--server.unready-seconds", "2")
        async with _router(*options) as running, _door(running, "data") as data, _door(running, "admin") as admin:
            await _ready(admin, worker)
            assert (await data.get("/readyz")).status_code == 200
            running.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            async with asyncio.timeout(20):
                while (await data.get("/readyz")).status_code == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            late = await data.post("/v1/chat/completions", json={**ASK, "stream": True})
            assert late.status_code == 200
            assert late.text.endswith("data: [DONE]\n\n")
            status, _ = await asyncio.to_thread(running.wait)
            assert status == 0
            assert time.monotonic() - began >= 2
