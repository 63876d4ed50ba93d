"""A client's request on its way through the router, from being read to the end of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from router.core.fair_queue import Priority
from router.errors import Dialect, NoWorker, RequestError
from router.proxy.instruments import Instruments
from router.proxy.server import ClientConnection
from router.proxy.types import Outcome, Stage
from router.telemetry.tracing import Trace
from router.wire import headers as names
from router.wire import openai
from router.wire.http1 import HttpRequest
from router.wire.openai import Endpoint

#: Whose requests are where no API key names a tenant.
TENANT: Final = "default"
#: nginx's status for a client that has left; in metrics only, nobody is sent it.
_CLIENT_CLOSED_REQUEST: Final = 499


class Exchange:
    """One request and its answer. Whoever answers it calls ``finish`` or ``fail``, once.

    ``endpoint`` is None for what the router answers itself, ``trace`` where none is asked for; ``status`` is set when
    the answer begins; ``on_finish`` is called at the end.
    """

    __slots__ = (
        "_deadline",
        "_instruments",
        "_path",
        "_ticking",
        "client",
        "endpoint",
        "id_line",
        "is_held_open",
        "is_left",
        "is_over",
        "on_finish",
        "priority",
        "request",
        "request_id",
        "stage",
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
        #: The header that tells the client its request's id.
        self.id_line = names.id_line(request_id)
        self.started_seconds = client.clock()
        self.endpoint = endpoint
        self.tenant = TENANT
        #: The API key's, if it has one.
        self.priority: Priority | None = None
        self.trace: Trace | None = None
        self.status = 0
        self.on_finish: Callable[[], None] | None = None
        #: Comments have been sent: a stream is open, and what follows can only be events.
        self.is_held_open = False
        #: The client has gone, and has not been told all.
        self.is_left = False
        #: It has been counted, and whatever goes wrong after that is none of its.
        self.is_over = False
        #: What has it now, and hears of its end.
        self.stage: Stage | None = None
        self._instruments = instruments
        self._path = path
        self._deadline: asyncio.TimerHandle | None = None
        self._ticking: asyncio.TimerHandle | None = None
        instruments.inflight += 1
        client.attach(self)

    @property
    def dialect(self) -> Dialect:
        """In whose shape the client is told of errors."""
        return self.endpoint.dialect if self.endpoint is not None else Dialect.OPENAI

    # --- while it lasts -------------------------------------------------------------------------

    def pause(self) -> None:
        """The client does not keep up."""
        if self.stage is not None:
            self.stage.pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self.stage is not None:
            self.stage.resume()

    def cancel(self) -> None:
        """The client has gone, or the router goes."""
        outcome = Outcome.SHUTDOWN
        if self.client.gone:
            self.is_left = True
            outcome = Outcome.CLIENT_GONE
        self._give_up(NoWorker("The router is shutting down.", code="shutting_down"), outcome)

    def expire_after(self, seconds: float, error: RequestError) -> None:
        """Give up with ``error`` when the client will wait no longer."""
        self._deadline = self.client.loop.call_later(seconds, self._give_up, error, Outcome.DEADLINE)

    def _give_up(self, error: RequestError, outcome: Outcome) -> None:
        if self.stage is not None:
            self.stage.give_up(error, outcome)

    def comment_every(self, seconds: float, position: Callable[[], int | None]) -> None:
        """Until the answer comes, keep a stream open with comments, so that nothing on the way cuts it for silence.

        ``position`` is its place in the queue, None once it waits there no more.
        """
        self.stop_comments()  # of the time before, if it waits once more
        self._ticking = self.client.loop.call_later(seconds, self._comment, seconds, position)

    def _comment(self, seconds: float, position: Callable[[], int | None]) -> None:
        place = position()
        if place is not None:
            self._open_stream()
            self.client.write(b": waiting, position %d\n\n" % place)
        elif self.is_held_open:  # else it may still have a status of its own
            self.client.write(b": waiting for the answer\n\n")
        self.comment_every(seconds, position)

    def _open_stream(self) -> None:
        if not self.client.begun:
            self.is_held_open = True
            self.status = 200
            lines = b"content-type: text/event-stream\r\ncache-control: no-cache\r\n" + self.id_line
            self.client.start(b"HTTP/1.1 200 OK\r\n", lines, has_length=False)

    def stop_comments(self) -> None:
        """The answer comes."""
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    # --- its end --------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Answer with an error, in a stream that has been kept open as its last event."""
        client = self.client
        if not client.gone and not self.is_over:
            known = error if isinstance(error, RequestError) else RequestError("The router failed on this request.")
            self._instruments.error(known.counted_as)
            if self.trace is not None:
                self.trace.failed(known.counted_as)
            if not client.begun:
                self.status = known.status
                client.answer_error(error, lines=self.id_line, dialect=self.dialect)
            elif self.is_held_open and self.endpoint is not None:
                client.write(openai.error_event(known, self.endpoint, number=0))
                client.end()
        self.finish()

    def finish(self) -> None:
        """It is over: count it, once, and let the connection go on."""
        if self.is_over:
            return
        self.is_over = True
        instruments, client = self._instruments, self.client
        instruments.inflight -= 1
        status = _CLIENT_CLOSED_REQUEST if self.is_left else self.status
        instruments.request(self._path, status, seconds=client.clock() - self.started_seconds)
        self.stage = None
        if self._deadline is not None:
            self._deadline.cancel()
        if self._ticking is not None:
            self.stop_comments()
        if self.trace is not None:
            self.trace.end(status)
        if self.on_finish is not None:
            self.on_finish()
        client.finished()
