"""One inference request: decide, send, relay; elsewhere again if nothing has reached the client yet.

Nothing here waits. A ``Forwarding`` is driven by whoever has news for it: a connection, the client, a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from math import inf

from router.errors import NoWorker, RequestError, UpstreamFailed
from router.fleet.target import Target
from router.proxy.answers import (
    REFUSALS,
    Refusal,
    begins_well,
    error_of,
    is_stream,
    outcome_of,
    refusal_of,
    show_head,
    show_refusal,
    told_by,
)
from router.proxy.exchange import Exchange
from router.proxy.forwarder import Forwarder
from router.proxy.outbound import Outbound
from router.proxy.receiver import AnswerHead, Failure
from router.proxy.relay import Relay
from router.proxy.types import Attempt, Outcome, Prepared
from router.proxy.upstream import UpstreamConnection


class Forwarding:
    """One inference request from its first attempt to the end of its answer."""

    __slots__ = (
        "_asks_again",
        "_attempt",
        "_by_seconds",
        "_companions",
        "_connecting",
        "_connection",
        "_exchange",
        "_excluded",
        "_failures",
        "_forwarder",
        "_is_open_ended",
        "_is_turned_away",
        "_last",
        "_number",
        "_outbound",
        "_prepared",
        "_refusal",
        "_relay",
        "on_body",
    )
    on_body: Callable[[bytes], None]

    def __init__(self, forwarder: Forwarder, exchange: Exchange, prepared: Prepared, outbound: Outbound) -> None:
        self._forwarder = forwarder
        self._exchange = exchange
        self._prepared = prepared
        self._outbound = outbound
        #: By the loop's clock; a stream may go on for as long as it does.
        self._by_seconds = inf
        # The attempt under way:
        self._number = 0
        self._attempt: Attempt | None = None
        self._connecting: asyncio.Task[UpstreamConnection | Failure] | None = None
        self._connection: UpstreamConnection | None = None
        self._relay: Relay | None = None
        self._is_open_ended = False
        self._refusal: Refusal | None = None
        # What has been tried:
        self._asks_again = True
        self._excluded: frozenset[int] = frozenset()
        self._last: Refusal | Failure | None = None
        #: Ranks whose partner failed, where requests are split.
        self._companions: frozenset[int] = frozenset()
        #: A rank that is full has not failed.
        self._failures = 0
        self._is_turned_away = False

    def begin(self) -> None:
        """Send it; later: try again, now that another rank has room for it."""
        self._exchange.stage = self
        try:
            if not self._number:
                self._forwarder.retries.earn()
                if not self._outbound.inference.stream:
                    self._by_seconds = self._exchange.client.clock() + self._forwarder.settings.answer_seconds
            self._try()
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            self._crash(error)

    # --- an attempt -----------------------------------------------------------------------------

    def _next(self) -> None:
        """After a failure: try the best rank that has not failed, as soon as it has room, or give up."""
        forwarder = self._forwarder
        is_late = self._exchange.client.clock() >= self._by_seconds
        if is_late or self._failures == forwarder.settings.max_attempts or not self._may_retry():
            return self._give_up()
        if not forwarder.hold_again(self._exchange, self._prepared, self._outbound, self._barred(), self.begin):
            self._try()
        return None

    def _try(self) -> None:
        try:
            attempt = self._choose()
        except NoWorker:
            if self._last is None:
                raise
            self._forwarder.retries.give_back()
            return self._give_up()
        self._number += 1
        self._attempt = attempt
        if self._exchange.trace is not None:
            self._exchange.trace.decided(attempt.decision, model=self._prepared.model, attempt=self._number)
        return self._dispatch(attempt)

    def _barred(self) -> frozenset[int]:
        """Ranks that are not tried again; once one has turned it away, those that have just turned others away too."""
        return self._excluded | self._forwarder.brain.full() if self._is_turned_away else self._excluded

    def _choose(self) -> Attempt:
        """Of ranks to be tried second preferably none that is full, or whose partner failed."""
        brain, barred = self._forwarder.brain, self._barred()
        if barred:
            free = barred | brain.full()
            preferred = dict.fromkeys((free | self._companions, free))
            preferred.pop(barred, None)
            for exclude in preferred:
                with contextlib.suppress(NoWorker):
                    return brain.choose(self._prepared, exclude=exclude)
        return brain.choose(self._prepared, exclude=barred)

    def _dispatch(self, attempt: Attempt) -> None:
        """Send it, on a connection that is there or on a new one."""
        connection = self._forwarder.pool.take(attempt.target)
        return self._connect() if connection is None else self._send(connection)

    def _may_retry(self) -> bool:
        if self._forwarder.retries.spend():
            return True
        self._forwarder.instruments.retries_denied.inc()
        return False

    def _connect(self) -> None:
        assert self._attempt is not None
        connecting = self._forwarder.pool.connect(self._attempt.target)
        self._connecting = self._exchange.client.loop.create_task(connecting)
        self._connecting.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[UpstreamConnection | Failure]) -> None:
        if task.cancelled():
            return
        connection = task.result()
        if task is not self._connecting:  # the request was given up at the last moment
            if isinstance(connection, UpstreamConnection):
                connection.close()
            return
        self._connecting = None
        try:
            if isinstance(connection, Failure):
                self._fail(connection)
            else:
                self._send(connection)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            self._crash(error)

    def _send(self, connection: UpstreamConnection) -> None:
        assert self._attempt is not None
        self._connection = connection
        target = self._attempt.target
        head, body = self._forwarder.writer.message(self._outbound, target, body=self._body(target))
        connection.send(head, body, self, by_seconds=self._by_seconds)

    def _body(self, target: Target) -> bytes | None:
        """What goes out in place of the client's own body, if anything does."""
        return None

    def _fail(self, failure: Failure) -> None:
        """The attempt brought nothing: another rank, if there is one, and another worker if this one is not reached."""
        if self._connection is None and self._attempt is not None:
            self._excluded |= self._attempt.lease.beside()
        self._log_failure(failure.outcome, failure.cause)
        self._remember(failure, failure.outcome)
        self._close_attempt(failure.outcome)
        if failure.outcome is Outcome.NO_SOCKET:
            return self._give_up()  # the next rank could not be asked either
        return self._next()

    def _remember(self, last: Refusal | Failure, outcome: Outcome) -> None:
        """Keep what the client will be told if no rank does better: before all what a full rank says."""
        is_full = outcome is Outcome.PUSHBACK
        self._failures += not is_full
        if is_full or not self._is_turned_away:
            self._last = last
        self._is_turned_away |= is_full

    def _close_attempt(self, outcome: Outcome) -> None:
        attempt, connection = self._attempt, self._connection
        assert attempt is not None
        self._attempt = self._connection = None
        self._excluded |= {attempt.decision.slot}
        if connection is not None:
            self._forwarder.pool.give_back(connection)
        usage, ids, words = (None, (), None) if (relay := self._relay) is None else relay.said()
        if usage is not None and self._exchange.trace is not None:
            self._exchange.trace.used(usage)
        attempt.lease.close(outcome, usage, output=ids, first_words=words)
        self._forwarder.instruments.attempt(attempt.decision.id, outcome)

    # --- called by the connection ---------------------------------------------------------------

    def on_answer(self, head: AnswerHead, length: int | None, begins: bytes) -> None:
        """The worker answers. From here on the client sees whatever happens, unless it is worth another try."""
        try:
            refusal = refusal_of(head, begins, is_held_open=self._exchange.is_held_open)
            if refusal is not None:
                refusal.lines = self._decision_lines()
                self._refusal = refusal
                self.on_body = self._collect
            else:
                self._exchange.stop_comments()
                self.on_body = self._relay = self._start(head, length, begins)
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

    def waits_on(self, silent_seconds: float, *, has_head: bool) -> bool:
        """A stream begins with its first token. What is not streamed comes whole, however long its making takes: as
        long as the worker answers probes, that is no silence, and when it does not, waiting is of no use.
        """
        assert self._attempt is not None
        is_stream = has_head or self._outbound.inference.stream
        answers = None if is_stream else self._attempt.lease.worker_answers()
        return silent_seconds < self._forwarder.settings.first_byte_seconds if answers is None else answers

    def _unanswered(self, failure: Failure) -> None:
        if self._is_asked_again(failure):
            self._connection = None
            return self._connect()
        return self._fail(failure)

    def _is_asked_again(self, failure: Failure) -> bool:
        """On a new connection, since the one that was kept is taken for closed before the worker read from it. Once for
        each request: it may have read it and died of it.
        """
        asks_again = failure.is_stale and self._asks_again
        self._asks_again &= not asks_again
        return asks_again

    # --- a refusal ------------------------------------------------------------------------------

    def _collect(self, data: bytes) -> None:
        """Keep a refusal, in case no other rank does better."""
        assert self._refusal is not None
        assert self._connection is not None
        if not self._refusal.add(data):
            self._connection.close()
            self.on_end(Failure(outcome_of(self._refusal.head.status), "the worker's error was too long to be kept"))

    def _refused(self, refusal: Refusal, failure: Failure | None) -> None:
        self._refusal = None
        if failure is not None:
            return self._fail(failure)
        outcome = outcome_of(refusal.head.status)
        self._log_failure(outcome, f"the worker answered {refusal.head.status}")
        self._remember(refusal, outcome)
        self._close_attempt(outcome)
        return self._next() if outcome in REFUSALS else self._give_up()

    # --- an answer ------------------------------------------------------------------------------

    def _start(self, head: AnswerHead, length: int | None, begins: bytes) -> Relay:
        exchange, client, attempt = self._exchange, self._exchange.client, self._attempt
        assert attempt is not None
        assert exchange.endpoint is not None
        on_ids = attempt.lease.generated if self._outbound.inference.wants_ids else None
        is_streamed, says_end = is_stream(head), head.ends_with_connection
        relay = Relay(client, exchange.endpoint, is_stream=is_streamed, says_end=says_end, on_ids=on_ids)
        self._is_open_ended = relay.is_stream and (exchange.is_held_open or not head.has_length)
        exchange.status = head.status
        if exchange.trace is not None:
            exchange.trace.first_byte()
        if begins_well(head, begins):
            attempt.lease.first_byte(relay.generated_tokens)
            if relay.is_stream:
                seconds = relay.began_seconds - exchange.started_seconds
                self._forwarder.instruments.first_token(self._prepared.model, seconds=seconds)
        show_head(exchange, head, self._decision_lines(), length=length)
        return relay

    def _end(self, relay: Relay, failure: Failure | None) -> None:
        exchange, forwarder = self._exchange, self._forwarder
        if failure is None:
            if relay.is_cut:
                failure = Failure(Outcome.RESET, "the worker closed the connection")
        elif failure.outcome is not Outcome.CLIENT_GONE and self._is_open_ended and relay.is_done:
            failure = None  # all had been said
        if failure is None:
            relay.end()
            if relay.is_stream and (seconds := relay.seconds_between_events()) is not None:
                forwarder.instruments.inter_token(self._prepared.model, seconds=seconds)
            outcome = outcome_of(exchange.status, told=relay.error)
            if outcome is not outcome_of(exchange.status):
                self._log_failure(outcome, "the worker told an error in its answer")
            self._close_attempt(outcome)
        else:
            self._log_failure(failure.outcome, failure.cause)
            self._close_attempt(failure.outcome)
            if failure.outcome is not Outcome.CLIENT_GONE:
                self._break_off(relay, UpstreamFailed(f"The answer broke off: {failure.cause}."))
        exchange.finish()

    def _break_off(self, relay: Relay, error: RequestError) -> None:
        """Tell a client in the middle of its answer, if a word can be added to it and is not superfluous."""
        if self._is_open_ended and relay.is_done:
            relay.end()
            return
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
            return exchange.fail(error_of(last))
        if exchange.client.begun:
            return exchange.fail(told_by(last))
        show_refusal(exchange, last)
        return exchange.finish()

    def _decision_lines(self) -> bytes:
        assert self._attempt is not None
        return self._forwarder.writer.decision_lines(
            self._attempt.decision, attempt=self._number, id_line=self._exchange.id_line
        )

    # --- called for the client ------------------------------------------------------------------

    def pause(self) -> None:
        """The client does not keep up."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self._connection is not None:
            self._connection.resume()

    def give_up(self, error: RequestError, outcome: Outcome) -> None:
        """The client has gone, its time is over, or the router goes."""
        exchange, relay = self._exchange, self._relay
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if relay is not None and relay.has_said_all:  # clients leave then, without waiting for the body's end
            outcome, exchange.is_left = outcome_of(exchange.status, told=relay.error), False
        self._close_attempt(outcome)
        if relay is None:
            return exchange.fail(error)
        if not exchange.client.gone:
            self._break_off(relay, error)
        return exchange.finish()

    # --- what goes wrong ------------------------------------------------------------------------

    def _crash(self, error: Exception) -> None:
        """Answer with an error. One that is not meant for clients is a fault of the router, and logged."""
        if not isinstance(error, RequestError):
            self._forwarder.log.error("request failed", request_id=self._exchange.request_id.decode(), exc_info=error)
        if self._attempt is not None:
            self._close_attempt(Outcome.FAULT)
        self._exchange.fail(error)

    def _log_failure(self, outcome: Outcome, cause: str) -> None:
        assert self._attempt is not None
        self._forwarder.log_failure(self._exchange, self._attempt.decision.id, outcome, cause=cause)
