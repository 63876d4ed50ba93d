"""vLLM's NIXL contract through the router: workers that hand over and pull as the connector's scheduler does.

The rules are written out here after vLLM 0.32. With ``HOMING_VLLM_PYTHON``, an interpreter that has vLLM, the same
requests are put to vLLM's own protocol classes and its own connector (``nixl_peer.py``).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from router.core.types import Handover, Part, WorkerRole
from tests.fakes.fleet_rig import FleetRig
from tests.fakes.proxy_rig import RawAnswer

VLLM = os.environ.get("HOMING_VLLM_PYTHON", "")
BLOCK_IDS = [[1, 2, 3, 4]]
#: What no version of vLLM has yet; numbers that a float would change.
NOVEL = {"x_later": {"n": 2**63 - 1, "nested": [1.5, None, "\u00e9"]}}


class Connector(Protocol):
    """One worker's end of NIXL."""

    async def prefill(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """``kv_transfer_params`` of the answer."""

    async def decode(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """What it pulls, and from where; None: it computes the prompt."""


class Rules:
    """``NixlPullConnectorScheduler`` in short."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._requests = 0

    async def prefill(self, body: dict[str, Any]) -> dict[str, Any] | None:
        assert body["stream"] is False
        assert body.get("max_completion_tokens", body.get("max_tokens")) == 1
        assert (body.get("min_tokens") or 0) <= 1
        assert body.get("stream_options") is None, "refused without stream"
        params = body.get("kv_transfer_params")
        if not params or not params["do_remote_decode"]:
            return None
        assert not params["do_remote_prefill"]
        assert params.get("remote_block_ids") is None, "it would pull from a decode rank"
        self._requests += 1
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": BLOCK_IDS,
            "remote_engine_id": self.name,
            "remote_request_id": f"cmpl-{self._requests}",
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 4,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 53,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    async def decode(self, body: dict[str, Any]) -> dict[str, Any] | None:
        params = body.get("kv_transfer_params")
        if not params or not params.get("do_remote_prefill"):
            return None
        assert not params.get("do_remote_decode")
        assert params["remote_block_ids"]
        return {
            "blocks": params["remote_block_ids"],
            "engine": params["remote_engine_id"],
            "request": params["remote_request_id"],
            "address": [params["remote_host"], params["remote_port"]],
        }


class Peer:
    """The same by vLLM itself."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lock = asyncio.Lock()

    @classmethod
    async def start(cls, role: str, name: str) -> Peer:
        pipe = asyncio.subprocess.PIPE
        script = str(Path(__file__).with_name("nixl_peer.py"))
        nowhere = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            VLLM, script, role, name, stdin=pipe, stdout=pipe, stderr=nowhere
        )
        peer = cls(process)
        assert "ready" in await peer._read()
        return peer

    async def stop(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        told: dict[str, Any] = json.loads(await self._process.stdout.readline())
        assert "error" not in told, told
        return told

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        async with self._lock:
            self._process.stdin.write(json.dumps(body).encode() + b"\n")
            return await self._read()

    async def prefill(self, body: dict[str, Any]) -> dict[str, Any] | None:
        told = await self._ask(body)
        assert (told["max_tokens"], told["stream"]) == (1, False)
        params: dict[str, Any] | None = told["params"]
        return params

    async def decode(self, body: dict[str, Any]) -> dict[str, Any] | None:
        pulls = (await self._ask(body))["pulls"]
        if pulls is None:
            return None
        assert pulls.pop("tokens") == 53
        assert pulls.pop("is_kept_alive"), "the decode rank renews the prefill rank's lease"
        found: dict[str, Any] = pulls
        return found


@dataclass
class Worker:
    """A vLLM server as far as the contract goes: its answers carry what its connector says."""

    role: WorkerRole
    connector: Connector
    novel: bool = False
    heads: list[dict[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    handed: list[dict[str, Any] | None] = field(default_factory=list)
    pulled: list[dict[str, Any] | None] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Worker:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                lines = (line.partition(":") for line in head[1:] if line)
                headers = {name.lower(): value.strip() for name, _, value in lines}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.heads.append(headers)
                self.bodies.append(body)
                try:
                    status, answer = 200, await self._answer(body)
                except (AssertionError, KeyError) as error:
                    self.wrong.append(repr(error))
                    status, answer = 500, {"error": {"message": repr(error)}}
                data = json.dumps(answer).encode()
                writer.write(
                    b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (status, len(data), data)
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = {"id": "cmpl", "choices": [], "usage": {"prompt_tokens": 53, "completion_tokens": 1}}
        if self.role is WorkerRole.DECODE:
            self.pulled.append(await self.connector.decode(body))
            return answer
        handed = await self.connector.prefill(body)
        if handed is not None and self.novel:
            handed |= NOVEL
        self.handed.append(handed)
        return answer | {"kv_transfer_params": handed}


@dataclass
class Rig:
    """A router before one worker of each role."""

    world: FleetRig
    prefill: Worker
    decode: Worker

    async def ask(self, session: str, **fields: object) -> RawAnswer:
        answer = await self.world.ask(session, **fields)
        assert not [*self.prefill.wrong, *self.decode.wrong]
        assert answer.status == 200, answer
        return answer


@asynccontextmanager
async def rig(kind: str, *, sufficient: bool = False, novel: bool = False) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        workers = []
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
            connector: Connector = Rules(role.value)
            if kind == "vllm":
                peer = await Peer.start(role.value, role.value)
                stack.push_async_callback(peer.stop)
                connector = peer
            workers.append(await stack.enter_async_context(Worker(role, connector, novel)))
        world = FleetRig(first_byte_seconds=20.0)
        for worker in workers:
            world.add_rank(worker.port, part=Part(worker.role, Handover.PARAMS, sufficient))
        await world.start()
        try:
            yield Rig(world, *workers)
        finally:
            await world.plane.drain(0)


KINDS = [
    "rules",
    pytest.param("vllm", marks=pytest.mark.skipif(not VLLM, reason="set HOMING_VLLM_PYTHON")),
]
ASKED = [
    {"max_tokens": 50},
    {"max_completion_tokens": 50, "max_tokens": 40, "min_tokens": 5},
    {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5},
    {},
]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_prefill_rank_hands_over_is_what_the_decode_rank_pulls(kind: str) -> None:
    """Every request: the blocks of its own prefill, from its own engine, and all that was said of them, verbatim; the
    rest of the body is the client's. Both ranks are given the same request id.
    """
    async with rig(kind, novel=True) as found:
        for number, fields in enumerate(ASKED):
            answer = await found.ask(f"s{number}", **fields)
            handed, pulled, body = found.prefill.handed[-1], found.decode.pulled[-1], found.decode.bodies[-1]
            assert handed is not None
            assert body["kv_transfer_params"] == handed
            assert body["kv_transfer_params"]["x_later"] == NOVEL["x_later"]
            assert pulled == {
                "blocks": BLOCK_IDS,
                "engine": handed["remote_engine_id"],
                "request": handed["remote_request_id"],
                "address": [handed["remote_host"], handed["remote_port"]],
            }
            del body["kv_transfer_params"]
            assert body == {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
            ids = {worker.heads[-1]["x-request-id"] for worker in (found.prefill, found.decode)}
            assert ids == {answer.headers["x-request-id"]}
        assert len({handed["remote_request_id"] for handed in found.prefill.handed if handed}) == len(ASKED)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_decode_rank_by_itself_pulls_nothing(kind: str) -> None:
    """Whatever the client says of a prefill rank: it does not pull from a stranger."""
    stale = await Rules("evil").prefill({"stream": False, "max_tokens": 1, "kv_transfer_params": _ANNOUNCED})
    async with rig(kind, sufficient=True) as found:
        found.world.fleet.remove_rank(0)
        answer = await found.ask("s", max_tokens=5, kv_transfer_params=stale)
        assert answer.headers["x-homing-reason"] == "degraded"
        assert found.decode.pulled == [None]
        assert not found.prefill.bodies


_ANNOUNCED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_prefill_is_announced_as_vllms_own_proxy_does(kind: str) -> None:
    """A client's stale parameters do not reach it either, though they would have it pull from a decode rank."""
    stale = {"do_remote_decode": True, "remote_block_ids": [[9]], "remote_engine_id": "x"}
    async with rig(kind) as found:
        await found.ask("s", max_tokens=5, kv_transfer_params=stale)
        assert found.prefill.bodies[-1]["kv_transfer_params"] == _ANNOUNCED
