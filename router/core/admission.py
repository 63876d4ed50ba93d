"""Working-set admission: how many conversations may be alive on each rank at once.

When the contexts of all live conversations exceed the pools, every routing policy ends in the same thrash: each turn
recomputes what the turn before it evicted. Then only *not starting* conversations helps. Each admitted conversation
is charged with its context on the rank that serves it, and the charges of a rank stay within its pool.

The contract, for the data plane (one thread; ``now`` from one monotonic clock):

1. ``offer(request, view, now=...)`` for a new arrival. ``Admit``: decide among ``admit.slots`` (None: any rank), send.
   ``Hold``: the request has joined the one queue under ``hold.ticket``; keep the client waiting, visibly.
2. ``start(request, rank, now=...)`` when the request is sent; it returns a ``Visit``. Then ``visit.first_token()`` at its
   first byte, and ``finish(visit, now=...)`` when it is over, however it ended. Both may be repeated without effect.
3. ``release(view, now=...)`` after every first token, every finish, every change of the fleet, and once a second: the
   request at the head of the queue if it may go now, else None. Start it before asking for the next one.
4. ``cancel(ticket)`` when a held client has gone or has waited too long.

Who passes: conversations that are admitted; subagents, since their parent waits for them; requests that are warm
where there is room; requests that name no conversation, which cannot be charged. All others wait in one strict FIFO
until a rank has room and no other cold start. Room is never made by running over: only conversations that have been
idle for long lapse, the longest idle first and only as many as needed. A rank without any active conversation takes
one of any size.

Holding is harmful for traffic that does not come back, and needless while nothing is evicted. The ``Guard`` learns both
and switches holding off; charges are kept all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from router.core.types import FleetView, RankStatus, RankView, RouteRequest, SessionKey


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
    """Shares of a rank's pool that charges may fill, and how long a conversation is idle before it may lapse."""

    budget_ratio: float = 0.95
    warm_budget_ratio: float = 1.05
    warm_ratio: float = 0.7
    idle_seconds: float = 60.0


@dataclass(slots=True, eq=False)
class _Charge:
    slot: int
    tokens: int
    inflight: int = 0
    idle_since: float = 0.0


@dataclass(slots=True, eq=False)
class Visit:
    """One request under way. ``cold`` holds its rank's only place for cold starts until the first token."""

    conversation: tuple[str, SessionKey] | None
    charge: _Charge | None
    book: _Book | None
    cold: bool
    prompt_tokens: int
    open: bool = True

    def first_token(self) -> None:
        """Its prefill is over."""
        if self.cold and self.book is not None:
            self.book.cold_starts -= 1
            self.cold = False


@dataclass(slots=True, eq=False)
class _Book:
    """One rank's charges. Idle ones are in the order in which they fell idle; ``lapsable`` are those idle for long."""

    active_tokens: int = 0
    lapsable_tokens: int = 0
    cold_starts: int = 0
    idle: OrderedDict[tuple[str, SessionKey], _Charge] = field(default_factory=OrderedDict)
    lapsable: OrderedDict[tuple[str, SessionKey], _Charge] = field(default_factory=OrderedDict)


class Guard:
    """Whether holding is of use: conversations come back soon, and prefill is spent on what was evicted.

    Both are decayed shares that begin as if they were true, so that a cold fleet is not flooded before anything is
    known. Each has a lower threshold for going off than for going on.
    """

    RETURN_SECONDS = 60.0
    _RETURN_ON, _RETURN_OFF = 0.6, 0.5
    _EVICTED_ON, _EVICTED_OFF = 0.1, 0.05
    #: Observations, and seconds, over which the shares forget half.
    _RETURNS_HALVE = 200
    _EVICTED_HALVE_SECONDS = 120.0
    _PRIOR_RETURNS = 10.0

    def __init__(self) -> None:
        self.on = True
        self._left: OrderedDict[tuple[str, SessionKey], float] = OrderedDict()
        self._returned = self._PRIOR_RETURNS
        self._departed = self._PRIOR_RETURNS
        self._evicted_tokens = 1.0
        self._computed_tokens = 1.0
        self._decayed_at = 0.0

    @property
    def return_ratio(self) -> float:
        """Share of conversations that ask again within a minute of their last answer."""
        return self._returned / self._departed

    @property
    def evicted_ratio(self) -> float:
        """Share of computed prompt tokens that had been computed before."""
        return self._evicted_tokens / self._computed_tokens

    def arrived(self, conversation: tuple[str, SessionKey], *, now: float) -> None:
        """A request of the conversation came."""
        self._give_up(now)
        if self._left.pop(conversation, None) is not None:
            self._count(returned=1.0)

    def left(self, conversation: tuple[str, SessionKey], *, now: float) -> None:
        """It was answered, and nothing else of it runs."""
        self._left[conversation] = now
        self._left.move_to_end(conversation)

    def computed(self, *, tokens: int, evicted_tokens: int, now: float) -> None:
        """A prompt needed so many tokens computed, of which so many had been computed before."""
        fade = 0.5 ** ((now - self._decayed_at) / self._EVICTED_HALVE_SECONDS)
        self._decayed_at = now
        self._computed_tokens = self._computed_tokens * fade + tokens
        self._evicted_tokens = self._evicted_tokens * fade + evicted_tokens

    def decide(self, *, now: float) -> bool:
        """Whether to hold, from now on."""
        self._give_up(now)
        if self.on:
            self.on = self.return_ratio > self._RETURN_OFF and self.evicted_ratio > self._EVICTED_OFF
        else:
            self.on = self.return_ratio > self._RETURN_ON and self.evicted_ratio > self._EVICTED_ON
        return self.on

    def _give_up(self, now: float) -> None:
        """Who has been away for a minute has not come back."""
        while self._left:
            conversation, left_at = next(iter(self._left.items()))
            if now - left_at <= self.RETURN_SECONDS:
                return
            del self._left[conversation]
            self._count(returned=0.0)

    def _count(self, *, returned: float) -> None:
        fade = 0.5 ** (1 / self._RETURNS_HALVE)
        self._returned = self._returned * fade + returned
        self._departed = self._departed * fade + 1.0


class Admission:
    """See the head of this file. Owns the queue, the charges and the guard."""

    def __init__(self, parameters: AdmissionParameters, guard: Guard | None = None) -> None:
        self._parameters = parameters
        self.guard = guard if guard is not None else Guard()
        self._charges: dict[tuple[str, SessionKey], _Charge] = {}
        self._books: dict[int, _Book] = {}
        self._queue: OrderedDict[int, RouteRequest] = OrderedDict()
        self._tickets = 0

    # --- the queue ------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def position(self, ticket: int) -> int:
        """Place in the queue, 1 at its head. Raises ``KeyError`` when it no longer waits."""
        if ticket not in self._queue:
            raise KeyError(ticket)
        return 1 + next(place for place, queued in enumerate(self._queue) if queued == ticket)

    def offer(self, request: RouteRequest, view: FleetView, *, now: float) -> Admit | Hold:
        """A request has arrived."""
        if request.session is not None:
            self.guard.arrived((request.model, request.session), now=now)
        passed = self._pass(request, view, now=now)
        if isinstance(passed, Barrier) and not self._queue:
            passed = self._room(request, view, now=now)
        if isinstance(passed, Admit):
            return passed
        self._tickets += 1
        self._queue[self._tickets] = request
        return Hold(self._tickets, len(self._queue), passed)

    def release(self, view: FleetView, *, now: float) -> Released | None:
        """The head of the queue, taken from it, if it may go."""
        if not self._queue:
            return None
        ticket, request = next(iter(self._queue.items()))
        admit = self._pass(request, view, now=now)
        if isinstance(admit, Barrier):
            admit = self._room(request, view, now=now)
        if isinstance(admit, Barrier):
            return None
        del self._queue[ticket]
        return Released(ticket, admit)

    def cancel(self, ticket: int) -> None:
        """Nobody waits for it any more. Unknown tickets are no error."""
        self._queue.pop(ticket, None)

    # --- requests under way ---------------------------------------------------------------------------

    def start(self, request: RouteRequest, rank: RankView, *, now: float) -> Visit:
        """The request was sent to ``rank``; its conversation is charged there from now on."""
        if request.session is None or request.session.agent:
            return Visit(None, None, None, cold=False, prompt_tokens=request.prompt_tokens)
        conversation = (request.model, request.session)
        tokens = request.prompt_tokens + request.output_tokens
        charge = self._charges.get(conversation)
        cold = charge is None and not self._is_warm(request, rank.slot)
        if charge is None:
            charge = self._charges[conversation] = _Charge(rank.slot, 0)
        else:
            self._take_out(conversation, charge)
        book = self._book(rank.slot)
        charge.slot, charge.tokens = rank.slot, tokens
        charge.inflight += 1
        book.active_tokens += tokens
        book.cold_starts += cold
        if rank.pool_tokens is not None:
            self._lapse(book, budget_tokens=self._parameters.budget_ratio * rank.pool_tokens)
        return Visit(conversation, charge, book, cold, request.prompt_tokens)

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
                now=now,
            )
        conversation, charge = visit.conversation, visit.charge
        if conversation is None or charge is None:
            return
        charge.inflight -= 1
        if charge.inflight == 0:
            self.guard.left(conversation, now=now)
            if self._charges.get(conversation) is charge:
                charge.idle_since = now
                self._book(charge.slot).idle[conversation] = charge

    def forget_slot(self, slot: int) -> None:
        """The rank is gone: its conversations start anew elsewhere."""
        self._books.pop(slot, None)
        for conversation in [name for name, charge in self._charges.items() if charge.slot == slot]:
            del self._charges[conversation]

    # --- rules ----------------------------------------------------------------------------------------

    def _pass(self, request: RouteRequest, view: FleetView, *, now: float) -> Admit | Barrier:
        """Those who pass the queue."""
        if request.session is None:
            return Admit(Passage.KEYLESS)
        if request.session.agent:
            return Admit(Passage.CHILD)
        if not self._decide(view, now=now):
            return Admit(Passage.OFF)
        self._age(now)
        charge = self._charges.get((request.model, request.session))
        if charge is not None:
            return Admit(Passage.ADMITTED)
        warm = frozenset(
            rank.slot
            for rank in _serving(view, request)
            if self._is_warm(request, rank.slot) and self._fits(rank, request, ratio=self._parameters.warm_budget_ratio)
        )
        if warm:
            return Admit(Passage.WARM, warm)
        return Barrier.QUEUE

    def _room(self, request: RouteRequest, view: FleetView, *, now: float) -> Admit | Barrier:
        """The head of the queue goes where there is room and nobody else is starting cold."""
        roomy = [
            rank.slot
            for rank in _serving(view, request)
            if self._fits(rank, request, ratio=self._parameters.budget_ratio)
        ]
        slots = frozenset(slot for slot in roomy if not self._book(slot).cold_starts)
        if slots:
            return Admit(Passage.ROOM, slots)
        return Barrier.COLD_START if roomy else Barrier.BUDGET

    def _fits(self, rank: RankView, request: RouteRequest, *, ratio: float) -> bool:
        if rank.pool_tokens is None:
            return True
        active = self._book(rank.slot).active_tokens
        return not active or active + request.prompt_tokens + request.output_tokens <= ratio * rank.pool_tokens

    def _is_warm(self, request: RouteRequest, slot: int) -> bool:
        return request.reusable_tokens.get(slot, 0) >= self._parameters.warm_ratio * request.prompt_tokens

    def _decide(self, view: FleetView, *, now: float) -> bool:
        was_on = self.guard.on
        if self.guard.decide(now=now) and not was_on:
            for rank in view.ranks:
                if rank.pool_tokens is not None:
                    self._shed(rank.slot, budget_tokens=self._parameters.budget_ratio * rank.pool_tokens)
        return self.guard.on

    # --- charges --------------------------------------------------------------------------------------

    def _book(self, slot: int) -> _Book:
        book = self._books.get(slot)
        if book is None:
            book = self._books[slot] = _Book()
        return book

    def _age(self, now: float) -> None:
        """Charges that have been idle for long become lapsable."""
        for book in self._books.values():
            while book.idle:
                conversation, charge = next(iter(book.idle.items()))
                if now - charge.idle_since <= self._parameters.idle_seconds:
                    break
                del book.idle[conversation]
                book.lapsable[conversation] = charge
                book.active_tokens -= charge.tokens
                book.lapsable_tokens += charge.tokens

    def _lapse(self, book: _Book, *, budget_tokens: float) -> None:
        """End the longest idle conversations until the charges fit, or none is left that may lapse."""
        while book.lapsable and book.active_tokens + book.lapsable_tokens > budget_tokens:
            conversation, charge = book.lapsable.popitem(last=False)
            book.lapsable_tokens -= charge.tokens
            del self._charges[conversation]

    def _shed(self, slot: int, *, budget_tokens: float) -> None:
        """While the guard was off charges have outgrown the rank: idle ones go first, then the newest in flight."""
        book = self._book(slot)
        self._lapse(book, budget_tokens=budget_tokens)
        running = [name for name, charge in reversed(self._charges.items()) if charge.slot == slot and charge.inflight]
        for conversation in [*book.idle, *running]:
            if book.active_tokens <= budget_tokens:
                return
            self._take_out(conversation, self._charges.pop(conversation))

    def _take_out(self, conversation: tuple[str, SessionKey], charge: _Charge) -> None:
        """Strike a charge from its rank's book."""
        book = self._book(charge.slot)
        if book.lapsable.pop(conversation, None) is not None:
            book.lapsable_tokens -= charge.tokens
        else:
            book.idle.pop(conversation, None)
            book.active_tokens -= charge.tokens


def _serving(view: FleetView, request: RouteRequest) -> list[RankView]:
    return [
        rank
        for rank in view.ranks
        if rank.status is RankStatus.READY and request.model in rank.models and rank.slot not in request.exclude
    ]
