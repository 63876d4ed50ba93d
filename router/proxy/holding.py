"""Working-set admission in the data plane: requests held while the caches have no room, and let go in order.

The rules are ``core/admission``'s; here they meet the fleet, the clock and the waiting requests. A held request is its
body, its keys and an entry here.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from router.core.admission import Admission, Barrier, Hold, Released, Visit
from router.core.returns import Conversation
from router.core.turnover import Turnover
from router.core.types import FleetView, RankId, RouteRequest, SessionKey
from router.fleet.decisions import Waiting
from router.fleet.fleet import Fleet
from router.fleet.shared import ConversationCharge
from router.proxy.types import HoldEnd
from router.telemetry.metrics import Metrics

#: Time alone may make room: conversations that have been idle for long lapse.
_LOOK_AGAIN_SECONDS = 1.0
#: Changes of charges that are kept for the other replicas while they cannot be told.
_MOST_UNTOLD = 10_000

#: Told where the request may be sent (None: anywhere).
Go = Callable[[frozenset[int] | None], None]


#: What a request asks for, as of now.
Route = Callable[[], RouteRequest]


class HeldRequest:
    """One request that waits; see ``proxy.types.Held``."""

    __slots__ = ("_holding", "_ticket", "go", "route", "routed_at", "since", "waiting")

    def __init__(self, holding: Holding, hold: Hold, go: Go, route: Route, *, since: float) -> None:
        self._holding = holding
        self._ticket = hold.ticket
        #: For whoever asks why it is held.
        self.waiting = Waiting(hold.why, partial(holding.position, hold.ticket))
        self.go = go
        self.route = route
        self.since = self.routed_at = since

    def position(self) -> int | None:
        """Place in the queue, 1 at its head; None when it waits no more."""
        return self._holding.position(self._ticket)

    def leave(self, end: HoldEnd = HoldEnd.LEFT) -> int:
        """Wait no longer. Returns the seconds that one who comes now would wait."""
        return self._holding.cancel(self._ticket, end)


class Holding:
    """Who waits, and for what. One event loop."""

    def __init__(self, admission: Admission, fleet: Fleet, metrics: Metrics) -> None:
        self._admission = admission
        self._fleet = fleet
        self._metrics = metrics
        self._held: dict[int, HeldRequest] = {}
        self._turnover = Turnover()
        self._known: dict[int, RankId] = {}
        self._untold: dict[tuple[Conversation, RankId], None] = {}
        self._is_whole_due = False
        self._seen_version = -1
        self._is_releasing = False
        self._timer: asyncio.TimerHandle | None = None
        #: A heap of those whose first token nobody will hear of, by when their prompts should be computed.
        self._unheard: list[tuple[float, int, Visit]] = []
        self._started = 0
        metrics.held_requests.set_function(lambda: len(self._held))
        metrics.held_tokens.set_function(lambda: admission.held_tokens)
        metrics.oldest_hold_seconds.set_function(self._oldest_seconds)
        metrics.charged_tokens.set_function(
            lambda: sum(admission.charged_tokens(rank.slot) for rank in fleet.view.ranks)
        )
        fleet.charged = self._charged
        fleet.changed_charges = self._changed_charges
        if fleet.shared.is_shared:
            admission.charges.on_changed = self._changed
        fleet.on_taken = self._taken
        metrics.admission_on.set_function(lambda: float(admission.guard.is_any_on))

    def offer(self, route: Route, go: Go) -> HeldRequest | frozenset[int] | None:
        """A request has arrived: where it may go at once (None: anywhere), or that it waits until ``go``."""
        now = self._catch_up()
        answer = self._admission.offer(route(), self._view(), now=now, closed=self._fleet.breakers.closed_to(now=now))
        self._metrics.admissions.labels(answer.why).inc()
        if not isinstance(answer, Hold):
            return answer.slots
        if not self._held:
            self._turnover.begin(now=now)
        held = self._held[answer.ticket] = HeldRequest(self, answer, go, route, since=now)
        self._look_again()
        return held

    def foretell(self, request: RouteRequest) -> Waiting | frozenset[int] | None:
        """What a request would be told that arrives now."""
        now = self._catch_up()
        closed = self._fleet.breakers.closed_to(now=now)
        answer = self._admission.foretell(request, self._view(), now=now, closed=closed)
        if not isinstance(answer, Barrier):
            return answer.slots
        last = self._admission.held + 1
        return Waiting(answer, lambda: last)

    # --- other replicas -----------------------------------------------------------------------------

    def charged_elsewhere(self, model: str, session: SessionKey) -> Mapping[int, int]:
        """What other replicas charge the conversation with, by slot."""
        charged = self._fleet.shared.charges(model, session)
        return {rank.slot: charged[rank.id] for rank in self._fleet.view.ranks if rank.id in charged} if charged else {}

    def _changed(self, conversation: Conversation, slot: int) -> None:
        """To be told to the other replicas. What they have not been told for long is told as a whole."""
        if (rank := self._known.get(slot)) is not None:
            self._untold[conversation, rank] = None
        if len(self._untold) > _MOST_UNTOLD:
            self._untold.clear()
            self._is_whole_due = True

    def _changed_charges(self, *, whole: bool) -> tuple[bool, Sequence[ConversationCharge]]:
        charges, slots = self._admission.charges, {rank.id: rank.slot for rank in self._fleet.view.ranks}
        whole = whole or self._is_whole_due
        if whole:
            known = {rank.slot: rank.id for rank in self._fleet.view.ranks}
            changed = [(each.conversation, known[each.slot]) for each in charges.all() if each.slot in known]
        else:
            changed = list(self._untold)
        self._untold.clear()
        self._is_whole_due = False
        told = []
        for conversation, rank in changed:
            charge = charges.of(conversation).get(slots.get(rank, -1))
            tokens = None
            if charge is not None and not charge.is_lapsable:
                tokens = 0 if charge.inflight else charge.tokens
            told.append(ConversationCharge(conversation, rank, tokens))
        return whole, told

    def _charged(self) -> Mapping[RankId, int]:
        """What is charged to each rank by this replica, but for what may lapse."""
        book = self._admission.charges.book
        return {rank.id: book(rank.slot).active_tokens for rank in self._fleet.view.ranks}

    def _taken(self, conversation: Conversation) -> None:
        """Another replica serves it now, and charges it."""
        self._admission.charges.drop_idle(conversation)
        self.release()

    # --- requests under way ---------------------------------------------------------------------------

    def started(self, request: RouteRequest, slot: int, *, partner: int | None, heard_by: float | None = None) -> Visit:
        """The request was sent to ``slot``, and to its ``partner`` where they are a pair. Where nobody will hear of its
        first token its prompt should be computed at ``heard_by``.
        """
        visit = self._admission.start(request, slot, self._view(), now=self._fleet.clock(), partner=partner)
        if heard_by is not None and visit.cold:
            self._started += 1
            heapq.heappush(self._unheard, (heard_by, self._started, visit))
            if self._held:
                self._look_again()
        return visit

    def _catch_up(self) -> float:
        """Free the places for cold starts of prompts that should be computed, and fill them. Returns the time."""
        now, was_freed = self._fleet.clock(), False
        while self._unheard and self._unheard[0][0] <= now:
            _, _, visit = heapq.heappop(self._unheard)
            was_freed |= visit.cold
            visit.leave_start()
        if was_freed:
            self.release()
        return now

    def first_token(self, visit: Visit) -> None:
        """Its prefill is over: the rank's place for a cold start may be free."""
        visit.first_token()
        self.release()

    def finished(
        self,
        visit: Visit,
        *,
        is_kept: bool,
        output_tokens: int | None,
        cached_tokens: int | None,
        ideal_tokens: int | None,
    ) -> None:
        """It is over, however it ended; ``is_kept``: the rank's cache has it."""
        self._admission.finish(
            visit,
            now=self._fleet.clock(),
            is_kept=is_kept,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            ideal_tokens=ideal_tokens,
        )
        self.release()

    def release(self) -> None:
        """Let go whoever may go now, one after the other, each started before the next is asked for."""
        if self._is_releasing or not self._held:
            return
        self._is_releasing = True
        try:
            while (released := self._next()) is not None:
                held = self._held.pop(released.ticket)
                self._turnover.passed(now=self._fleet.clock())
                self._ended(held, HoldEnd.RELEASED)
                held.go(released.admit.slots)
        finally:
            self._is_releasing = False

    def _next(self) -> Released | None:
        now = self._fleet.clock()
        for head in self._admission.heads:
            if now - (first := self._held[head]).routed_at >= _LOOK_AGAIN_SECONDS:
                first.routed_at = now
                self._admission.renew(head, first.route())
        return self._admission.release(self._view(), now=now, closed=self._fleet.breakers.closed_to(now=now))

    def _ended(self, held: HeldRequest, end: HoldEnd) -> None:
        held.waiting.end, held.waiting.seconds = end, self._fleet.clock() - held.since
        self._metrics.hold_seconds.labels(end).observe(held.waiting.seconds)

    def _oldest_seconds(self) -> float:
        oldest = next(iter(self._held.values()), None)
        return 0.0 if oldest is None else self._fleet.clock() - oldest.since

    def position(self, ticket: int) -> int | None:
        """Place in the queue, 1 at its head."""
        return self._admission.position(ticket)

    def cancel(self, ticket: int, end: HoldEnd) -> int:
        """Nobody waits for it any more. Returns the seconds that one who comes now would wait."""
        held = self._held.pop(ticket, None)
        if held is not None:
            self._ended(held, end)
            self._admission.cancel(ticket)
            self.release()
        return self._turnover.wait_seconds(len(self._held) + 1, now=self._fleet.clock())

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
        """In a second, or as soon as a place for a cold start should be free."""
        loop, seconds = asyncio.get_running_loop(), _LOOK_AGAIN_SECONDS
        if self._unheard:
            seconds = min(seconds, max(0.0, self._unheard[0][0] - self._fleet.clock()))
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._looked)

    def _looked(self) -> None:
        self._timer = None
        self._catch_up()
        self.release()
        if self._held:
            self._look_again()
