"""Workers that ask for a key: a router that has it in a file shows it to them, and to nobody else."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from router.core.keys import Key, Keyring, digest_of
from router.errors import ConfigError, WorkerError
from router.fleet.worker_api import describe
from router.settings import UpstreamSettings, WorkerSpec
from router.worker_key import WorkerKey
from tests.fakes.control_worker import ControlWorker, as_json
from tests.fakes.fault_worker import FaultWorker, Received, answer
from tests.fakes.proxy_rig import rig, target, until
from tests.integration.control.test_router_process import Running, homing

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
OLD, NEW = "worker-key-1", "worker-key-2"


async def _status(running: Running, wanted: str) -> str:
    """Wait until the only worker has this status; the reason it gives."""
    async with (
        httpx.AsyncClient(base_url=running.words["admin"], trust_env=False, timeout=30) as admin,
        asyncio.timeout(60),
    ):
        while True:
            (worker,) = (await admin.get("/admin/workers")).json()["workers"]
            if worker["status"] == wanted:
                return str(worker["reason"])
            await asyncio.sleep(0.05)


def _authorizations(request: Received) -> list[str]:
    lines = (line.partition(": ") for line in request.head.decode().split("\r\n"))
    return [value for name, _, value in lines if name.lower() == "authorization"]


async def _ask(running: Running) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.words["data"], trust_env=False, timeout=30) as data:
        return await data.post("/v1/chat/completions", json=ASK, headers={"authorization": "Bearer a-clients-own"})


async def test_a_router_with_the_key(tmp_path: Path) -> None:
    """It finds the worker ready, is answered, takes a new key at SIGHUP but no bad one, and writes none of them out."""
    file = tmp_path / "worker.key"
    file.write_text(OLD + "\n")
    async with ControlWorker({"/v1/chat/completions": as_json({"choices": []})}) as worker:
        worker.key = OLD
        ports = ("--port", "0", "--admin-port", "0", "--probes.interval-seconds", "0.2", "--log-level", "debug")
        manager = homing("router", *ports, "--worker", worker.url, "--upstream.api-key-file", str(file))
        running = await asyncio.to_thread(manager.__enter__)
        try:
            await _status(running, "ready")
            assert (await _ask(running)).status_code == 200
            file.write_text("two words")
            running.process.send_signal(signal.SIGHUP)
            await until(lambda: "worker.key must hold one key" in running.errors)
            assert (await _ask(running)).status_code == 200
            worker.key = NEW
            assert (await _ask(running)).status_code == 401
            file.write_text(NEW)
            running.process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(20):
                while (await _ask(running)).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            code, logged = await asyncio.to_thread(running.stop)
        finally:
            await asyncio.to_thread(manager.__exit__, None, None, None)
    assert code == 0
    assert "worker.key must hold one key" in logged
    for secret in (OLD, NEW, "two words", "a-clients-own"):
        assert secret not in logged


async def test_without_the_key_it_is_told_what_is_missing() -> None:
    """The worker stays down, with the setting's name in the reason."""
    async with ControlWorker({}) as worker, httpx.AsyncClient() as client:
        worker.key = OLD
        with pytest.raises(WorkerError, match=r"answered 401: it asks for a key \(upstream\.api_key_file\)$"):
            await describe(client, WorkerSpec(url=worker.url))


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, f"Bearer {OLD}"),
        ({"forward_credentials": True}, "Bearer sk-client-1234567"),
        ({"forward_credentials": True, "drop_headers": ("authorization",)}, f"Bearer {OLD}"),
        ({"forward_credentials": True, "forward_headers": ("x-a",)}, f"Bearer {OLD}"),
    ],
)
async def test_the_clients_own_key_or_the_routers(tmp_path: Path, options: dict[str, object], shown: str) -> None:
    """One of them, never both; and where clients' keys go on, none is lent to who brings none."""
    file = tmp_path / "worker.key"
    file.write_text(OLD)
    ring = Keyring([Key("t", digest_of(b"sk-client-1234567"))], secret=b"s")
    upstream = UpstreamSettings.model_validate(options)
    async with (
        FaultWorker() as worker,
        rig(target(worker.port), keyring=ring, upstream=upstream, worker_key_line=WorkerKey(file).line) as it,
    ):
        for header in ({"authorization": "Bearer sk-client-1234567"}, {"x-api-key": "sk-client-1234567"}):
            assert (await it.ask(ASK, headers=header)).status == 200
        bearer, other = map(_authorizations, worker.requests)
    assert bearer == [shown]
    assert other == ([] if shown.endswith("1234567") else [shown])


async def test_the_key_is_the_one_of_the_moment_of_sending(tmp_path: Path) -> None:
    """What has come in under the old one and is sent once there is a new one brings the new one; so does a retry."""
    file = tmp_path / "worker.key"
    file.write_text(OLD)
    key, answers = WorkerKey(file), asyncio.Event()

    def renew(text: str) -> None:
        file.write_text(text)
        key.reload()

    async with (
        FaultWorker([(answers, answer(500, b"{}"))]) as first,
        FaultWorker() as second,
        rig(target(first.port), target(second.port), worker_key_line=key.line) as it,
    ):
        it.brain.preparing = asyncio.Event()
        asking = asyncio.create_task(it.ask(ASK))
        await until(lambda: bool(it.brain.prepared))
        renew(NEW)
        it.brain.preparing.set()
        await until(lambda: bool(first.requests))
        renew("worker-key-3")
        answers.set()
        assert (await asking).status == 200
        shown = [_authorizations(worker.requests[0]) for worker in (first, second)]
    assert shown == [[f"Bearer {NEW}"], ["Bearer worker-key-3"]]


@pytest.mark.parametrize("contents", [b"", b"\n", b"two words", b"one\ntwo", "schlüssel".encode(), None])
def test_a_file_that_holds_no_key(tmp_path: Path, contents: bytes | None) -> None:
    """It is refused by its path alone."""
    file = tmp_path / "worker.key"
    if contents is not None:
        file.write_bytes(contents)
    with pytest.raises(ConfigError) as caught:
        WorkerKey(file)
    assert str(file) in str(caught.value)
    assert "two" not in str(caught.value)


def test_it_is_not_shown_by_accident(tmp_path: Path) -> None:
    """As a log line or a traceback would show it."""
    file = tmp_path / "worker.key"
    file.write_text(OLD)
    assert OLD not in repr(WorkerKey(file))
