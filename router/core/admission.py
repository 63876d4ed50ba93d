"""Working-set admission: how many conversations may be alive on each rank at once.

When the contexts of all live conversations exceed the pools, every routing policy ends in the same thrash: each turn
recomputes what the turn before it evicted. Then only *not starting* conversations helps. Each admitted conversation
is charged with its context on the rank that serves it, and the charges of a rank stay within its pool.

The contract, for the data plane (one thread; ``now`` from one monotonic clock):

1. ``offer(request, view, now=...)`` for a new arrival. ``Admit``: decide among ``admit.slots`` (None: any rank), send.
   ``Hold``: the request has joined the queue under ``hold.ticket``; keep its client waiting, visibly.
2. ``start(request, slot, view, now=...)`` when it is sent; it returns a ``Visit``. Then ``visit.first_token()`` at the
   first byte, and ``finish(visit, now=...)`` when it is over, however it ended. Both may be repeated without effect.
3. ``release(view, now=...)`` after every first token, every finish, every change of the fleet, and once a second: the
   request at the head of the queue if it may go now, else None. Start it before asking for the next one.
4. ``cancel(ticket)`` when a held client has gone or has waited too long; ``forget_slot(slot)`` when a rank has gone.

Who passes: conversations that are admitted; subagents, since their parent waits for them; requests that are warm
where there is room; requests that name no conversation, which cannot be charged. All others wait in one strict FIFO
until a rank has room and no other cold start. Room is never made by running over: only conversations that have been
idle for long lapse, one after another and only as many as needed. A rank without any active conversation takes
one of any size. Holding is harmful for traffic that does not come back: ``guard`` switches it off and on, while
charges are kept all the same.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from router.core.admission_guard import Guard
from router.core.cost import LOAD_RATIO
from router.core.pace import prefill_seconds
from router.core.returns import Conversation
from router.core.types import FleetView, RankStatus, RankView, RouteRequest


class Passage(StrEnum):
    """Why a request may go."""

    OFF = "off"  # the guard sees no use in holding
    KEYLESS = "keyless"  # no conversation to charge
    CHILD = "child"  # its parent waits for it
    ADMITTED = "admitted"  # its conversation is charged already
    WARM = "warm"  # most of it is cached where it still fits
    ROOM = "room"  # a rank has room for it


class Barrier(StrEnum):
    """Why a request is held."""

    QUEUE = "queue"  # others came first
    COLD_START = "cold_start"  # where there is room, another cold conversation is being computed
    BUDGET = "budget"  # no rank has room


@dataclass(frozen=True, slots=True)
class Admit:
    """May be sent, to one of ``slots`` (None: wherever the policy likes)."""

    why: Passage
    slots: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Must wait; ``position`` counts from 1 at the head of the queue."""

    ticket: int
    position: int
    why: Barrier


@dataclass(frozen=True, slots=True)
class Released:
    """A held request that may go now."""

    ticket: int
    admit: Admit


@dataclass(frozen=True, slots=True)
class AdmissionParameters:
    """Shares of a rank's pool that charges may fill, and how long a conversation is idle before it may lapse.

    A budget below the pool leaves room for contexts to grow. A prompt is warm if ``warm_ratio`` of it is cached, in
    whatever tier. Room is kept for an idle conversation in proportion to what its context costs to get back: for the
    part ``idle_ratio`` of the time in which the rank could fill its whole pool, by computing or, where a lower tier has
    the context, by loading; within bounds.
    """

    budget_ratio: float = 0.85
    warm_budget_ratio: float = 1.05
    warm_ratio: float = 0.7
    idle_ratio: float = 0.3
    least_idle_seconds: float = 15.0
    most_idle_seconds: float = 120.0


@dataclass(slots=True, eq=False)
class _Charge:
    """What one conversation occupies, and where. It lives as long as the conversation is admitted."""

    slot: int
    tokens: int = 0
    inflight: int = 0
    idle_since: float = 0.0
    patience_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Book:
    """One rank's charges: those in use or lately so, and those idle for long. The idle are in the order of idleness,
    the lapsable in that in which they became so.
    """

    active_tokens: int = 0
    lapsable_tokens: int = 0
    cold_starts: int = 0
    idle: OrderedDict[Conversation, _Charge] = field(default_factory=OrderedDict)
    lapsable: OrderedDict[Conversation, _Charge] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class Visit:
    """One request under way. ``cold`` takes its rank's only place for cold starts until the first token."""

    prompt_tokens: int
    conversation: Conversation | None = None
    charge: _Charge | None = None
    book: _Book | None = None
    cold: bool = False
    open: bool = True

    def first_token(self) -> None:
        """Its prefill is over."""
        if self.cold and self.book is not None:
            self.book.cold_starts -= 1
        self.cold = False


class Admission:
    """See the head of this file. Owns the queue and the charges, and teaches the guard."""

    def __init__(self, parameters: AdmissionParameters, guard: Guard | None = None) -> None:
        self.guard = guard if guard is not None else Guard()
        self._parameters = parameters
        self._charges: dict[Conversation, _Charge] = {}
        self._books: dict[int, _Book] = {}
        self._idle: list[tuple[float, int, Conversation, _Charge]] = []  # a heap by when they may lapse
        self._idled = 0
        self._queue: OrderedDict[int, RouteRequest] = OrderedDict()
        self._tickets = 0
        self._pool_tokens = 0

    # --- the queue ------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def position(self, ticket: int) -> int | None:
        """Place in the queue, 1 at its head; None if it does not wait."""
        return next((place for place, queued in enumerate(self._queue, start=1) if queued == ticket), None)

    def charged_tokens(self, slot: int) -> int:
        """What conversations occupy on a rank, the idle included."""
        book = self._book(slot)
        return book.active_tokens + book.lapsable_tokens

    def offer(self, request: RouteRequest, view: FleetView, *, now: float) -> Admit | Hold:
        """A request has arrived."""
        if request.session is not None:
            self.guard.arrived((request.model, request.session), now=now)
        answer: Admit | Barrier | None = self._pass(request, view, now=now)
        if answer is None:
            answer = Barrier.QUEUE if self._queue else self._room(request, view)
        if isinstance(answer, Admit):
            return answer
        self._tickets += 1
        self._queue[self._tickets] = request
        return Hold(self._tickets, len(self._queue), answer)

    def release(self, view: FleetView, *, now: float) -> Released | None:
        """The head of the queue, taken from it, if it may go."""
        if not self._queue:
            return None
        ticket, request = next(iter(self._queue.items()))
        answer = self._pass(request, view, now=now) or self._room(request, view)
        if isinstance(answer, Barrier):
            return None
        del self._queue[ticket]
        return Released(ticket, answer)

    def cancel(self, ticket: int) -> None:
        """Nobody waits for it any more. Unknown tickets are no error."""
        self._queue.pop(ticket, None)

    # --- requests under way ---------------------------------------------------------------------------

    def start(self, request: RouteRequest, slot: int, view: FleetView, *, now: float) -> Visit:
        """The request was sent to ``slot``; its conversation is charged there from now on."""
        self._pool_tokens = sum(rank.pool_tokens or 0 for rank in view.ranks)
        if request.session is None:
            return Visit(request.prompt_tokens)
        self._age(now)
        conversation = (request.model, request.session)
        charge = self._charges.get(conversation)
        cold = charge is None and not request.session.agent and not self._is_warm(request, slot)
        if charge is None:
            charge = self._charges[conversation] = _Charge(slot)
        else:
            self._strike(conversation, charge)
        book = self._book(slot)
        charge.slot, charge.tokens = slot, _footprint(request, view)
        rank = next((rank for rank in view.ranks if rank.slot == slot), None)
        charge.patience_seconds = self._patience_seconds(request, rank)
        charge.inflight += 1
        book.active_tokens += charge.tokens
        book.cold_starts += cold
        self._lapse(book, budget_tokens=self._budget_tokens(rank))
        return Visit(request.prompt_tokens, conversation, charge, book, cold)

    def finish(
        self, visit: Visit, *, now: float, cached_tokens: int | None = None, ideal_tokens: int | None = None
    ) -> None:
        """The request is over. What the engine reused, and what an endless cache would have, teach the guard."""
        if not visit.open:
            return
        visit.open = False
        visit.first_token()
        if cached_tokens is not None and ideal_tokens is not None:
            self.guard.computed(
                tokens=max(0, visit.prompt_tokens - cached_tokens),
                evicted_tokens=max(0, ideal_tokens - cached_tokens),
                pool_tokens=self._pool_tokens,
                is_holding=bool(self._queue),
                now=now,
            )
        conversation, charge = visit.conversation, visit.charge
        if conversation is None or charge is None:
            return
        charge.inflight -= 1
        if not charge.inflight:
            self.guard.left(conversation, now=now)
            charge.idle_since = now
            if self._charges.get(conversation) is charge:
                self._book(charge.slot).idle[conversation] = charge
                self._idled += 1
                heapq.heappush(self._idle, (now + charge.patience_seconds, self._idled, conversation, charge))

    def forget_slot(self, slot: int) -> None:
        """The rank is gone: its conversations start anew elsewhere."""
        self._books.pop(slot, None)
        for conversation in [name for name, charge in self._charges.items() if charge.slot == slot]:
            del self._charges[conversation]

    # --- rules ----------------------------------------------------------------------------------------

    def _pass(self, request: RouteRequest, view: FleetView, *, now: float) -> Admit | None:
        """Those whom no queue stops."""
        if request.session is None:
            return Admit(Passage.KEYLESS)
        if request.session.agent:
            return Admit(Passage.CHILD)
        was_on = self.guard.on
        if not self.guard.decide(now=now):
            return Admit(Passage.OFF)
        if not was_on:
            self._shed(view)
        self._age(now)
        if (request.model, request.session) in self._charges:
            return Admit(Passage.ADMITTED)
        ratio = self._parameters.warm_budget_ratio
        warm = [rank.slot for rank in self._with_room(request, view, ratio=ratio) if self._is_warm(request, rank.slot)]
        if not warm:
            return None
        # Where nobody waits, what is warm may go elsewhere too: it may be no more than a head that many share.
        room = None if self._queue else self._room(request, view)
        elsewhere = room.slots if isinstance(room, Admit) and room.slots else frozenset[int]()
        return Admit(Passage.WARM, frozenset(warm) | elsewhere)

    def _room(self, request: RouteRequest, view: FleetView) -> Admit | Barrier:
        """The head of the queue goes where there is room and nobody else is starting cold."""
        roomy = self._with_room(request, view, ratio=self._parameters.budget_ratio)
        slots = frozenset(rank.slot for rank in roomy if not self._book(rank.slot).cold_starts)
        if slots:
            return Admit(Passage.ROOM, slots)
        return Barrier.COLD_START if roomy else Barrier.BUDGET

    def _with_room(self, request: RouteRequest, view: FleetView, *, ratio: float) -> list[RankView]:
        """Ranks whose active charges leave room for the request; one with none takes any size."""
        tokens = _footprint(request, view)
        roomy = []
        for rank in _serving(request, view):
            active = self._book(rank.slot).active_tokens
            if rank.pool_tokens is None or not active or active + tokens <= ratio * rank.pool_tokens:
                roomy.append(rank)
        return roomy

    def _is_warm(self, request: RouteRequest, slot: int) -> bool:
        held = max(request.reusable_tokens.get(slot, 0), request.loadable_tokens.get(slot, 0))
        return held >= self._parameters.warm_ratio * request.prompt_tokens

    def _budget_tokens(self, rank: RankView | None) -> float:
        if rank is None or rank.pool_tokens is None:
            return float("inf")
        return self._parameters.budget_ratio * rank.pool_tokens

    def _patience_seconds(self, request: RouteRequest, rank: RankView | None) -> float:
        """How long the conversation may be idle before others may have its room."""
        parameters = self._parameters
        if rank is None or not rank.pool_tokens:
            return parameters.most_idle_seconds
        tokens = max(1, request.prompt_tokens)
        seconds = prefill_seconds(rank.pace, uncached_tokens=tokens, context_tokens=tokens)
        if request.loadable_tokens.get(rank.slot, 0) >= parameters.warm_ratio * tokens:
            seconds *= LOAD_RATIO
        wanted = parameters.idle_ratio * seconds * rank.pool_tokens / tokens
        return min(parameters.most_idle_seconds, max(parameters.least_idle_seconds, wanted))

    # --- charges --------------------------------------------------------------------------------------

    def _book(self, slot: int) -> _Book:
        return self._books.setdefault(slot, _Book())

    def _age(self, now: float) -> None:
        """Charges that have been idle for long become lapsable."""
        while self._idle and self._idle[0][0] < now:
            due, _, conversation, charge = heapq.heappop(self._idle)
            book = self._book(charge.slot)
            if due != charge.idle_since + charge.patience_seconds or book.idle.get(conversation) is not charge:
                continue  # it has been at work since, or is gone
            book.lapsable[conversation] = book.idle.pop(conversation)
            book.active_tokens -= charge.tokens
            book.lapsable_tokens += charge.tokens

    def _lapse(self, book: _Book, *, budget_tokens: float) -> None:
        """End conversations, the longest lapsable first, until the charges fit, or none is left that may lapse."""
        while book.lapsable and book.active_tokens + book.lapsable_tokens > budget_tokens:
            conversation, charge = book.lapsable.popitem(last=False)
            book.lapsable_tokens -= charge.tokens
            del self._charges[conversation]

    def _shed(self, view: FleetView) -> None:
        """While the guard was off charges may have outgrown the ranks: the idle go first, then the newest in flight."""
        for rank in view.ranks:
            book, budget_tokens = self._book(rank.slot), self._budget_tokens(rank)
            self._lapse(book, budget_tokens=budget_tokens)
            if book.active_tokens <= budget_tokens:
                continue
            here = [name for name, charge in reversed(self._charges.items()) if charge.slot == rank.slot]
            for conversation in [*book.idle, *(name for name in here if self._charges[name].inflight)]:
                if book.active_tokens <= budget_tokens:
                    break
                self._strike(conversation, self._charges.pop(conversation))

    def _strike(self, conversation: Conversation, charge: _Charge) -> None:
        """Take a charge out of its rank's book."""
        book = self._book(charge.slot)
        if book.lapsable.pop(conversation, None) is not None:
            book.lapsable_tokens -= charge.tokens
        else:
            book.idle.pop(conversation, None)
            book.active_tokens -= charge.tokens


def _serving(request: RouteRequest, view: FleetView) -> list[RankView]:
    return [
        rank
        for rank in view.ranks
        if rank.status is RankStatus.READY and request.model in rank.models and rank.slot not in request.exclude
    ]


def _footprint(request: RouteRequest, view: FleetView) -> int:
    """Tokens that the conversation occupies by itself: what every rank holds of it is shared, and stored once."""
    held = [request.reusable_tokens.get(rank.slot, 0) for rank in _serving(request, view)]
    shared = min(held) if len(held) > 1 else 0
    return request.prompt_tokens - shared + request.output_tokens
