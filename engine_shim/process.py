"""The life of a shim's process: it serves, says so, and ends when it is told to."""

from __future__ import annotations

import asyncio
import functools
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
import uvicorn

from engine_shim.engine import Engine
from engine_shim.server import Handing, ServedModel, create_app
from engine_shim.settings import ShimSettings

log = structlog.get_logger(__name__)
#: Idle connections of a router's pool stay open this long.
_KEEPALIVE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Shim:
    """A shim that is ready to serve: its door, its model and its ranks."""

    settings: ShimSettings
    door: socket.socket
    model: ServedModel
    engines: tuple[Engine, ...]
    handing: Handing | None = None

    @property
    def address(self) -> str:
        """Where HTTP is served, host:port."""
        host, port = self.door.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def ready_line(self) -> str:
        """One line of ``name=value`` for whoever started the process; ports chosen by the system are in it."""
        line = f"homing shim ready http={self.address} model={self.model.name} ranks={len(self.engines)}"
        endpoints = [engine.publisher.endpoints for engine in self.engines if engine.publisher]
        if endpoints:
            line += " events=" + ",".join(str(each.port) for each in endpoints)
            line += " replay=" + ",".join(str(each.replay_port) for each in endpoints)
        if self.handing is not None:
            line += f" role={self.handing.role}"
            if self.handing.transfer.port:
                line += f" bootstrap={self.handing.transfer.port}"
        return line


def run(shim: Shim) -> None:
    """Serve until SIGTERM or SIGINT; say on stdout when requests are taken."""
    app = create_app(shim.model, shim.engines, max_body_bytes=shim.settings.max_body_bytes, handing=shim.handing)
    grace_seconds = shim.settings.shutdown_seconds
    config = uvicorn.Config(
        app,
        http="httptools",
        log_config=None,
        access_log=False,
        timeout_keep_alive=_KEEPALIVE_SECONDS,
        # Engines are stopped when the grace is over; this is for a client that does not read its answer's end.
        timeout_graceful_shutdown=math.ceil(grace_seconds) + 2,
    )
    server = _Server(config, on_ready=functools.partial(_announce, shim))
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(server, shim, grace_seconds))


class _Server(uvicorn.Server):
    """uvicorn, but signals are ours: it would end the process by the signal, after a clean stop too."""

    def __init__(self, config: uvicorn.Config, *, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: _Server, shim: Shim, grace_seconds: float) -> None:
    loop = asyncio.get_running_loop()

    def end_running() -> None:
        for engine in shim.engines:
            engine.stop()

    def leave() -> None:
        """First signal: take nothing new and let answers finish. Second: end them."""
        if server.should_exit:
            end_running()
            return
        log.info("stopping", running=sum(engine.load for engine in shim.engines))
        server.should_exit = True
        loop.call_later(grace_seconds, end_running)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    await server.serve(sockets=[shim.door])


def _announce(shim: Shim) -> None:
    print(shim.ready_line(), flush=True)  # noqa: T201 - the one line of output, meant for programs
    log.info("ready", address=shim.address, model=shim.model.name, ranks=len(shim.engines))
