"""One request on two ranks: the prompt on one, the answer on another. Either's failure ends both.

The decode leg is a ``Forwarding`` like any other; beside it, or before it, runs a ``PrefillLeg`` whose answer reaches
nobody. What goes wrong before the client has seen a byte is tried again on another pair::

    who fails        its lease     the other's    what is next
    prefill leg      its outcome   abandoned      another pair, without this prefill rank
    decode leg       its outcome   abandoned      another pair, without this decode rank
    client, time     client_gone or deadline, both

The rank that did not fail is avoided, too, as long as there are others: which of the two was at fault cannot be known
for certain. Once the decode rank answers, it has all it needs of the other, whose end changes nothing any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from router.core.pd import room
from router.core.types import Handover
from router.fleet.target import Target
from router.proxy.answers import Refusal, outcome_of, told_in
from router.proxy.exchange import Exchange
from router.proxy.forward import Forwarding
from router.proxy.forwarder import Forwarder
from router.proxy.outbound import Outbound, rank_in_body
from router.proxy.receiver import AnswerHead, Failure
from router.proxy.types import BROKEN_OFF_HERE, Attempt, Outcome, Prepared
from router.proxy.upstream import UpstreamConnection
from router.wire import handover
from router.wire.taps import StreamTap
from router.wire.usage import Usage, parse_usage

#: A prefill answer is one token and what tells where its prompt lies; longer ones are not kept.
_MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
#: When the answer is over, its prefill leg has been done for long; it may take so much longer to say so.
_LATE_SECONDS: Final = 5.0


class Owner(Protocol):
    """Who is told how a prefill leg ended; nothing after ``cancel``, ``release`` or ``hang_up``."""

    def prefilled(self, answer: bytes | None) -> None:
        """The prompt is computed. ``answer``: the JSON document that says so, if it is one."""

    def prefill_failed(self, end: Refusal | Failure, outcome: Outcome) -> None:
        """It is not."""

    def prefill_broke(self, failure: Failure) -> bool:
        """Before anything of an answer had come. True: it is asked again, on a new connection."""


class PrefillLeg:
    """The prefill half of an attempt. It closes its lease itself, once."""

    __slots__ = (
        "_connecting",
        "_connection",
        "_forwarder",
        "_late",
        "_loop",
        "_message",
        "_owner",
        "_pieces",
        "_refusal",
        "_size",
        "_tap",
        "attempt",
        "on_body",
    )
    on_body: Callable[[bytes], None]

    def __init__(
        self,
        forwarder: Forwarder,
        attempt: Attempt,
        loop: asyncio.AbstractEventLoop,
        *,
        message: tuple[bytes, bytes],
        owner: Owner,
    ) -> None:
        self.attempt = attempt
        self._forwarder = forwarder
        self._loop = loop
        self._message = message
        self._owner: Owner | None = owner
        self._connecting: asyncio.Task[UpstreamConnection | Failure] | None = None
        self._connection: UpstreamConnection | None = None
        self._late: asyncio.TimerHandle | None = None
        self._refusal: Refusal | None = None
        self._tap: StreamTap | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self.on_body = self._ignore

    def start(self, *, is_fresh: bool = False) -> None:
        """Send it; ``is_fresh``: on a connection that nothing was sent on before."""
        connection = None if is_fresh else self._forwarder.pool.take(self.attempt.target)
        if connection is None:
            self._connecting = self._loop.create_task(self._forwarder.pool.connect(self.attempt.target))
            self._connecting.add_done_callback(self._connected)
        else:
            self._send(connection)

    def _connected(self, task: asyncio.Task[UpstreamConnection | Failure]) -> None:
        if task.cancelled():
            return
        connection = task.result()
        if task is not self._connecting:
            if isinstance(connection, UpstreamConnection):
                connection.close()
            return
        self._connecting = None
        if isinstance(connection, Failure):
            self._over(connection)
        else:
            self._send(connection)

    def _send(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        connection.send(*self._message, self)

    # --- called by the connection ---------------------------------------------------------------

    def on_answer(self, head: AnswerHead, length: int | None, begins: bytes) -> None:
        """The prompt is computed, or refused."""
        is_streamed = head.content_type.startswith(b"text/event-stream")
        refusal = Refusal(head) if head.status >= 400 else told_in(begins, is_streamed=is_streamed)
        if refusal is not None:
            self._refusal = refusal
            self.on_body = self._collect
            return
        self.attempt.lease.first_byte()
        if is_streamed:
            self._tap = StreamTap()
            self.on_body = self._drain
        else:
            self.on_body = self._keep

    def on_end(self, failure: Failure | None) -> None:
        """The answer has ended, or is not to be had."""
        is_asked_again = failure is not None and self._owner is not None and self._owner.prefill_broke(failure)
        if not is_asked_again:
            self._over(failure or self._refusal)

    def waits_on(self, silent_seconds: float, *, has_head: bool) -> bool:
        """A prompt's prefill alone is awaited as a stream's first token is."""
        return silent_seconds < self._forwarder.settings.first_byte_seconds

    def _ignore(self, data: bytes) -> None:
        """Before the head there is no body."""

    def _drain(self, data: bytes) -> None:
        assert self._tap is not None
        self._tap.feed(data)
        self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= _MAX_ANSWER_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()

    def _collect(self, data: bytes) -> None:
        assert self._refusal is not None
        if not self._refusal.add(data):
            outcome = outcome_of(self._refusal.head.status)
            self._over(Failure(outcome, "the worker's error was too long to be kept"))

    # --- its end --------------------------------------------------------------------------------

    def _over(self, end: Refusal | Failure | None) -> None:
        owner, answer, is_streamed = self._owner, b"".join(self._pieces), self._tap is not None
        end = end or told_in(answer, is_streamed=is_streamed)
        if end is None:
            usage = self._tap.usage if self._tap is not None else parse_usage(answer)
            self._close(Outcome.OK, usage)
            if owner is not None:
                owner.prefilled(answer or None)
            return
        outcome = end.outcome if isinstance(end, Failure) else outcome_of(end.head.status)
        self._close(outcome)
        if owner is not None:
            owner.prefill_failed(end, outcome)

    def cancel(self, outcome: Outcome) -> None:
        """End it at once, whatever it is doing."""
        self._close(outcome)

    def release(self) -> None:
        """The decode rank has answered: let it say its last words to nobody, but not for ever."""
        self._owner = None
        self._late = self._loop.call_later(_LATE_SECONDS, self._close, Outcome.OK)

    def hang_up(self) -> None:
        """Break off without a word on the rank: the same will be asked again."""
        self._owner = None
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _close(self, outcome: Outcome, usage: Usage | None = None) -> None:
        if self._late is not None:
            self._late.cancel()
        if self._connection is not None:
            self._forwarder.pool.give_back(self._connection)
            self._connection = None
        self.hang_up()
        self.attempt.lease.close(outcome, usage)
        self._forwarder.instruments.attempt(self.attempt.decision.id, outcome)


class PairForwarding(Forwarding):
    """One inference request in a fleet with roles; an attempt without a prefill leg is any other's."""

    __slots__ = ("_leg", "_meeting", "_params")

    def __init__(self, forwarder: Forwarder, exchange: Exchange, prepared: Prepared, outbound: Outbound) -> None:
        super().__init__(forwarder, exchange, prepared, outbound)
        self._leg: PrefillLeg | None = None
        self._meeting: handover.Bootstrap | None = None
        self._params: msgspec.Raw | None = None

    # --- an attempt -----------------------------------------------------------------------------

    def _dispatch(self, attempt: Attempt) -> None:
        if attempt.prefill is None:
            super()._dispatch(attempt)
        else:
            self._begin_pair(attempt, attempt.prefill)

    def _begin_pair(self, attempt: Attempt, half: Attempt, *, is_fresh: bool = False) -> None:
        inference, target = self._outbound.inference, half.target
        self._meeting = self._params = None
        if target.part.handover is Handover.BOOTSTRAP:
            self._meeting = self._meet(target)
            body = handover.bootstrap_body(inference, self._meeting, rank=rank_in_body(target), decodes=False)
        else:
            body = handover.prefill_body(inference, rank=rank_in_body(target))
        message = self._forwarder.writer.message(self._outbound, target, body=body)
        leg = self._leg = PrefillLeg(self._forwarder, half, self._exchange.client.loop, message=message, owner=self)
        leg.start(is_fresh=is_fresh)
        if self._meeting is None or self._leg is not leg:
            return  # the decode leg follows, or the prefill leg has failed already
        if is_fresh:
            self._connect()
        else:
            super()._dispatch(attempt)

    def _meet(self, target: Target) -> handover.Bootstrap:
        count = handover.room_count(self._outbound.inference)
        rooms = [room(self._forwarder.rooms, rank=target.rank, dp_size=target.dp_size) for _ in range(count)]
        return handover.Bootstrap(target.host, target.bootstrap_port, rooms, rank_in_body(target))

    def _body(self, target: Target) -> bytes | None:
        inference, rank = self._outbound.inference, rank_in_body(target)
        if self._attempt is None or self._attempt.prefill is None:
            return None
        if self._meeting is not None:
            return handover.bootstrap_body(inference, self._meeting, rank=rank, decodes=True)
        return handover.decode_body(inference, self._params, rank=rank)

    def _unanswered(self, failure: Failure) -> None:
        if self._meeting is not None and self._leg is not None and self._is_asked_again(failure):
            self._connection = None
            return self._meet_again()
        return super()._unanswered(failure)

    def _meet_again(self) -> None:
        """On the same ranks, in another room: whether anybody has entered the first one is not known."""
        attempt, leg, connection = self._attempt, self._leg, self._connection
        assert attempt is not None
        assert attempt.prefill is not None
        if leg is not None:
            leg.hang_up()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if connection is not None:
            connection.close()
            self._connection = None
        self._begin_pair(attempt, attempt.prefill, is_fresh=True)

    def _close_attempt(self, outcome: Outcome) -> None:
        attempt, leg = self._attempt, self._leg
        assert attempt is not None
        self._leg = None
        super()._close_attempt(outcome)
        if attempt.prefill is None:
            return
        self._companions |= {attempt.prefill.decision.slot}
        if leg is not None:
            if outcome is Outcome.OK:
                leg.release()
            else:
                leg.cancel(outcome if outcome in BROKEN_OFF_HERE else Outcome.ABANDONED)

    # --- called by the prefill leg --------------------------------------------------------------

    def prefilled(self, answer: bytes | None) -> None:
        """The prompt is computed: SGLang's ranks have met meanwhile, vLLM's decode rank is asked now."""
        attempt, self._leg = self._attempt, None
        if attempt is None or self._meeting is not None:
            return
        try:
            self._params = handover.handed_over(answer or b"")
            attempt.lease.handed()
            super()._dispatch(attempt)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            self._crash(error)

    def prefill_failed(self, end: Refusal | Failure, outcome: Outcome) -> None:
        """Without it there is nothing to decode, unless the answer has begun."""
        leg, self._leg = self._leg, None
        if leg is None or self._attempt is None:
            return
        self._forwarder.log.warning(
            "prefill failed",
            request_id=self._exchange.request_id.decode(),
            rank=str(leg.attempt.decision.id),
            outcome=outcome.value,
        )
        if self._relay is not None:
            return
        try:
            if isinstance(end, Refusal):
                end.lines = self._decision_lines()
            self._abandon()
            self._excluded |= leg.attempt.lease.beside() if outcome is Outcome.CONNECT else {leg.attempt.decision.slot}
            self._remember(end, outcome)
            if outcome is Outcome.CLIENT_ERROR:
                self._give_up()
            else:
                self._next()
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            self._crash(error)

    def prefill_broke(self, failure: Failure) -> bool:
        """A room that the decode rank may have entered is left."""
        if not self._is_asked_again(failure):
            return False
        try:
            self._meet_again()
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            self._crash(error)
        return True

    def _abandon(self) -> None:
        """End the decode leg for want of what it would decode. It says nothing against its rank."""
        attempt, connection = self._attempt, self._connection
        assert attempt is not None
        self._attempt = self._connection = self._refusal = None
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if connection is not None:
            connection.close()
        self._companions |= {attempt.decision.slot}
        attempt.lease.close(Outcome.ABANDONED, None)
        self._forwarder.instruments.attempt(attempt.decision.id, Outcome.ABANDONED)
