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
3. ``release(view, now=...)`` after every first token, every finish, every change of the fleet, and once a second: who
   waits longest of those that may go now, else None. Start it before asking for the next one. ``renew`` tells what the
   caches hold by then of the ``heads``.
4. ``cancel(ticket)`` when a held client has gone or has waited too long; ``forget_slot(slot)`` when a rank has gone.

Who passes: conversations that are admitted, where what they bring is cached or still fits; subagents, since their
parent waits for them; requests that are warm where there is room; requests that name no conversation, which cannot be
charged; and all while nobody serves the model, to be told so. All others wait until a rank has room and no other cold
start; a rank's room is for whoever came first of those that it could serve. The same rules hold for who comes and who
waits. Warm requests overtake one that waits until they have taken as much as lies between the two budgets of its ranks.
Room is never made by running over: only conversations that have been idle for long lapse, one after another and only as
many as needed. A rank without any active conversation takes one of any size. Holding is harmful for traffic that does
not come back: ``guard`` switches it off and on, while charges are kept all the same.

Prefill and decode ranks have pools of their own, and each is charged with the contexts it is sent: the prompt here, the
prompt and its answer there. A new conversation needs room on a rank of each, and no other cold start on the prefill
rank. It is charged where its last request was: once a decode rank does without the other, that one's charge ends; and a
rank that keeps no cache between turns is charged for requests in flight alone. Who is admitted or warm on one of the
two passes where the other has room, or is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Final

from router.core.admission_charges import Charges
from router.core.admission_charges import Visit as Visit
from router.core.admission_guard import Guard
from router.core.admission_queue import Claim, Queue, wanted
from router.core.admission_sizes import added_footprint, footprint, found_tokens, shared_tokens
from router.core.admission_types import AdmissionParameters as AdmissionParameters
from router.core.admission_types import Admit as Admit
from router.core.admission_types import Barrier as Barrier
from router.core.admission_types import Hold as Hold
from router.core.admission_types import Passage as Passage
from router.core.admission_types import Released as Released
from router.core.cost import LOAD_RATIO
from router.core.pace import prefill_seconds
from router.core.types import FleetView, RankStatus, RankView, RouteRequest, WorkerRole
from router.core.ways import Ways, prompt_alone

_NONE = frozenset[int]()
_NO_MODELS = frozenset[str]()
#: So many of each line are asked after, since others than its first may go where they are warm or admitted.
_LOOK_AHEAD: Final = 8


class Admission:
    """See the head of this file. Owns the queue and the charges, and teaches the guard."""

    def __init__(self, parameters: AdmissionParameters, guard: Guard | None = None) -> None:
        self.guard = guard if guard is not None else Guard()
        self.charges = Charges()
        self._parameters = parameters
        self._queue = Queue()

    # --- the queue ------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def held_tokens(self) -> int:
        """Contexts that wait for room."""
        return sum(request.prompt_tokens + request.output_tokens for request in self._queue.requests())

    @property
    def heads(self) -> Sequence[int]:
        """The tickets of those whom nobody stands before."""
        return self._queue.heads

    def position(self, ticket: int) -> int | None:
        """Place among all who wait, 1 for the oldest; None if it does not wait."""
        return self._queue.position(ticket)

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
        claims = self._queue.claims(view, closed=closed)
        answer = self._answer(request, Ways.open(view, request, closed=closed), view, claims, now=now)
        if isinstance(answer, Admit):
            self._note_overtaking(request, answer, view, claims)
            return answer
        return Hold(self._queue.join(request), len(self._queue), answer)

    def foretell(
        self, request: RouteRequest, view: FleetView, *, now: float, closed: frozenset[int] = _NONE
    ) -> Admit | Barrier:
        """What ``offer`` would answer, without an offer."""
        claims = self._queue.claims(view, closed=closed)
        return self._answer(request, Ways.open(view, request, closed=closed), view, claims, now=now)

    def release(self, view: FleetView, *, now: float, closed: frozenset[int] = _NONE) -> Released | None:
        """Who waits longest of those that may go, taken from the queue."""
        claims = self._queue.claims(view, closed=closed)
        for claim in claims:
            for ticket, request in islice(claim.line.waiting.items(), _LOOK_AHEAD):
                if ticket == claim.ticket:
                    ways = claim.ways
                elif self._is_known(request):
                    ways = Ways.open(view, request, closed=closed)
                else:
                    continue
                ahead = [other for other in claims if other.ticket < ticket]
                answer = self._answer(request, ways, view, ahead, now=now)
                if isinstance(answer, Admit):
                    self._note_overtaking(request, answer, view, ahead)
                    self._queue.leave(ticket)
                    return Released(ticket, answer)
        return None

    def renew(self, ticket: int, request: RouteRequest) -> None:
        """What the caches hold of a waiting request by now."""
        self._queue.renew(ticket, request)

    def cancel(self, ticket: int) -> None:
        """Nobody waits for it any more. Unknown tickets are no error."""
        self._queue.leave(ticket)

    # --- requests under way ---------------------------------------------------------------------------

    def start(
        self, request: RouteRequest, slot: int, view: FleetView, *, now: float, partner: int | None = None
    ) -> Visit:
        """The request was sent to ``slot``; its conversation is charged there from now on. ``partner``: the other rank
        of a pair.
        """
        rank = next((rank for rank in view.ranks if rank.slot == slot), None)
        computes = rank is not None and rank.part.role is WorkerRole.PREFILL
        visit = Visit(
            request.prompt_tokens,
            request.model,
            rank_models=rank.models if rank is not None else _NO_MODELS,
            pool_tokens=sum(each.pool_tokens or 0 for each in view.ranks if request.model in each.models),
            keeps=rank is None or rank.part.keeps_cache,
        )
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
                visit.model,
                tokens=max(0, visit.prompt_tokens - cached_tokens),
                evicted_tokens=max(0, ideal_tokens - cached_tokens),
                pool_tokens=visit.pool_tokens,
                is_holding=not visit.rank_models.isdisjoint(self._queue.models),
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

    def _answer(
        self, request: RouteRequest, ways: Ways, view: FleetView, ahead: Sequence[Claim], *, now: float
    ) -> Admit | Barrier:
        """Whether it may go; those ``ahead`` came before it."""
        claimed = wanted(ahead)
        admit = self._pass(request, ways, view, claimed=claimed, now=now)
        if admit is not None and (admit.why is not Passage.WARM or self._may_overtake(admit, ahead)):
            return admit
        if not ways.answering:
            return Admit(Passage.UNSERVED)
        return self._room(request, ways, view, claimed=claimed)

    def _may_overtake(self, admit: Admit, ahead: Sequence[Claim]) -> bool:
        """Whether what is warm may pass those that wait for its ranks: each is overtaken for a while, not for ever."""
        ratio = self._parameters.warm_budget_ratio - self._parameters.budget_ratio
        return not any(
            claim.line.overtaken_tokens >= ratio * _pool_tokens(claim.ways) for claim in _passed(admit, ahead)
        )

    def _note_overtaking(self, request: RouteRequest, admit: Admit, view: FleetView, ahead: Sequence[Claim]) -> None:
        """It goes, before others."""
        if admit.why is Passage.WARM:
            tokens = footprint(request, shared_tokens=shared_tokens(request, view)[WorkerRole.UNIFIED])
            for claim in _passed(admit, ahead):
                claim.line.overtaken_tokens += tokens

    def _is_known(self, request: RouteRequest) -> bool:
        """Whether it may be admitted or warm anywhere at all."""
        assert request.session is not None, "what names no conversation passes"
        if self.charges.of((request.model, request.session)) or request.charged_elsewhere:
            return True
        return any(self._is_warm(request, slot) for slot in {*request.reusable_tokens, *request.loadable_tokens})

    def _pass(
        self, request: RouteRequest, ways: Ways, view: FleetView, *, claimed: frozenset[int], now: float
    ) -> Admit | None:
        """Those whom no queue stops. Room is theirs on ranks that are not ``claimed`` by others."""
        if request.session is None:
            return Admit(Passage.KEYLESS)
        if request.session.agent:
            return Admit(Passage.CHILD)
        was_on = self.guard.is_on(request.model)
        if not self.guard.decide(request.model, now=now):
            return Admit(Passage.OFF)
        if not was_on:
            self._shed(request.model, view)
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
        # Who is at home where it is drained must go elsewhere, whoever waits.
        is_drained = any(rank.slot in at_home and rank.status is RankStatus.DRAINING for rank in view.ranks)
        elsewhere = self._roomy(request, ways, view) - (_NONE if is_drained else claimed)
        if not at_home:
            return Admit(Passage.WARM, slots | self._without_starts(elsewhere))
        return Admit(Passage.ADMITTED, slots | elsewhere)

    def _known(
        self, request: RouteRequest, ranks: Sequence[RankView], view: FleetView
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Where the conversation is charged and fits or is warm; and all ranks where it is warm and fits."""
        assert request.session is not None, "what names no conversation passes"
        known = self.charges.of((request.model, request.session)).keys() | request.charged_elsewhere
        warm = {rank.slot for rank in ranks if self._is_warm(request, rank.slot)}
        asked = [rank for rank in ranks if rank.slot in warm or rank.slot in known]
        if not asked:
            return _NONE, _NONE
        fitting = self._with_room(request, asked, view, ratio=self._parameters.warm_budget_ratio)
        return frozenset(rank.slot for rank in asked if rank.slot in known) & (fitting | warm), fitting & warm

    def _room(self, request: RouteRequest, ways: Ways, view: FleetView, *, claimed: frozenset[int]) -> Admit | Barrier:
        """It goes where there is room that nobody claims before it, and nobody else is starting cold."""
        ways = ways.beginning
        if claimed >= ways.slots and claimed:
            return Barrier.QUEUE
        roomy = ways.complete(self._roomy(request, ways, view) - claimed)
        if slots := ways.complete(self._without_starts(roomy)):
            return Admit(Passage.ROOM, slots)
        if claimed & ways.slots:
            return Barrier.QUEUE
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

    def _shed(self, model: str, view: FleetView) -> None:
        """While the guard was off for it charges may have outgrown the ranks."""
        for rank in view.ranks:
            if model in rank.models:
                self.charges.book(rank.slot).budget_tokens = self._budget_tokens(rank)
                self.charges.shed(rank.slot)


def _passed(admit: Admit, ahead: Sequence[Claim]) -> Sequence[Claim]:
    """Those whom it would overtake: they wait for a rank where it may go."""
    return [claim for claim in ahead if admit.slots is not None and claim.slots & admit.slots]


def _pool_tokens(ways: Ways) -> float:
    """What the ranks hold together."""
    return sum(math.inf if rank.pool_tokens is None else rank.pool_tokens for rank in (*ways.answering, *ways.prefill))
