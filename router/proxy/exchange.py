"""A client's request on its way through the router, from being read to the end of its answer."""

from __future__ import annotations

from router.errors import Dialect, RequestError
from router.proxy.instruments import Instruments
from router.proxy.server import ClientConnection
from router.telemetry.tracing import Trace
from router.wire import headers as names
from router.wire.http1 import HttpRequest
from router.wire.openai import Endpoint

#: Whose requests are where no API key names a tenant.
TENANT = "default"


class Exchange:
    """One request and its answer. Whoever answers it calls ``finish`` or ``fail``, once.

    ``endpoint`` is None for what the router answers itself, ``trace`` where none is asked for; ``status`` is set when
    the answer begins.
    """

    __slots__ = (
        "_instruments",
        "_path",
        "client",
        "endpoint",
        "request",
        "request_id",
        "started_seconds",
        "status",
        "tenant",
        "trace",
    )

    def __init__(
        self,
        request: HttpRequest,
        client: ClientConnection,
        instruments: Instruments,
        *,
        request_id: bytes,
        path: bytes,
        endpoint: Endpoint | None,
    ) -> None:
        """``path`` is as far as the metrics know it."""
        self.request = request
        self.client = client
        self.request_id = request_id
        self.started_seconds = client.clock()
        self.endpoint = endpoint
        self.tenant = TENANT
        self.trace: Trace | None = None
        self.status = 0
        self._instruments = instruments
        self._path = path
        instruments.inflight += 1

    @property
    def dialect(self) -> Dialect:
        """In whose shape the client is told of errors."""
        return self.endpoint.dialect if self.endpoint is not None else Dialect.OPENAI

    @property
    def id_line(self) -> bytes:
        """The header that tells the client its request's id."""
        return b"%b: %b\r\n" % (names.REQUEST_ID, self.request_id)

    def fail(self, error: BaseException) -> None:
        """Answer with an error, unless an answer has begun: then the connection breaks off."""
        known = error if isinstance(error, RequestError) else RequestError("")
        self._instruments.error(known.code)
        if self.trace is not None:
            self.trace.failed(known.code)
        if not self.client.begun:
            self.status = known.status
            self.client.answer_error(error, lines=self.id_line, dialect=self.dialect)
        self.finish()

    def finish(self) -> None:
        """It is over: count it, and let the connection go on."""
        instruments = self._instruments
        instruments.inflight -= 1
        instruments.request(self._path, self.status, seconds=self.client.clock() - self.started_seconds)
        if self.trace is not None:
            self.trace.end(self.status)
        self.client.finished()
