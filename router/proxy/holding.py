"""Working-set admission in the data plane: requests held while the caches have no room, and let go in order.

The rules are ``core/admission``'s; here they meet the fleet, the clock and the waiting requests. A held request is its
body, its keys and an entry here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.core.admission import Admission, Hold, Released, Visit
from router.core.types import FleetView, RankId, RouteRequest
from router.fleet.fleet import Fleet
from router.telemetry.metrics import Metrics

#: Time alone may make room: conversations that have been idle for long lapse.
_LOOK_AGAIN_SECONDS = 1.0

#: Told where the request may be sent (None: anywhere).
Go = Callable[[frozenset[int] | None], None]


class HeldRequest:
    """One request that waits; see ``proxy.types.Held``."""

    __slots__ = ("_holding", "_ticket", "go", "since")

    def __init__(self, holding: Holding, ticket: int, go: Go, *, since: float) -> None:
        self._holding = holding
        self._ticket = ticket
        self.go = go
        self.since = since

    def position(self) -> int | None:
        """Place in the queue, 1 at its head; None when it waits no more."""
        return self._holding.position(self._ticket)

    def leave(self) -> None:
        """Wait no longer."""
        self._holding.cancel(self._ticket)


class Holding:
    """Who waits, and for what. One event loop."""

    def __init__(self, admission: Admission, fleet: Fleet, metrics: Metrics) -> None:
        self._admission = admission
        self._fleet = fleet
        self._metrics = metrics
        self._held: dict[int, HeldRequest] = {}
        self._known: dict[int, RankId] = {}
        self._seen_version = -1
        self._is_releasing = False
        self._timer: asyncio.TimerHandle | None = None
        metrics.held_requests.set_function(lambda: len(self._held))
        metrics.admission_on.set_function(lambda: float(admission.guard.on))

    def offer(self, request: RouteRequest, go: Go) -> HeldRequest | frozenset[int] | None:
        """A request has arrived: where it may go at once (None: anywhere), or that it waits until ``go``."""
        answer = self._admission.offer(request, self._view(), now=self._fleet.clock())
        if not isinstance(answer, Hold):
            self._metrics.admissions.labels(answer.why).inc()
            return answer.slots
        self._metrics.admissions.labels(answer.why).inc()
        held = self._held[answer.ticket] = HeldRequest(self, answer.ticket, go, since=self._fleet.clock())
        self._look_again()
        return held

    def started(self, request: RouteRequest, slot: int) -> Visit:
        """The request was sent to ``slot``."""
        return self._admission.start(request, slot, self._view(), now=self._fleet.clock())

    def first_token(self, visit: Visit) -> None:
        """Its prefill is over: the rank's place for a cold start may be free."""
        visit.first_token()
        self.release()

    def finished(self, visit: Visit, *, cached_tokens: int | None, ideal_tokens: int | None) -> None:
        """It is over, however it ended."""
        now = self._fleet.clock()
        self._admission.finish(visit, now=now, cached_tokens=cached_tokens, ideal_tokens=ideal_tokens)
        self.release()

    def release(self) -> None:
        """Let go whoever may go now, one after the other, each started before the next is asked for."""
        if self._is_releasing or not self._held:
            return
        self._is_releasing = True
        try:
            while (released := self._next()) is not None:
                held = self._held.pop(released.ticket)
                self._metrics.hold_seconds.observe(self._fleet.clock() - held.since)
                held.go(released.admit.slots)
        finally:
            self._is_releasing = False

    def _next(self) -> Released | None:
        return self._admission.release(self._view(), now=self._fleet.clock())

    def position(self, ticket: int) -> int | None:
        """Place in the queue, 1 at its head."""
        return self._admission.position(ticket)

    def cancel(self, ticket: int) -> None:
        """Nobody waits for it any more."""
        if self._held.pop(ticket, None) is not None:
            self._admission.cancel(ticket)
            self.release()

    def _view(self) -> FleetView:
        """The fleet now, with ranks that have left struck from the books."""
        view = self._fleet.view
        if view.version != self._seen_version:
            self._seen_version = view.version
            known = {rank.slot: rank.id for rank in view.ranks}
            for slot, rank_id in self._known.items():
                if known.get(slot) != rank_id:
                    self._admission.forget_slot(slot)
            self._known = known
        return view

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_SECONDS, self._looked)

    def _looked(self) -> None:
        self._timer = None
        self.release()
        if self._held:
            self._look_again()
