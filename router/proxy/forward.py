"""One inference request: decide, send, relay; elsewhere again if nothing has reached the client yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from structlog.typing import FilteringBoundLogger

from router.core.types import Decision, Engine
from router.errors import Dialect, NoWorker, RequestError, UpstreamFailed, UpstreamTimeout
from router.fleet.target import Target
from router.proxy.instruments import Instruments
from router.proxy.relay import Relay
from router.proxy.server import ClientConnection
from router.proxy.types import Attempt, Brain, Outcome
from router.proxy.upstream import AnswerHead, Failure, UpstreamConnection, UpstreamPool
from router.settings import UpstreamSettings
from router.telemetry.tracing import Trace
from router.wire import headers as names
from router.wire import http1, openai
from router.wire.http1 import HttpRequest
from router.wire.openai import BodyTap, Endpoint, InferenceRequest, StreamTap, Usage

#: Whose requests are where no API key names a tenant.
TENANT: Final = "default"
#: A worker's refusal longer than this is not kept for passing on.
_MAX_REFUSAL_BYTES: Final = 256 * 1024
#: SGLang: which data-parallel rank shall serve the request.
_RANK_FIELD: Final = "routed_dp_rank"


@dataclass(slots=True)
class Exchange:
    """A client's request on its way through the router. ``status`` is set when the answer begins.

    ``endpoint`` is None for what the router answers itself, ``trace`` where none is asked for.
    """

    request: HttpRequest
    client: ClientConnection
    request_id: bytes
    started_seconds: float
    endpoint: Endpoint | None = None
    tenant: str = TENANT
    trace: Trace | None = None
    status: int = 0

    @property
    def dialect(self) -> Dialect:
        """In whose shape the client is told of errors."""
        return self.endpoint.dialect if self.endpoint is not None else Dialect.OPENAI


@dataclass(slots=True)
class Outbound:
    """What every attempt of a request sends alike."""

    inference: InferenceRequest
    target: bytes
    lines: bytes

    def to(self, target: Target) -> tuple[bytes, bytes]:
        """Head and body as sent to ``target``, its rank named the way its engine wants."""
        body, rank_line = self.inference.body, b""
        if target.dp_size > 1:
            if target.engine is not Engine.VLLM:
                body = openai.with_field(self.inference, _RANK_FIELD, target.rank)
            if target.engine is not Engine.SGLANG:
                rank_line = b"%b: %d\r\n" % (names.DP_RANK, target.rank)
        host = f"[{target.host}]" if ":" in target.host else target.host
        head = b"POST %b%b HTTP/1.1\r\nhost: %b:%d\r\n%b%bcontent-length: %d\r\n\r\n" % (
            target.base_path.encode(),
            self.target,
            host.encode(),
            target.port,
            rank_line,
            self.lines,
            len(body),
        )
        return head, body


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker's whole answer that is better asked of another rank first."""

    head: AnswerHead
    body: bytes
    lines: bytes


class Forwarder:
    """The attempt loop over ranks."""

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
        self._rules = rules
        self._brain = brain
        self._pool = pool
        self._settings = settings
        self._instruments = instruments
        self._log = log

    async def forward(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Answer the request. Raises ``RequestError`` while nothing has been answered."""
        request = exchange.request
        inference = openai.parse_request(endpoint, request.body)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        headers[names.REQUEST_ID.decode()] = exchange.request_id.decode()
        prepared = await self._brain.prepare(inference, headers, tenant=exchange.tenant)
        if prepared.model != inference.model:  # an alias
            inference = openai.with_model(inference, prepared.model)
        lines = self._rules.request_lines(request.headers)
        lines += b"%b: %b\r\n" % (names.REQUEST_ID, exchange.request_id)
        if exchange.trace is not None:
            lines += exchange.trace.lines()
        outbound = Outbound(inference, request.target, lines)

        failed: frozenset[int] = frozenset()
        last: Refusal | Failure | None = None
        for number in range(1, self._settings.max_attempts + 1):
            try:
                attempt = self._brain.choose(prepared, exclude=failed)
            except NoWorker:
                if last is None:
                    raise
                break
            if exchange.trace is not None:
                exchange.trace.decided(attempt.decision, model=prepared.model, attempt=number)
            run = _Run(exchange, attempt, number, model=prepared.model)
            last = await self._attempt(run, outbound)
            if last is None:
                return
            failed |= {attempt.decision.slot}
        assert last is not None
        self._give_up(exchange, last)

    async def _attempt(self, run: _Run, outbound: Outbound) -> Refusal | Failure | None:
        """Try one rank. None: the client has its answer, whole or broken off. The lease is closed in any case."""
        try:
            head = await self._first_byte(run, outbound)
            if isinstance(head, Failure):
                run.outcome = head.outcome
                self._log_failure(run, head.cause)
                return head
            assert run.connection is not None
            outcome = _outcome(head.status)
            if outcome in (Outcome.PUSHBACK, Outcome.SERVER_ERROR):
                refusal = await self._refusal(run, head)
                run.outcome = refusal.outcome if isinstance(refusal, Failure) else outcome
                self._log_failure(run, f"the worker answered {head.status}")
                return refusal
            await self._relay(run, head)
            return None
        finally:
            if run.connection is not None:
                self._pool.give_back(run.connection)
            run.attempt.lease.close(run.outcome, run.usage)
            self._instruments.attempt(run.attempt.decision.id, run.outcome)

    async def _first_byte(self, run: _Run, outbound: Outbound) -> AnswerHead | Failure:
        """Send the request and wait. A kept connection that turns out closed is replaced once by a new one."""
        target = run.attempt.target
        message = outbound.to(target)
        kept = self._pool.take(target)
        if kept is not None:
            run.connection = kept
            kept.send(*message)
            head = await kept.first_byte()
            if not isinstance(head, Failure) or head.answered or head.outcome is not Outcome.RESET:
                return head
        run.connection = None
        connection = await self._pool.connect(target)
        if isinstance(connection, Failure):
            return connection
        run.connection = connection
        connection.send(*message)
        return await connection.first_byte()

    async def _refusal(self, run: _Run, head: AnswerHead) -> Refusal | Failure:
        """Collect a refusal, in case no other rank does better."""
        assert run.connection is not None
        connection = run.connection
        pieces: list[bytes] = []
        size = 0

        def collect(data: bytes) -> None:
            nonlocal size
            size += len(data)
            if size > _MAX_REFUSAL_BYTES:
                connection.close()
            else:
                pieces.append(data)

        connection.relay(collect)
        failure = await connection.finished()
        if size > _MAX_REFUSAL_BYTES:
            return Failure(_outcome(head.status), "the worker's error was too long to be kept", answered=True)
        if failure is not None:
            return failure
        return Refusal(head, b"".join(pieces), run.decision_lines())

    async def _relay(self, run: _Run, head: AnswerHead) -> None:
        """Pass the answer on as it comes. From here on the client sees whatever happens."""
        assert run.connection is not None
        exchange, client, connection = run.exchange, run.exchange.client, run.connection
        run.outcome = Outcome.CLIENT_GONE
        outcome = _outcome(head.status)
        if outcome is Outcome.OK:
            run.attempt.lease.first_byte()
        streamed = head.content_type.startswith(b"text/event-stream") and not head.encoded
        assert exchange.endpoint is not None
        relay = Relay(client, StreamTap() if streamed else BodyTap(), exchange.endpoint)
        if exchange.trace is not None:
            exchange.trace.first_byte()
        exchange.status = head.status
        if streamed and outcome is Outcome.OK:
            self._instruments.first_token(run.model, seconds=relay.first_seconds - exchange.started_seconds)
        client.start(
            http1.status_line(head.status, head.reason),
            names.response_lines(head.headers) + run.decision_lines(),
            has_length=head.has_length,
        )
        may_add = streamed and not head.has_length
        try:
            connection.relay(relay)
            client.attach(connection)
            failure = await connection.finished()
        except asyncio.CancelledError:
            if may_add and not client.gone:
                relay.end_with(NoWorker("The router is shutting down.", code="shutting_down"))
                self._instruments.error("shutting_down")
            raise
        run.usage = relay.usage
        if exchange.trace is not None and run.usage is not None:
            exchange.trace.used(run.usage)
        if failure is None:
            run.outcome = outcome
            relay.end()
            if streamed and relay.seconds_between_events is not None:
                self._instruments.inter_token(run.model, seconds=relay.seconds_between_events)
            return
        run.outcome = failure.outcome
        self._log_failure(run, failure.cause)
        if failure.outcome is not Outcome.CLIENT_GONE:
            error = UpstreamFailed(f"The answer broke off: {failure.cause}.")
            self._instruments.error(error.code)
            if exchange.trace is not None:
                exchange.trace.failed(error.code)
            if may_add:
                relay.end_with(error)

    def _give_up(self, exchange: Exchange, last: Refusal | Failure) -> None:
        """Answer with the last thing a worker said, or with what went wrong."""
        if isinstance(last, Failure):
            raise _error(last)
        lines = last.lines + names.response_lines(
            header for header in last.head.headers if header[0].lower() != names.CONTENT_LENGTH
        )
        if not http1.bodiless(last.head.status):
            lines += b"content-length: %d\r\n" % len(last.body)
        exchange.status = last.head.status
        exchange.client.start(http1.status_line(last.head.status, last.head.reason), lines, has_length=True)
        exchange.client.write(last.body)
        exchange.client.end()

    def _log_failure(self, run: _Run, cause: str) -> None:
        self._log.warning(
            "attempt failed",
            request_id=run.exchange.request_id.decode(),
            rank=str(run.attempt.decision.id),
            outcome=run.outcome.value,
            cause=cause,
        )


class _Run:
    """One attempt while it runs."""

    __slots__ = ("attempt", "connection", "exchange", "model", "number", "outcome", "usage")

    def __init__(self, exchange: Exchange, attempt: Attempt, number: int, *, model: str) -> None:
        self.exchange = exchange
        self.attempt = attempt
        self.number = number
        self.model = model
        self.connection: UpstreamConnection | None = None
        #: What it is if nothing else is said before the end: the task was cancelled.
        self.outcome = Outcome.CLIENT_GONE
        self.usage: Usage | None = None

    def decision_lines(self) -> bytes:
        """Header lines that tell the client where its request went, and why."""
        return decision_lines(self.attempt.decision, number=self.number, request_id=self.exchange.request_id)


def decision_lines(decision: Decision, *, number: int, request_id: bytes) -> bytes:
    """The ``x-homing-*`` headers and the request's id."""
    return b"%b: %b\r\n%b: %b\r\n%b: %d\r\n%b: %b\r\n%b: %d\r\n%b: %d\r\n" % (
        names.REQUEST_ID,
        request_id,
        names.WORKER,
        decision.id.worker.encode(),
        names.RANK,
        decision.id.rank,
        names.REASON,
        decision.reason.encode(),
        names.EXPECTED_CACHED_TOKENS,
        decision.expected_cached_tokens,
        names.ATTEMPTS,
        number,
    )


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
