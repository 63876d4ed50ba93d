"""The one place where the router's parts are made and joined, started and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, cast

import httpx
import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from structlog.typing import FilteringBoundLogger

from router.access import Access
from router.addresses import is_loopback
from router.admin.api import create_admin
from router.admin.explain import sampled_log
from router.core.load import explains_silence
from router.core.types import RankStatus
from router.core.usable import Geometry
from router.core.ways import can_spare
from router.errors import ConfigError
from router.fleet.chores import do_chores
from router.fleet.decisions import DecisionLog
from router.fleet.fleet import Fleet
from router.fleet.registry import Registry
from router.fleet.worker import Hooks, Worker
from router.proxy.brain import RouterBrain
from router.proxy.models import Census
from router.proxy.plane import DataPlane
from router.proxy.types import Brain
from router.proxy.worker_tokens import WorkerTokenizer
from router.reload import changes, reloaded_routing
from router.settings import Settings
from router.signals import Signals
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import make_tracing
from router.tls import Certificate
from router.tokenizers import learn_from_worker, use_local

if TYPE_CHECKING:
    from router.fleet.redis_state import RedisState


#: New objects before a collection, and collections before an older generation's.
_COLLECT_AFTER = (20_000, 50, 50)


def _allow_many_files() -> None:
    """As many open files as the system lets this process have: every client and every worker's connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems name more than they allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(settings: Settings, *, reread: Callable[[], Settings]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 0, 1 for a port that is taken, 2 for a bad setting.

    ``reread`` says what the settings are now; it is asked at a reload and may raise ``ConfigError``.
    """
    _allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, reread))


async def _serve(settings: Settings, reread: Callable[[], Settings]) -> int:
    log = make_logger(level=settings.log_level, form=settings.log_format)
    signals = Signals()
    async with _client(settings) as client:
        try:
            router = Router(settings, reread=reread, client=client, log=log)
            await router.start()
        except ConfigError as error:
            return _refuse(str(error), status=2)
        except OSError as error:
            return _refuse(str(error), status=1)
        # What lives now lives on, and requests leave next to nothing behind: looking often finds nothing.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_COLLECT_AFTER)
        with signals.watched():
            await router.run(signals)
    log.info("router stopped")
    return 0


def _refuse(sentence: str, *, status: int) -> int:
    print(f"homing router: {sentence}", file=sys.stderr)  # noqa: T201
    return status


def _client(settings: Settings) -> httpx.AsyncClient:
    """For probes and questions to workers; requests of clients take another way."""
    return httpx.AsyncClient(timeout=settings.probes.timeout_seconds, trust_env=False, follow_redirects=False)


class Router:
    """A whole router. ``start`` binds both doors; ``run`` serves until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        *,
        reread: Callable[[], Settings],
        client: httpx.AsyncClient,
        log: FilteringBoundLogger,
    ) -> None:
        """Make and join the parts. Raises ``ConfigError`` for files that cannot be used."""
        self._settings = settings
        self._reread = reread
        self._reloading = asyncio.Lock()
        self._log = log
        self._access = Access(settings)
        if self._access.worker_key is not None:
            client.auth = self._access.worker_key
        self._tracing = make_tracing(settings.tracing, version=_version())
        prometheus = CollectorRegistry()
        ProcessCollector(registry=prometheus)
        PlatformCollector(registry=prometheus)
        metrics = Metrics(prometheus)
        metrics.build_info.labels(_version()).set(1)

        self._shared = _shared_state(settings, metrics, log)
        fleet = Fleet(settings.routing, metrics, clock=time.monotonic, shared=self._shared)
        self._fleet = fleet
        decisions = DecisionLog(on_close=sampled_log(log, ratio=settings.routing.log_decisions_ratio))
        brain = RouterBrain(fleet, settings=settings.routing, metrics=metrics, decisions=decisions)
        self._brain = brain
        use_local(brain, settings.models, log)
        for model in settings.models:
            fleet.set_geometry(model.name, Geometry(chunk_tokens=model.chunk_tokens, eagle=model.eagle))
        if settings.routing.worker_tokenize_seconds:
            brain.ask_workers(
                WorkerTokenizer(
                    client,
                    url_of=fleet.url_of,
                    clock=time.monotonic,
                    timeout_seconds=settings.routing.worker_tokenize_seconds,
                )
            )

        async def learn(worker: Worker) -> None:
            await learn_from_worker(worker, brain, client, log)

        def is_at_work(worker: Worker) -> bool:
            now = time.monotonic()
            members = map(fleet.member, worker.slots)
            return any(explains_silence(member.load, member.pace, now=now) for member in members)

        self._registry = Registry(
            fleet,
            settings.probes,
            client=client,
            metrics=metrics,
            log=log,
            clock=time.monotonic,
            wall_clock=time.time,
            hooks=Hooks(
                on_worker_ready=learn,
                has_progress=is_at_work,
                encode=brain.token_ids,
                promised=fleet.promised_tokens,
                can_spare=lambda slots, leaving: can_spare(fleet.view, slots, leaving),
            ),
        )
        fleet.on_unreachable = self._registry.doubt
        fleet.on_failed_forecast = lambda rank, error: log.error(
            "nothing is foretold of a full cache until it is cleared", rank=str(rank), exc_info=error
        )
        for spec in settings.workers:
            self._registry.add(spec)
        brain.count_workers(lambda: _census(self._registry))
        # The plane hands back only what this brain prepared, which a protocol with a plain method cannot say.
        self._plane = DataPlane(
            cast("Brain", brain),
            metrics,
            settings.server,
            settings.upstream,
            log,
            keyring=self._access.keyring,
            tls=self._access.data_tls.context if self._access.data_tls else None,
            tracing=self._tracing,
            queue_settings=settings.queue,
            worker_key_line=self._access.worker_key.line if self._access.worker_key else None,
        )
        admin = create_admin(
            self._registry,
            fleet,
            metrics,
            policy=lambda: self._settings.routing.policy,
            version=_version(),
            keyring=self._access.keyring,
            explainer=brain,
            reload=self.reload,
            names=settings.admin.names if is_loopback(settings.admin.host) else None,
        )
        self._admin = _AdminServer(admin, self._access.admin_tls)
        self._admin_socket: socket.socket | None = None
        self._data_port = 0

    async def start(self) -> None:
        """Bind both doors. Raises ``OSError`` with a sentence that names the address and the option."""
        server, admin = self._settings.server, self._settings.admin
        with _address_named(admin.host, admin.port, option="--admin-port"):
            self._admin_socket = _bind(admin.host, admin.port)
        try:
            with _address_named(server.host, server.port, option="--port"):
                self._data_port = await self._plane.start()
        except OSError:
            self._admin_socket.close()
            raise

    async def run(self, signals: Signals) -> None:
        """Serve, then stop in order: not ready, answers end, the admin plane last."""
        assert self._admin_socket is not None, "start first"
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._registry.run())
            sharing = tasks.create_task(self._shared.run(self._fleet, self._registry)) if self._shared else None
            admin = tasks.create_task(self._admin.serve(sockets=[self._admin_socket]))
            reloading = tasks.create_task(self._reload_on_hangup(signals))
            chores = tasks.create_task(do_chores(self._fleet.let_go, log=self._log))
            self._announce()  # both doors are bound: who comes now waits, but is not refused
            await signals.stop.wait()
            await self._drain(signals)
            self._admin.should_exit = True
            await admin
            watching.cancel()
            reloading.cancel()
            chores.cancel()
            if sharing is not None:
                sharing.cancel()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _reload_on_hangup(self, signals: Signals) -> None:
        while True:
            await signals.hangup.wait()
            signals.hangup.clear()
            await self.reload()

    async def reload(self) -> list[str]:
        """Take over keys, certificates, workers and policy as they are now.

        Returns what could not be taken over, a sentence each: there the old stays in force.
        """
        async with self._reloading:
            complaints = self._access.reload()
            try:
                complaints += await self._take_over(self._reread())
            except ConfigError as error:
                complaints.append(str(error))
        for complaint in complaints:
            self._log.error("not taken over: the old stays in force", cause=complaint)
        if not complaints:
            self._log.info("reloaded")
        return complaints

    async def _take_over(self, after: Settings) -> list[str]:
        found = changes(self._settings, after)
        complaints = [f"{key} takes effect with a new process only" for key in found.ignored]
        if found.leaving or found.joining:
            refused = await self._registry.change(leaving=found.leaving, joining=found.joining)
            complaints += map(str, refused.values())
        routing = reloaded_routing(self._settings, after)
        if routing != self._settings.routing:
            self._brain.use(routing)
        self._settings = self._settings.model_copy(update={"workers": after.workers, "routing": routing})
        return complaints

    async def _drain(self, signals: Signals) -> None:
        self._plane.retire()
        if unready_seconds := self._settings.server.unready_seconds:
            self._log.info("not ready: load balancers may look elsewhere", for_seconds=unready_seconds)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(signals.hurry.wait(), unready_seconds)
        seconds = self._settings.server.shutdown_seconds
        self._log.info("stopping: answers under way may end", within_seconds=seconds)
        draining = asyncio.ensure_future(self._plane.drain(seconds))
        hurrying = asyncio.ensure_future(signals.hurry.wait())
        await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not draining.done():
            draining.cancel()
            await asyncio.wait([draining])
            await self._plane.drain(0)
        else:
            await draining

    def _announce(self) -> None:
        assert self._admin_socket is not None
        if self._access.keyring is None and not is_loopback(self._settings.admin.host):
            self._log.warning("the admin plane is open to others without a key; see auth.keys_file")
        if not self._settings.workers and self._shared is None:
            self._log.warning("no worker is named: none serves until --worker or POST /admin/workers names one")
        data = _shown(self._settings.server.host, self._data_port)
        admin = _shown(self._settings.admin.host, self._admin_socket.getsockname()[1])
        data, admin = (
            f"{'https' if tls else 'http'}://{address}"
            for tls, address in ((self._access.data_tls, data), (self._access.admin_tls, admin))
        )
        print(f"homing router ready data={data} admin={admin}", flush=True)  # noqa: T201


def _shared_state(settings: Settings, metrics: Metrics, log: FilteringBoundLogger) -> RedisState | None:
    """Where replicas share state; None: this router alone. Raises ``ConfigError``."""
    if settings.shared.redis_url is None:
        metrics.shared_up.labels("embedded").set(1)
        metrics.shared_replicas.set(1)
        return None
    try:
        from router.fleet.redis_state import RedisState
    except ModuleNotFoundError as error:
        raise ConfigError("shared.redis_url needs the package redis: pip install 'homing[redis]'") from error
    try:
        return RedisState(
            settings.shared,
            max_sessions=settings.routing.max_sessions,
            idle_seconds=settings.routing.session_idle_seconds,
            replica=secrets.token_hex(8),
            metrics=metrics,
            log=log,
            clock=time.monotonic,
        )
    except ValueError:  # its words may be a piece of the password
        raise ConfigError(
            "shared.redis_url cannot be used; it looks like redis://[user:password@]host:6379/0"
        ) from None


def _census(registry: Registry) -> Census:
    workers = registry.workers()
    return Census(len(workers), sum(worker.status is RankStatus.DOWN for worker in workers))


class _AdminServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the router stops it when the data plane has ended."""

    def __init__(self, app: FastAPI, tls: Certificate | None) -> None:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        config.load()
        if tls is not None:
            config.ssl = tls.context
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _address_named(host: str, port: int, *, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if "in use" in reason:
            reason = f"the port is in use; choose another with {option}"
        raise OSError(f"cannot listen on {_shown(host, port)}: {reason}") from error


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _version() -> str:
    try:
        return version("homing")
    except PackageNotFoundError:
        return "0"
