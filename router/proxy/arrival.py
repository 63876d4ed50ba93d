"""A request from being read to being sent: its terms, its place at the gate, its prompt, and whether it must wait.

Nothing here waits. An ``Arrival`` is driven by whoever has news for it: the gate, the brain, the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from structlog.typing import FilteringBoundLogger

from router.core.fair_queue import Priority
from router.errors import BadRequest, RequestError, UpstreamTimeout
from router.proxy import eager
from router.proxy.exchange import Exchange
from router.proxy.forward import Forwarding
from router.proxy.forwarder import Forwarder
from router.proxy.gate import Gate, refusal
from router.proxy.outbound import Outbound
from router.proxy.pair import PairForwarding
from router.proxy.types import Held, HoldEnd, Outcome, Prepared
from router.proxy.weight import is_quickly_read
from router.settings import QueueSettings
from router.wire import headers as names
from router.wire import openai


class Arrivals:
    """What all requests share until they are sent."""

    def __init__(
        self,
        forwarder: Forwarder,
        *,
        settings: QueueSettings,
        rules: names.ForwardingRules,
        log: FilteringBoundLogger,
    ) -> None:
        self.forwarder = forwarder
        forwarder.hold_again = self.hold_again
        self.settings = settings
        self.rules = rules
        self.log = log
        self.gate = (
            Gate(
                max_inflight=settings.max_inflight,
                max_queued=settings.max_queued,
                queue_seconds=settings.queue_seconds,
            )
            if settings.max_inflight
            else None
        )

    @property
    def queued(self) -> int:
        """Requests that wait at the gate."""
        return self.gate.queued if self.gate is not None else 0

    def take(self, exchange: Exchange) -> None:
        """Answer the request, now or later."""
        Arrival(self, exchange).begin()

    def hold_again(
        self,
        exchange: Exchange,
        prepared: Prepared,
        outbound: Outbound,
        excluded: frozenset[int],
        go: Callable[[], None],
    ) -> bool:
        """Whether a request that failed must wait for room on another rank; ``go`` is called when there is."""
        return Arrival(self, exchange).wait_again(prepared, outbound, excluded, go)


class Arrival:
    """One request that has not been sent yet."""

    __slots__ = ("_arrivals", "_exchange", "_held", "_leave", "_outbound", "_send_on", "_timer")

    def __init__(self, arrivals: Arrivals, exchange: Exchange) -> None:
        self._arrivals = arrivals
        self._exchange = exchange
        self._outbound: Outbound | None = None
        #: Ends what is being waited for.
        self._leave: Callable[[], object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._held: Prepared | None = None
        #: What is called in place of ``_send``, which would tie the request to itself until a collection.
        self._send_on: Callable[[], None] | None = None

    def begin(self) -> None:
        """Take it on."""
        self._exchange.stage = self
        try:
            self._read_terms()
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            self._crash(error)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the same
            self._crash(error)

    def _crash(self, error: Exception) -> None:
        if not isinstance(error, RequestError):
            request_id = self._exchange.request_id.decode()
            self._arrivals.log.error("request failed", request_id=request_id, exc_info=error)
        self._exchange.fail(error)

    # --- its terms and its place ----------------------------------------------------------------

    def _read_terms(self) -> None:
        exchange = self._exchange
        headers = exchange.request.head.text
        timeout = headers.get("x-request-timeout")
        if timeout is not None:
            exchange.expire_after(
                _seconds(timeout), UpstreamTimeout("The request's own time is over.", code="deadline")
            )
        priority, gate = _priority(headers, of_key=exchange.priority), self._arrivals.gate
        if gate is None:
            return self._prepare()
        waiter = gate.enter(
            exchange.client.loop,
            tenant=exchange.tenant,
            priority=priority,
            go=self._go,
            late=self._give_up,
        )
        if waiter is not None:
            self._leave = waiter.leave
            return None
        exchange.on_finish = gate.leave
        return self._prepare()

    def _go(self) -> None:
        """A place has been taken. Not at once: whoever left it is still about its own end."""
        assert self._arrivals.gate is not None
        self._exchange.on_finish = self._arrivals.gate.leave
        self._leave = self._exchange.client.loop.call_soon(self._guarded, self._prepare).cancel

    # --- its prompt -----------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Read the request and have it prepared."""
        exchange, request = self._exchange, self._exchange.request
        assert exchange.endpoint is not None, "the router answers this itself"
        self._leave = None
        if is_quickly_read(exchange.endpoint, request.body):
            preparing = self._asked(openai.parse_request(exchange.endpoint, request.body))
        else:
            preparing = self._read_slowly(exchange.endpoint, request.body)
        prepared = eager.start(preparing, exchange.client.loop)
        if isinstance(prepared, asyncio.Task):
            self._leave = prepared.cancel
            prepared.add_done_callback(self._prepared)
        else:
            self._ready(prepared)

    async def _read_slowly(self, endpoint: openai.Endpoint, body: bytes) -> Prepared:
        """As what is read at once, but not on the loop."""
        return await self._asked(await asyncio.to_thread(openai.parse_request, endpoint, body))

    def _asked(self, inference: openai.InferenceRequest) -> Coroutine[Any, Any, Prepared]:
        """Note what is to be sent on; how it is prepared."""
        exchange, head = self._exchange, self._exchange.request.head
        if head.forwarded is None:
            head.forwarded = self._arrivals.rules.request_lines(head.headers)
        lines = head.forwarded + exchange.id_line
        if exchange.trace is not None:
            lines += exchange.trace.lines()
        self._outbound = Outbound(inference, head.target, lines)
        brain = self._arrivals.forwarder.brain
        request_id = exchange.request_id.decode("ascii")
        return brain.prepare(inference, head.text, tenant=exchange.tenant, request_id=request_id)

    def _prepared(self, task: asyncio.Task[Prepared]) -> None:
        if self._leave is not None:
            self._guarded(lambda: self._ready(task.result()))
        elif not task.cancelled():  # given up in the turn of the loop between its end and this call
            task.exception()

    def _ready(self, prepared: Prepared) -> None:
        outbound = self._outbound
        assert outbound is not None
        if prepared.told_model != outbound.inference.model:  # an alias
            outbound.inference = openai.with_model(outbound.inference, prepared.told_model)
        self._held = prepared
        if not self._wait(prepared, outbound, frozenset()):
            self._send()

    def wait_again(
        self, prepared: Prepared, outbound: Outbound, excluded: frozenset[int], go: Callable[[], None]
    ) -> bool:
        """Wait for room once more, if need be, and then have the request tried again."""
        self._send_on = go
        if not self._wait(prepared, outbound, excluded):
            return False
        self._exchange.stage = self
        return True

    def _wait(self, prepared: Prepared, outbound: Outbound, excluded: frozenset[int]) -> bool:
        """Whether it must wait for room."""
        held = self._arrivals.forwarder.brain.hold(prepared, self._released, exclude=excluded)
        if held is None:
            return False
        settings, exchange, gate = self._arrivals.settings, self._exchange, self._arrivals.gate
        if (held.position() or 0) > settings.max_held:
            seconds = held.leave(HoldEnd.REFUSED)
            raise refusal("As many requests wait for room in the caches as may.", code="hold_full", seconds=seconds)
        self._leave = held.leave
        self._timer = exchange.client.loop.call_later(settings.hold_seconds, self._held_too_long, held)
        if outbound.inference.stream:
            exchange.comment_every(settings.comment_seconds, held.position)
        if gate is not None:  # what waits for room is nobody's work
            exchange.on_finish = None
            gate.leave()
        return True

    def _held_too_long(self, held: Held) -> None:
        self._leave = None
        seconds = held.leave(HoldEnd.LATE)
        message = "The request was held too long for want of cache."
        self._give_up(refusal(message, code="held_too_long", seconds=seconds))

    def _released(self) -> None:
        if (gate := self._arrivals.gate) is not None:
            gate.come_back()
            self._exchange.on_finish = gate.leave
        self._stop()
        self._guarded(self._send_on or self._send)

    def _send(self) -> None:
        prepared, forwarder = self._held, self._arrivals.forwarder
        assert prepared is not None
        assert self._outbound is not None
        self._stop()
        kind = PairForwarding if prepared.is_splittable else Forwarding
        kind(forwarder, self._exchange, prepared, self._outbound).begin()

    # --- called by the client -------------------------------------------------------------------

    def pause(self) -> None:
        """Nothing is on its way to the client."""

    def resume(self) -> None:
        """Nothing is on its way to the client."""

    def give_up(self, error: RequestError, outcome: Outcome) -> None:
        """The client has gone, its time is over, or the router goes."""
        self._give_up(error)

    def _give_up(self, error: RequestError) -> None:
        leave = self._leave
        self._stop()
        if leave is not None:
            leave()
        self._exchange.fail(error)

    def _stop(self) -> None:
        self._leave = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _seconds(text: str) -> float:
    """How long the client will wait."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < 1e9:
        told = "x-request-timeout must be a number of seconds, more than 0 and less than 1e9."
        raise BadRequest(told, param="x-request-timeout")
    return seconds


def _priority(headers: Mapping[str, str], *, of_key: Priority | None) -> Priority:
    """What the request asks for, but no more than its API key may have."""
    text = headers.get("x-request-priority")
    if text is None:
        return Priority.NORMAL if of_key is None else of_key
    try:
        asked = Priority[text.upper()]
    except KeyError:
        raise BadRequest("x-request-priority must be high, normal or low.", param="x-request-priority") from None
    return asked if of_key is None else max(asked, of_key)
