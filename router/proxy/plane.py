"""The data plane: listens, routes paths, answers what is the router's own to answer, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import ssl
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any, Final, cast
from urllib.parse import unquote_to_bytes

from structlog.typing import FilteringBoundLogger

from router.core.keys import Keyring, Role
from router.errors import Dialect, MethodNotAllowed, NotFound, RequestError
from router.proxy.arrival import Arrivals
from router.proxy.client_sockets import accept_all
from router.proxy.exchange import Exchange
from router.proxy.forwarder import Forwarder
from router.proxy.instruments import Instruments
from router.proxy.limits import ConnectionLimits, connections_allowed
from router.proxy.server import ClientConnection
from router.proxy.tls_door import TlsDoor
from router.proxy.types import Brain
from router.proxy.upstream import UpstreamPool
from router.settings import QueueSettings, ServerSettings, UpstreamSettings
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Tracing
from router.wire import headers as names
from router.wire.http1 import HttpRequest, RequestHead, RequestReader
from router.wire.known_heads import KnownHeads
from router.wire.openai import Endpoint

_BACKLOG: Final = 4096
#: A few turns of the loop, in which cancelled tasks and closed connections end.
_HANGING_UP_SECONDS: Final = 0.02
#: How long the last words of a drain may take to be sent.
_LAST_WORDS_SECONDS: Final = 1.0
#: Clients that are turned away, and may still be sending: so many are waited for, lest a reset overtake the answer.
_MAX_LINGERING: Final = 64


class Own(StrEnum):
    """What the router answers itself. The value is a metric label."""

    MODELS = "models"
    MODEL = "model"
    HEALTH = "health"
    READY = "readyz"
    LIVE = "livez"


ROUTES: Final[dict[bytes, Endpoint | Own]] = {
    b"/v1/chat/completions": Endpoint.CHAT,
    b"/v1/completions": Endpoint.COMPLETIONS,
    b"/v1/responses": Endpoint.RESPONSES,
    b"/v1/messages": Endpoint.MESSAGES,
    b"/v1/messages/count_tokens": Endpoint.COUNT_TOKENS,
    b"/v1/embeddings": Endpoint.EMBEDDINGS,
    b"/v1/rerank": Endpoint.RERANK,
    b"/tokenize": Endpoint.TOKENIZE,
    b"/v1/models": Own.MODELS,
    b"/health": Own.HEALTH,
    b"/readyz": Own.READY,
    b"/livez": Own.LIVE,
}
#: ``GET /v1/models/NAME``. Names may hold slashes, and percent signs in place of them.
_MODEL: Final = b"/v1/models/"
#: Answered without a key: load balancers and kubelets have none.
_PROBES: Final = frozenset({Own.HEALTH, Own.READY, Own.LIVE})


class DataPlane:
    """The door for clients. One event loop; ``start``, then ``drain``."""

    def __init__(
        self,
        brain: Brain,
        metrics: Metrics,
        server_settings: ServerSettings,
        upstream_settings: UpstreamSettings,
        log: FilteringBoundLogger,
        *,
        keyring: Keyring | None = None,
        tls: ssl.SSLContext | None = None,
        tracing: Tracing | None = None,
        queue_settings: QueueSettings | None = None,
        worker_key_line: Callable[[], bytes] | None = None,
    ) -> None:
        """``keyring`` None: everybody may come in. ``worker_key_line`` is for where clients' own do not go on."""
        self.settings = server_settings
        self.known_heads: KnownHeads[RequestHead] = KnownHeads()
        self._keyring = keyring
        self._tls = tls
        self._tracing = tracing
        self._limits = ConnectionLimits(
            total=server_settings.max_connections or connections_allowed(),
            per_address=server_settings.max_connections_per_address,
        )
        self._addresses: dict[ClientConnection, str] = {}
        self._brain = brain
        self._log = log
        self._instruments = Instruments(
            metrics,
            endpoints={path: route.value for path, route in ROUTES.items()},
            connections=lambda: len(self._clients),
        )
        self._pool = UpstreamPool(upstream_settings)
        rules = names.ForwardingRules.of(
            credentials=upstream_settings.forward_credentials,
            forward=upstream_settings.forward_headers,
            drop=upstream_settings.drop_headers,
            traced=tracing is not None,
        )
        forwarder = Forwarder(
            brain,
            self._pool,
            settings=upstream_settings,
            instruments=self._instruments,
            log=log,
            own_lines=None if rules.passes(names.AUTHORIZATION) else worker_key_line,
        )
        self._arrivals = Arrivals(
            forwarder,
            settings=queue_settings or QueueSettings(),
            rules=rules,
            log=log,
        )
        metrics.queued.set_function(lambda: self._arrivals.queued)
        self._clients: set[ClientConnection] = set()
        self._turned_away: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._listening: list[int] = []
        self._draining = self._retired = False
        self._empty: asyncio.Event | None = None
        # Ids say no more than that they differ, from those of other routers too.
        self._id_prefix = f"req-{secrets.token_hex(8)}-".encode()
        self._ids = itertools.count(1)

    async def start(self) -> int:
        """Listen; returns the port. Raises ``OSError`` if the address cannot be had."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            partial(self._open, self._tls), self.settings.host, self.settings.port, backlog=_BACKLOG
        )
        # Not a tuple, as is declared: uvloop's is a list, and what is compiled would take it for what is declared.
        sockets = list(cast("Any", self._server).sockets)
        self._listening = [listening.fileno() for listening in sockets]
        port: int = sockets[0].getsockname()[1]
        return port

    def _open(self, tls: ssl.SSLContext | None) -> asyncio.Protocol:
        """What speaks with a client that connects."""
        if tls is None:
            return cast("asyncio.Protocol", ClientConnection(self))
        return TlsDoor(
            tls,
            partial(ClientConnection, self),
            admit=self._admit_handshake,
            release=self._limits.release,
            seconds=self.settings.header_timeout_seconds,
        )

    def retire(self) -> None:
        """Be ready no more, and serve whoever comes all the same until ``drain``, for one answer on each connection."""
        self._retired = True
        for client in tuple(self._clients):
            client.part()

    async def drain(self, seconds: float) -> None:
        """Stop listening and let answers end for ``seconds``; what is left then ends with an error."""
        self._retired = self._draining = True
        clients = tuple(self._clients)
        await self._stop_listening()
        for client in clients:
            client.drain()
        await self._until_empty(seconds)
        for client in tuple(self._clients):
            client.stop()
        await asyncio.sleep(_HANGING_UP_SECONDS)
        for client in tuple(self._clients):
            client.close()
        await self._until_empty(_LAST_WORDS_SECONDS)
        for client in tuple(self._clients):
            client.abort()
        self._pool.close()
        await asyncio.sleep(_HANGING_UP_SECONDS)

    async def _stop_listening(self) -> None:
        """Take in whoever the system has connected already, whom the end of the listener would cut off."""
        if self._server is None:
            return
        listening, self._listening = self._listening, []  # a second drain finds none
        connected = [each for number in listening for each in accept_all(number)]
        self._server.close()
        loop = asyncio.get_running_loop()
        for each in connected:
            await loop.connect_accepted_socket(partial(self._open, self._tls), each)

    async def _until_empty(self, seconds: float) -> None:
        if not self._clients:
            return
        self._empty = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._empty.wait()

    @property
    def clients(self) -> frozenset[ClientConnection]:
        """The clients connected now."""
        return frozenset(self._clients)

    @property
    def open_connections(self) -> tuple[int, int]:
        """Connections to clients and to workers."""
        return len(self._clients), self._pool.open_connections

    # --- called by connections ------------------------------------------------------------------

    def entered(self, client: ClientConnection) -> None:
        address = client.address
        refusal = self._limits.admit(address)
        if refusal is not None:
            self._instruments.error(refusal.code)
            lingers = len(self._turned_away) < _MAX_LINGERING
            if lingers:
                self._turned_away.add(client)
            client.turn_away(refusal, lingers=lingers)
            return
        self._addresses[client] = address
        self._clients.add(client)
        if self._draining:
            client.drain(waits=True)
        elif self._retired:
            client.part()

    def _admit_handshake(self, address: str) -> bool:
        refusal = self._limits.admit(address)
        if refusal is not None:
            self._instruments.error(refusal.code)
        return refusal is None

    def left(self, client: ClientConnection, *, midway: bool) -> None:
        if client not in self._clients:
            self._turned_away.discard(client)
            return
        self._clients.remove(client)
        self._limits.release(self._addresses.pop(client))
        if self._empty is not None and not self._clients:
            self._empty.set()
        if midway:
            self._instruments.disconnects.inc()

    def screen(self, head: RequestHead) -> RequestError | None:
        """Who has no key is told so before the body has been read."""
        if self._keyring is None or ROUTES.get(head.path) in _PROBES:
            return None
        try:
            self._keyring.admit(names.presented_keys(head.headers), Role.DATA)
        except RequestError as error:
            return error
        return None

    def refused(self, error: RequestError, reader: RequestReader) -> tuple[Dialect, bytes]:
        self._instruments.error(error.code)
        path = reader.target.partition(b"?")[0]
        route = ROUTES.get(path)
        self._instruments.request(b"" if route is None else path, error.status, seconds=0.0)
        dialect = route.dialect if isinstance(route, Endpoint) else Dialect.OPENAI
        given = names.acceptable_request_id(names.first(reader.headers, names.REQUEST_ID))
        return dialect, names.id_line(given or self._new_id())

    def serve(self, request: HttpRequest, client: ClientConnection) -> None:
        """Answer one request, now or later."""
        head = request.head
        path = head.path
        route = ROUTES.get(path)
        exchange = Exchange(
            request,
            client,
            self._instruments,
            request_id=head.request_id or self._new_id(),
            path=path if route is not None else b"",
            endpoint=route if type(route) is Endpoint else None,
        )
        if exchange.endpoint is not None and self._tracing is not None:
            exchange.trace = self._tracing.begin(
                head.method, path.decode(), head.headers, request_id=exchange.request_id
            )
        elif route is None and path.startswith(_MODEL):
            route = Own.MODEL
        try:
            self._answer(exchange, route)
        except RequestError as error:
            exchange.fail(error)

    def _answer(self, exchange: Exchange, route: Endpoint | Own | None) -> None:
        head = exchange.request.head
        method = head.method
        if self._keyring is not None and route not in _PROBES:
            presented = names.presented_keys(head.headers)
            key = self._keyring.admit(presented, Role.DATA)
            exchange.tenant, exchange.priority = key.tenant, key.priority
        if route is None:
            if method == "OPTIONS" and head.target == b"*":
                return self._answer_empty(exchange, allow="GET, HEAD, OPTIONS, POST")
            raise NotFound("There is no such path: the API is under /v1, and /metrics and /admin on the admin port.")
        if exchange.endpoint is not None and method == "POST":
            return self._arrivals.take(exchange)
        allowed = ("POST", "OPTIONS") if isinstance(route, Endpoint) else ("GET", "HEAD", "OPTIONS")
        if method == "OPTIONS":
            return self._answer_empty(exchange, allow=", ".join(allowed))
        if method not in allowed:
            error = MethodNotAllowed(f"The method {method} is not allowed here.")
            error.headers = (("allow", ", ".join(allowed)),)
            raise error
        assert isinstance(route, Own)
        return self._answer_own(exchange, route)

    def _answer_own(self, exchange: Exchange, route: Own) -> None:
        ready = self._brain.ready() and not self._retired
        exchange.status = 200
        match route:
            case Own.MODELS:
                body = self._brain.model_list()
            case Own.MODEL:
                body = self._brain.model_card(_model_name(exchange.request.head.target))
            case Own.READY if not ready:
                exchange.status = 503
                reason = "draining" if self._retired else "no worker can take a request"
                body = json.dumps({"status": "not ready", "reason": reason}).encode()
            case Own.READY | Own.LIVE:
                body = b'{"status": "ok"}'
            case Own.HEALTH:
                body = json.dumps({"status": "ok", "ready": ready}).encode()
        exchange.client.answer(exchange.status, b"content-type: application/json\r\n" + exchange.id_line, body)
        exchange.finish()

    def _answer_empty(self, exchange: Exchange, *, allow: str) -> None:
        exchange.status = 204
        lines = f"allow: {allow}\r\n".encode() + exchange.id_line
        exchange.client.start(b"HTTP/1.1 204 No Content\r\n", lines, has_length=True)
        exchange.client.end()
        exchange.finish()

    def _new_id(self) -> bytes:
        return b"%b%d" % (self._id_prefix, next(self._ids))


def _model_name(target: bytes) -> str:
    name = unquote_to_bytes(target.partition(b"?")[0].removeprefix(_MODEL))
    return name.decode("utf-8", "replace")
