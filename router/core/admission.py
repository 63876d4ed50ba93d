"""Working-set admission: how many conversations may be alive on each rank at once.

When the contexts of all live conversations exceed the pools, every routing policy ends in the same thrash: each turn
recomputes what the turn before it evicted. Then only *not starting* conversations helps. Each admitted conversation
is charged with its context on the rank that serves it (``admission_charges``), and the charges of a rank stay within
its pool.

The contract, for the data plane (one thread; ``now`` from one monotonic clock; ``closed`` are slots that keep failing,
where nothing is sent while there are others):

1. ``offer(request, view, now=...)`` for a new arrival. ``Admit``: decide among ``admit.slots`` (None: any rank), send.
   ``Hold``: the request has joined the queue under ``hold.ticket``; keep its client waiting, visibly. One that failed
   and is to be tried elsewhere arrives anew, with ``exclude``.
2. ``start(request, slot, view, now=...)`` when it is sent; it returns a ``Visit``. Then ``visit.first_token()`` at the
   first byte, and ``finish(visit, now=...)`` when it is over, however it ended. Both may be repeated without effect. A
   pair of ranks is two visits: the decode rank's, then the prefill rank's, each told of its ``partner``.
3. ``release(view, now=...)`` after every first token, every finish, every change of the fleet, and once a second: the
   request at the head of the queue if it may go now, else None. Start it before asking for the next one. ``renew``
   tells what the caches hold by then of the one that waits longest.
4. ``cancel(ticket)`` when a held client has gone or has waited too long; ``forget_slot(slot)`` when a rank has gone.

Who passes: conversations that are admitted, where what they bring is cached or still fits; subagents, since their
parent waits for them; requests that are warm where there is room; requests that name no conversation, which cannot be
charged; and all while nobody serves the model, to be told so. All others wait in one strict FIFO until a rank has room
and no other cold start. Room is never made by running over: only conversations that have been idle for long lapse, one
after another and only as many as needed. A rank without any active conversation takes one of any size. Holding is
harmful for traffic that does not come back: ``guard`` switches it off and on, while charges are kept all the same.

Prefill and decode ranks have pools of their own, and each is charged with the contexts it is sent: the prompt here, the
prompt and its answer there. A new conversation needs room on a rank of each, and no other cold start on the prefill
rank. It is charged where its last request was: once a decode rank does without the other, that one's charge ends; and a
rank that keeps no cache between turns is charged for requests in flight alone. Who is admitted or warm on one of the
two passes where the other has room, or is not needed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from router.core.admission_charges import Charges
from router.core.admission_charges import Visit as Visit
from router.core.admission_guard import Guard
from router.core.admission_sizes import added_footprint, footprint, found_tokens, shared_tokens
from router.core.cost import LOAD_RATIO
from router.core.pace import prefill_seconds
from router.core.types import FleetView, RankView, RouteRequest, WorkerRole
from router.core.ways import Ways, prompt_alone


class Passage(StrEnum):
    """Why a request may go."""

    OFF = "off"  # the guard sees no use in holding
    KEYLESS = "keyless"  # no conversation to charge
    UNSERVED = "unserved"  # no rank can take it: waiting for room in a cache is of no use
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

    A budget below the pool leaves room for contexts to grow; ``warm_budget_ratio`` is how far they may. A prompt is
    warm if ``warm_ratio`` of it is cached, in whatever tier. Room is kept for an idle conversation in proportion to
    what its context costs to get back: for the part ``idle_ratio`` of the time in which the rank could fill its whole
    pool, by computing or, where a lower tier has the context, by loading; within bounds.
    """

    budget_ratio: float = 0.85
    warm_budget_ratio: float = 1.05
    warm_ratio: float = 0.7
    idle_ratio: float = 0.3
    least_idle_seconds: float = 15.0
    most_idle_seconds: float = 120.0


_NONE = frozenset[int]()


class Admission:
    """See the head of this file. Owns the queue and the charges, and teaches the guard."""

    def __init__(self, parameters: AdmissionParameters, guard: Guard | None = None) -> None:
        self.guard = guard if guard is not None else Guard()
        self.charges = Charges()
        self._parameters = parameters
        self._queue: OrderedDict[int, RouteRequest] = OrderedDict()
        self._tickets = 0
        self._pool_tokens = 0

    # --- the queue ------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def held_tokens(self) -> int:
        """Contexts that wait for room."""
        return sum(request.prompt_tokens + request.output_tokens for request in self._queue.values())

    @property
    def head(self) -> int | None:
        """The ticket of who waits longest."""
        return next(iter(self._queue), None)

    def position(self, ticket: int) -> int | None:
        """Place in the queue, 1 at its head; None if it does not wait."""
        return next((place for place, queued in enumerate(self._queue, start=1) if queued == ticket), None)

    def charged_tokens(self, slot: int) -> int:
        """What conversations occupy on a rank, the idle included."""
        book = self.charges.book(slot)
        return book.active_tokens + book.lapsable_tokens

    def offer(
        self, request: RouteRequest, view: FleetView, *, now: float, closed: frozenset[int] = _NONE
    ) -> Admit | Hold:
        """A request has arrived."""
        if request.session is not None:
            self.guard.arrived((request.model, request.session), now=now)
        ways = Ways.open(view, request, closed=closed)
        answer: Admit | Barrier | None = self._pass(request, ways, view, now=now)
        if answer is None and not ways.answering:
            answer = Admit(Passage.UNSERVED)
        if answer is None:
            answer = Barrier.QUEUE if self._queue else self._room(request, ways, view)
        if isinstance(answer, Admit):
            return answer
        self._tickets += 1
        self._queue[self._tickets] = request
        return Hold(self._tickets, len(self._queue), answer)

    def release(self, view: FleetView, *, now: float, closed: frozenset[int] = _NONE) -> Released | None:
        """The head of the queue, taken from it, if it may go."""
        if not self._queue:
            return None
        ticket, request = next(iter(self._queue.items()))
        ways = Ways.open(view, request, closed=closed)
        answer = self._pass(request, ways, view, now=now) or self._room(request, ways, view)
        if isinstance(answer, Barrier):
            return None
        del self._queue[ticket]
        return Released(ticket, answer)

    def renew(self, ticket: int, request: RouteRequest) -> None:
        """What the caches hold of a waiting request by now."""
        if ticket in self._queue:
            self._queue[ticket] = request

    def cancel(self, ticket: int) -> None:
        """Nobody waits for it any more. Unknown tickets are no error."""
        self._queue.pop(ticket, None)

    # --- requests under way ---------------------------------------------------------------------------

    def start(
        self, request: RouteRequest, slot: int, view: FleetView, *, now: float, partner: int | None = None
    ) -> Visit:
        """The request was sent to ``slot``; its conversation is charged there from now on. ``partner``: the other rank
        of a pair.
        """
        self._pool_tokens = sum(rank.pool_tokens or 0 for rank in view.ranks)
        rank = next((rank for rank in view.ranks if rank.slot == slot), None)
        computes = rank is not None and rank.part.role is WorkerRole.PREFILL
        visit = Visit(request.prompt_tokens, keeps=rank is None or rank.part.keeps_cache)
        if request.session is None:
            return visit
        self.charges.age(now)
        request = prompt_alone(request) if computes else request
        assert request.session is not None, "as before"
        conversation = (request.model, request.session)
        charge = self.charges.of(conversation).get(slot)
        common_tokens = shared_tokens(request, view)[WorkerRole.UNIFIED if rank is None else rank.part.role]
        visit.footprint_tokens = footprint(request, shared_tokens=common_tokens)
        visit.output_tokens = request.output_tokens
        visit.found_tokens = found_tokens(request, slot, shared_tokens=common_tokens)
        covered_tokens = request.charged_elsewhere.get(slot, 0) if charge is None else charge.tokens
        visit.cold = (
            (computes or partner is None)
            and not request.session.agent
            and covered_tokens < self._parameters.warm_ratio * visit.footprint_tokens
            and not self._is_warm(request, slot)
        )
        patience_seconds = self._patience_seconds(request, rank)
        self.charges.open(conversation, visit, slot, partner=partner, patience_seconds=patience_seconds)
        self.charges.book(slot).budget_tokens = self._budget_tokens(rank)
        self.charges.lapse(slot)
        return visit

    def finish(
        self,
        visit: Visit,
        *,
        now: float,
        is_kept: bool = True,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        ideal_tokens: int | None = None,
    ) -> None:
        """The request is over. ``is_kept``: it has left its context in the cache, with an answer of so many tokens, if
        that is known. What the engine reused, and what an endless cache would have, teach the guard.
        """
        if not visit.open:
            return
        visit.open = False
        visit.leave_start()
        if cached_tokens is not None and ideal_tokens is not None:
            self.guard.computed(
                tokens=max(0, visit.prompt_tokens - cached_tokens),
                evicted_tokens=max(0, ideal_tokens - cached_tokens),
                pool_tokens=self._pool_tokens,
                is_holding=bool(self._queue),
                now=now,
            )
        if visit.charge is None:
            return
        answer_tokens = visit.output_tokens if output_tokens is None else output_tokens
        left_tokens = visit.footprint_tokens - visit.output_tokens + answer_tokens
        self.charges.close(visit, left_tokens=left_tokens if is_kept and visit.keeps else None, now=now)
        conversation = visit.charge.conversation
        if is_kept and not self.charges.is_at_work(conversation):  # what failed will be tried again, which is no return
            self.guard.left(conversation, now=now)

    def forget_slot(self, slot: int) -> None:
        """The rank is gone: its conversations start anew elsewhere."""
        self.charges.forget_slot(slot)

    # --- rules ----------------------------------------------------------------------------------------

    def _pass(self, request: RouteRequest, ways: Ways, view: FleetView, *, now: float) -> Admit | None:
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
        self.charges.age(now)
        home, warm = self._known(request, ways.answering, view)
        if ways.prefill:
            prompt = prompt_alone(request)
            prompt_home, prompt_warm = self._known(prompt, ways.prefill, view)
            home, warm = home | prompt_home, warm | prompt_warm
            if not ways.complete(home | warm) and (prompt_home or prompt_warm):  # it is handed to any that has room
                warm |= self._with_room(request, ways.decode, view, ratio=self._parameters.warm_budget_ratio)
        slots = ways.complete(home | warm)
        if not slots:
            return None
        at_home = slots & home
        # Where nobody waits it may go elsewhere, too: home may be busy, and what is warm no more than a shared head.
        elsewhere = _NONE
        if not self._queue:
            roomy = self._roomy(request, ways, view)
            elsewhere = roomy if at_home else self._without_starts(roomy)
        return Admit(Passage.ADMITTED if at_home else Passage.WARM, slots | elsewhere)

    def _known(
        self, request: RouteRequest, ranks: Sequence[RankView], view: FleetView
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Where the conversation is charged and fits or is warm; and all ranks where it is warm and fits."""
        fitting = self._with_room(request, ranks, view, ratio=self._parameters.warm_budget_ratio)
        warm = frozenset(slot for slot in fitting if self._is_warm(request, slot))
        assert request.session is not None, "what names no conversation passes"
        known = self.charges.of((request.model, request.session)).keys() | request.charged_elsewhere
        own = {slot for slot in known if slot in fitting or self._is_warm(request, slot)}
        return frozenset(rank.slot for rank in ranks if rank.slot in own), warm

    def _room(self, request: RouteRequest, ways: Ways, view: FleetView) -> Admit | Barrier:
        """The head of the queue goes where there is room and nobody else is starting cold."""
        ways = ways.beginning
        roomy = ways.complete(self._roomy(request, ways, view))
        if slots := ways.complete(self._without_starts(roomy)):
            return Admit(Passage.ROOM, slots)
        return Barrier.COLD_START if roomy else Barrier.BUDGET

    def _roomy(self, request: RouteRequest, ways: Ways, view: FleetView) -> frozenset[int]:
        """Ranks whose budgets leave room for their part of the request."""
        ratio = self._parameters.budget_ratio
        roomy = self._with_room(request, ways.answering, view, ratio=ratio)
        if ways.prefill:
            roomy |= self._with_room(prompt_alone(request), ways.prefill, view, ratio=ratio)
        return roomy

    def _without_starts(self, slots: frozenset[int]) -> frozenset[int]:
        return frozenset(slot for slot in slots if not self.charges.book(slot).cold_starts)

    def _with_room(
        self, request: RouteRequest, ranks: Sequence[RankView], view: FleetView, *, ratio: float
    ) -> frozenset[int]:
        """Ranks whose active charges leave room for the request; one with none takes any size."""
        assert request.session is not None, "what names no conversation passes"
        shared = shared_tokens(request, view)
        charges = self.charges.of((request.model, request.session))
        roomy = []
        for rank in ranks:
            charge = charges.get(rank.slot)
            elsewhere_tokens = rank.load.charged_tokens - request.charged_elsewhere.get(rank.slot, 0)
            others_tokens = self.charges.book(rank.slot).active_tokens + max(0, elsewhere_tokens)
            charged_tokens = added_tokens = added_footprint(
                request, rank.slot, charge, shared_tokens=shared[rank.part.role]
            )
            if charge is not None:
                others_tokens -= 0 if charge.is_lapsable else charge.tokens
                charged_tokens = charge.tokens_with(added_tokens)
            is_free = not others_tokens and (charge is None or not charge.inflight)
            if rank.pool_tokens is None or is_free or others_tokens + charged_tokens <= ratio * rank.pool_tokens:
                roomy.append(rank.slot)
        return frozenset(roomy)

    def _is_warm(self, request: RouteRequest, slot: int) -> bool:
        held = max(request.reusable_tokens.get(slot, 0), request.loadable_tokens.get(slot, 0))
        return held >= self._parameters.warm_ratio * request.prompt_tokens

    def _budget_tokens(self, rank: RankView | None) -> float:
        if rank is None or rank.pool_tokens is None:
            return math.inf
        return self._parameters.budget_ratio * rank.pool_tokens - rank.load.charged_tokens

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

    def _shed(self, view: FleetView) -> None:
        """While the guard was off charges may have outgrown the ranks."""
        for rank in view.ranks:
            self.charges.book(rank.slot).budget_tokens = self._budget_tokens(rank)
            self.charges.shed(rank.slot)
