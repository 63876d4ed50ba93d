"""One inference request: decide, send, relay; elsewhere again if nothing has reached the client yet.

Nothing here waits. A ``Forwarding`` is driven by whoever has news for it: the brain, a connection, the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from structlog.typing import FilteringBoundLogger

from router.core.retry import RetryBudget
from router.errors import NoWorker, RequestError, UpstreamFailed, UpstreamTimeout
from router.proxy import eager
from router.proxy.exchange import Exchange
from router.proxy.instruments import Instruments
from router.proxy.outbound import Outbound, Writer
from router.proxy.relay import Relay
from router.proxy.types import Attempt, Brain, Outcome, Prepared
from router.proxy.upstream import AnswerHead, Failure, UpstreamConnection, UpstreamPool
from router.settings import UpstreamSettings
from router.wire import headers as names
from router.wire import http1, openai

T = TypeVar("T")

#: nginx's status for a client that has left; in metrics only, nobody is sent it.
CLIENT_CLOSED_REQUEST: Final = 499
#: A worker's refusal longer than this is not kept for passing on.
_MAX_REFUSAL_BYTES: Final = 256 * 1024


class Forwarder:
    """What all requests share on their way to a worker."""

    def __init__(
        self,
        brain: Brain,
        pool: UpstreamPool,
        *,
        settings: UpstreamSettings,
        rules: names.ForwardingRules,
        instruments: Instruments,
        log: FilteringBoundLogger,
    ) -> None:
        self.brain = brain
        self.pool = pool
        self.settings = settings
        self.rules = rules
        self.instruments = instruments
        self.log = log
        self.writer = Writer()
        self.retries = RetryBudget(ratio=settings.retry_ratio, reserve=settings.retry_reserve)

    def forward(self, exchange: Exchange) -> None:
        """Answer the request, now or later."""
        self.retries.earn()
        Forwarding(self, exchange).begin()


class Refusal:
    """A worker's whole answer that is better asked of another rank first."""

    __slots__ = ("_pieces", "head", "lines", "size")

    def __init__(self, head: AnswerHead, lines: bytes) -> None:
        self.head = head
        self.lines = lines
        self.size = 0
        self._pieces: list[bytes] = []

    def add(self, data: bytes) -> bool:
        """Keep a piece of the body; False when it has become too long."""
        self.size += len(data)
        self._pieces.append(data)
        return self.size <= _MAX_REFUSAL_BYTES

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(self._pieces)


class Forwarding:
    """One inference request until its answer has ended."""

    __slots__ = (
        "_attempt",
        "_connection",
        "_exchange",
        "_excluded",
        "_forwarder",
        "_is_kept",
        "_is_open_ended",
        "_last",
        "_number",
        "_outbound",
        "_prepared",
        "_refusal",
        "_relay",
        "_task",
        "on_body",
    )
    on_body: Callable[[bytes], None]

    def __init__(self, forwarder: Forwarder, exchange: Exchange) -> None:
        self._forwarder = forwarder
        self._exchange = exchange
        self._task: asyncio.Task[object] | None = None
        self._prepared: Prepared | None = None
        self._outbound: Outbound | None = None
        # The attempt under way:
        self._number = 0
        self._attempt: Attempt | None = None
        self._connection: UpstreamConnection | None = None
        self._is_kept = False
        self._relay: Relay | None = None
        self._is_open_ended = False
        self._refusal: Refusal | None = None
        # What has been tried:
        self._excluded: frozenset[int] = frozenset()
        self._last: Refusal | Failure | None = None

    # --- before an attempt ----------------------------------------------------------------------

    def begin(self) -> None:
        """Take it on."""
        try:
            self._prepare()
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            self._crash(error)

    def _prepare(self) -> None:
        """Read the request and have it prepared."""
        exchange, forwarder = self._exchange, self._forwarder
        assert exchange.endpoint is not None, "the router answers this itself"
        request = exchange.request
        inference = openai.parse_request(exchange.endpoint, request.body)
        headers = names.as_text(request.headers)
        headers["x-request-id"] = exchange.request_id.decode("ascii")
        lines = forwarder.rules.request_lines(request.headers) + exchange.id_line
        if exchange.trace is not None:
            lines += exchange.trace.lines()
        self._outbound = Outbound(inference, request.target, lines)
        exchange.client.attach(self)
        loop = exchange.client.loop
        prepared = eager.start(forwarder.brain.prepare(inference, headers, tenant=exchange.tenant), loop)
        if isinstance(prepared, asyncio.Task):
            self._wait(prepared, self._ready)
        else:
            self._ready(prepared)

    def _wait(self, task: asyncio.Task[T], then: Callable[[T], None]) -> None:
        self._task = task
        task.add_done_callback(partial(self._waited, then))

    def _waited(self, then: Callable[[T], None], task: asyncio.Task[T]) -> None:
        if task is not self._task:
            return _discard(task)  # the request was given up
        self._task = None
        if task.cancelled():
            return self.cancel()
        try:
            then(task.result())
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            self._crash(error)

    def _ready(self, prepared: Prepared) -> None:
        outbound = self._outbound
        assert outbound is not None
        if prepared.model != outbound.inference.model:  # an alias
            outbound.inference = openai.with_model(outbound.inference, prepared.model)
        self._prepared = prepared
        self._next()

    # --- an attempt -----------------------------------------------------------------------------

    def _next(self) -> None:
        """Try the best rank that has not failed, or give up."""
        assert self._prepared is not None
        forwarder, exchange = self._forwarder, self._exchange
        if self._number == forwarder.settings.max_attempts or (self._number and not self._may_retry()):
            return self._give_up()
        try:
            attempt = forwarder.brain.choose(self._prepared, exclude=self._excluded)
        except NoWorker:
            if self._last is None:
                raise
            return self._give_up()
        self._number += 1
        self._attempt = attempt
        if exchange.trace is not None:
            exchange.trace.decided(attempt.decision, model=self._prepared.model, attempt=self._number)
        connection = forwarder.pool.take(attempt.target)
        if connection is None:
            return self._connect()
        self._is_kept = True
        return self._send(connection)

    def _may_retry(self) -> bool:
        if self._forwarder.retries.spend():
            return True
        self._forwarder.instruments.retries_denied.inc()
        return False

    def _connect(self) -> None:
        assert self._attempt is not None
        connecting = self._forwarder.pool.connect(self._attempt.target)
        self._wait(self._exchange.client.loop.create_task(connecting), self._connected)

    def _connected(self, connection: UpstreamConnection | Failure) -> None:
        if isinstance(connection, Failure):
            return self._fail(connection)
        self._is_kept = False
        return self._send(connection)

    def _send(self, connection: UpstreamConnection) -> None:
        assert self._attempt is not None
        assert self._outbound is not None
        self._connection = connection
        head, body = self._forwarder.writer.message(self._outbound, self._attempt.target)
        connection.send(head, body, self)

    def _fail(self, failure: Failure) -> None:
        """The attempt brought nothing: another rank, if there is one."""
        self._log_failure(failure.outcome, failure.cause)
        self._last = failure
        self._close_attempt(failure.outcome)
        self._next()

    def _close_attempt(self, outcome: Outcome) -> None:
        attempt, connection = self._attempt, self._connection
        assert attempt is not None
        self._attempt = self._connection = None
        self._excluded |= {attempt.decision.slot}
        if connection is not None:
            self._forwarder.pool.give_back(connection)
        usage = self._relay.usage if self._relay is not None else None
        if usage is not None and self._exchange.trace is not None:
            self._exchange.trace.used(usage)
        attempt.lease.close(outcome, usage)
        self._forwarder.instruments.attempt(attempt.decision.id, outcome)

    # --- called by the connection ---------------------------------------------------------------

    def on_answer(self, head: AnswerHead) -> None:
        """The worker answers. From here on the client sees whatever happens, unless it is worth another try."""
        try:
            if _outcome(head.status) in _REFUSALS:
                self._refusal = Refusal(head, self._decision_lines())
                self.on_body = self._collect
            else:
                self.on_body = self._relay = self._start(head)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            self._crash(error)

    def on_end(self, failure: Failure | None) -> None:
        """The worker's answer has ended, or is not to be had."""
        try:
            if self._relay is not None:
                self._end(self._relay, failure)
            elif self._refusal is not None:
                self._refused(self._refusal, failure)
            else:
                assert failure is not None, "an end without an answer"
                self._unanswered(failure)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            self._crash(error)

    def _unanswered(self, failure: Failure) -> None:
        if self._is_kept and failure.outcome is Outcome.RESET and not failure.answered:
            # A kept connection that turns out closed says nothing of the worker: once more, on a new one.
            self._connection = None
            return self._connect()
        return self._fail(failure)

    # --- a refusal ------------------------------------------------------------------------------

    def _collect(self, data: bytes) -> None:
        """Keep a refusal, in case no other rank does better."""
        assert self._refusal is not None
        assert self._connection is not None
        if not self._refusal.add(data):
            self._connection.close()
            cause = "the worker's error was too long to be kept"
            self.on_end(Failure(_outcome(self._refusal.head.status), cause, answered=True))

    def _refused(self, refusal: Refusal, failure: Failure | None) -> None:
        self._refusal = None
        if failure is not None:
            return self._fail(failure)
        outcome = _outcome(refusal.head.status)
        self._log_failure(outcome, f"the worker answered {refusal.head.status}")
        self._last = refusal
        self._close_attempt(outcome)
        return self._next()

    # --- an answer ------------------------------------------------------------------------------

    def _start(self, head: AnswerHead) -> Relay:
        exchange, client, attempt = self._exchange, self._exchange.client, self._attempt
        assert attempt is not None
        assert exchange.endpoint is not None
        is_stream = head.content_type.startswith(b"text/event-stream") and not head.encoded
        relay = Relay(client, exchange.endpoint, is_stream=is_stream)
        self._is_open_ended = is_stream and not head.has_length
        exchange.status = head.status
        if exchange.trace is not None:
            exchange.trace.first_byte()
        if head.status < 400:
            attempt.lease.first_byte()
            if is_stream:
                assert self._prepared is not None
                seconds = relay.began_seconds - exchange.started_seconds
                self._forwarder.instruments.first_token(self._prepared.model, seconds=seconds)
        client.start(
            http1.status_line(head.status, head.reason),
            names.response_lines(head.headers) + self._decision_lines(),
            has_length=head.has_length,
        )
        return relay

    def _end(self, relay: Relay, failure: Failure | None) -> None:
        exchange, forwarder = self._exchange, self._forwarder
        if failure is None:
            relay.end()
            if relay.is_stream and (seconds := relay.seconds_between_events()) is not None:
                assert self._prepared is not None
                forwarder.instruments.inter_token(self._prepared.model, seconds=seconds)
            self._close_attempt(_outcome(exchange.status))
        else:
            self._log_failure(failure.outcome, failure.cause)
            self._close_attempt(failure.outcome)
            if failure.outcome is not Outcome.CLIENT_GONE:
                self._break_off(relay, UpstreamFailed(f"The answer broke off: {failure.cause}."))
        exchange.finish()

    def _break_off(self, relay: Relay, error: RequestError) -> None:
        """Tell a client in the middle of its answer, if a word can be added to it."""
        self._forwarder.instruments.error(error.code)
        if self._exchange.trace is not None:
            self._exchange.trace.failed(error.code)
        if self._is_open_ended:
            relay.end_with(error)

    def _give_up(self) -> None:
        """Answer with the last thing a worker said, or with what went wrong."""
        exchange, last = self._exchange, self._last
        if not isinstance(last, Refusal):
            assert last is not None
            return exchange.fail(_error(last))
        lines = last.lines + names.response_lines(
            header for header in last.head.headers if header[0].lower() != names.CONTENT_LENGTH
        )
        if not http1.bodiless(last.head.status):
            lines += b"content-length: %d\r\n" % len(last.body)
        exchange.status = last.head.status
        exchange.client.start(http1.status_line(last.head.status, last.head.reason), lines, has_length=True)
        exchange.client.write(last.body)
        exchange.client.end()
        return exchange.finish()

    def _decision_lines(self) -> bytes:
        assert self._attempt is not None
        return self._forwarder.writer.decision_lines(
            self._attempt.decision, attempt=self._number, id_line=self._exchange.id_line
        )

    # --- called by the client -------------------------------------------------------------------

    def pause(self) -> None:
        """The client does not keep up."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self._connection is not None:
            self._connection.resume()

    def cancel(self) -> None:
        """The client has gone, or the router goes."""
        exchange, client = self._exchange, self._exchange.client
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        if self._attempt is not None:
            self._close_attempt(Outcome.CLIENT_GONE)
        exchange.status = CLIENT_CLOSED_REQUEST
        going = NoWorker("The router is shutting down.", code="shutting_down")
        if client.gone:
            exchange.finish()
        elif self._relay is not None:
            self._break_off(self._relay, going)
            exchange.finish()
        else:
            exchange.fail(going)

    # --- what goes wrong ------------------------------------------------------------------------

    def _crash(self, error: Exception) -> None:
        """Answer with an error. One that is not meant for clients is a fault of the router, and logged."""
        if not isinstance(error, RequestError):
            self._forwarder.log.error("request failed", request_id=self._exchange.request_id.decode(), exc_info=error)
        if self._attempt is not None:
            self._close_attempt(Outcome.CLIENT_GONE)
        self._exchange.fail(error)

    def _log_failure(self, outcome: Outcome, cause: str) -> None:
        assert self._attempt is not None
        self._forwarder.log.warning(
            "attempt failed",
            request_id=self._exchange.request_id.decode(),
            rank=str(self._attempt.decision.id),
            outcome=outcome.value,
            cause=cause,
        )


def _discard(task: asyncio.Task[T]) -> None:
    """Nobody waits for this any more, but a connection may have been made at the last moment."""
    if not task.cancelled() and task.exception() is None and isinstance(result := task.result(), UpstreamConnection):
        result.close()


_REFUSALS: Final = frozenset({Outcome.PUSHBACK, Outcome.SERVER_ERROR})


def _outcome(status: int) -> Outcome:
    if status < 400:
        return Outcome.OK
    if status in (429, 503):
        return Outcome.PUSHBACK
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.SERVER_ERROR


def _error(failure: Failure) -> RequestError:
    """What the client is told when no attempt brought an answer."""
    kind = UpstreamTimeout if failure.outcome is Outcome.TIMEOUT else UpstreamFailed
    return kind(f"No worker answered; last cause: {failure.cause}.")
