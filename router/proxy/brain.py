"""The decision side of the data plane: what a request is, where it goes, and what came of it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping
from copy import copy

import msgspec

from router.core.admission import Admission, AdmissionParameters
from router.core.admission_guard import Guard
from router.core.cost import CostParameters
from router.core.draining import Departures
from router.core.output_lengths import OutputLengths
from router.core.pd import make_role_policy
from router.core.policy import Policy
from router.core.session import identify
from router.core.types import Decision, RankId, RouteRequest, SessionKey
from router.core.ways import can_serve
from router.errors import NoWorker
from router.fleet.decisions import Decided, DecisionLog, Waiting, session_hash
from router.fleet.fleet import Fleet
from router.proxy.holding import HeldRequest, Holding
from router.proxy.knowledge import Knowledge
from router.proxy.leases import Lease, Leases
from router.proxy.models import Models
from router.proxy.prepared import PreparedRequest, guessed_tokens
from router.proxy.promises import Promises
from router.proxy.splitting import by_part, contracts, no_worker
from router.proxy.tokenization import TooLong
from router.proxy.types import Attempt
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.openai import Endpoint, InferenceRequest

#: These go by load alone.
_LEAVES_NOTHING = frozenset({Endpoint.COUNT_TOKENS, Endpoint.TOKENIZE, Endpoint.RERANK})


class RouterBrain(Models):
    """Implements ``proxy.types.Brain`` over a ``Fleet``."""

    def __init__(
        self, fleet: Fleet, *, settings: RoutingSettings, metrics: Metrics, decisions: DecisionLog | None = None
    ) -> None:
        self.decisions = DecisionLog() if decisions is None else decisions
        super().__init__(fleet)
        self._metrics = metrics
        self.use(settings)
        self._decision_seconds = metrics.decision_seconds.labels()
        self._rng = random.Random(settings.seed)
        self._knowledge = Knowledge(fleet)
        self._departures = Departures()
        self._holding = (
            Holding(Admission(AdmissionParameters(), Guard(fleet.sessions.returns)), fleet, metrics)
            if settings.admission == "guarded"
            else None
        )
        self._promises = Promises(fleet, tokenizers=self)
        self._lengths = OutputLengths()
        self._leases = Leases(fleet, metrics, self._promises, self._holding, self.decisions, lengths=self._lengths)

    def ready(self) -> bool:
        """Some rank, or a pair of them, can take a request."""
        return can_serve(self._fleet.view.ranks)

    @property
    def makes_pairs(self) -> bool:
        """Some rank does a part of the work only."""
        return self._fleet.view.is_disaggregated

    def use(self, settings: RoutingSettings) -> None:
        """Decide by these settings from now on."""
        self._settings = settings
        self._policy = make_role_policy(
            settings.policy,
            CostParameters(move_weight=settings.move_weight),
            agree=self._fleet.shared.is_shared,
        )

    # --- a request ------------------------------------------------------------------------------------

    async def prepare(
        self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str, request_id: str = ""
    ) -> PreparedRequest:
        """Recognise the session and key the prompt. Raises ``NotFound`` for a model nobody serves.

        Decisions about a request without an id are not kept.
        """
        prepared = await self._keyed(request, headers, tenant=tenant)
        if prepared.tokens is not None:
            self._metrics.tokenize_seconds.observe(prepared.tokenize_seconds)
            self._promises.recall(prepared, now=self._fleet.clock())
            self._knowledge.know_ideal(prepared)
            self._knowledge.remember(prepared)
        keyed = self._keyed_by(prepared)
        self._metrics.prompts.labels(keyed).inc()
        prepared.decided = _decided(prepared, request_id, tenant=tenant, keyed=keyed)
        return prepared

    async def preview(self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str) -> Decided:
        """Decide about a request without sending it: an attempt that is not made, or what it would be waiting for.
        Nothing of it is remembered or counted.
        """
        prepared = await self._keyed(request, headers, tenant=tenant)
        self._knowledge.know_ideal(prepared)
        decided = _decided(prepared, "", tenant=tenant, keyed=self._keyed_by(prepared))
        now = self._fleet.clock()
        route = self._route(prepared, exclude=frozenset(), now=now)
        decided.home = self._home(route)
        if self._holding is not None:
            told = self._holding.foretell(route)
            if isinstance(told, Waiting):
                decided.waiting = told
                return decided
            route = msgspec.structs.replace(route, allowed=told)
        rng = random.Random()
        rng.setstate(self._rng.getstate())  # the draw that the next request will have
        failing = self._fleet.breakers.closed_to(now=now)
        decision, _ = self._decide(route, copy(self._policy), rng, failing=failing, now=now)
        if decision is None:
            raise no_worker(self._fleet.view, prepared.model)
        reusable = route.reusable_tokens
        self.decisions.add(decided, decision, view=self._fleet.view, reusable=reusable, failing=failing, now=now)
        return decided

    async def _keyed(self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str) -> PreparedRequest:
        """Who asks, and for what."""
        model, _, told_model = self.resolve(request.model)
        session = self._session(request, headers, tenant=tenant)
        if session is not None and self._fleet.shared.is_shared:
            await self._fleet.shared.look_up(model, session, in_pairs=self.makes_pairs)
        seed, plain_seed = self.seeds(model, request.fields)
        prompt, started, is_taken = None, 0.0, True
        if self.tokenizes(model):
            started = self._fleet.clock()
            try:
                prompt = await self.tokenize(request, model=model, seed=seed)
            except TooLong:
                is_taken = False
        tokens = None if prompt is None else prompt.tokens
        prompt_tokens = len(tokens) if tokens is not None else guessed_tokens(request)
        if not is_taken:  # what every engine refuses computes nothing and leaves nothing: it goes by load alone
            session, prompt_tokens = None, 1
        prepared = PreparedRequest(
            model,
            session=session,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            output_tokens=self._output_tokens(request, model, prompt_tokens=prompt_tokens),
            seed=seed,
            plain_seed=plain_seed,
            handovers=contracts(request) if self.makes_pairs else frozenset(),
            most_tokens=request.max_tokens,
            is_whole=request.fields.get("ignore_eos") is True,
            is_streamed=request.stream,
            told_model=told_model,
        )
        if tokens is not None and prompt is not None:
            prepared.know_keys(prompt.keys)
            prepared.tokenize_seconds = self._fleet.clock() - started
        elif is_taken:
            prepared.text_keys = await self.text_keys(request, model=model, seed=prepared.seed)
        return prepared

    def _keyed_by(self, prepared: PreparedRequest) -> str:
        """How the prompt was recognised: a label of ``homing_prompts_total``."""
        if prepared.tokens is not None:
            return "tokens" if prepared.model in self._tokenizers else "worker"
        return "none" if prepared.text_keys is None else "text"

    def _session(self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str) -> SessionKey | None:
        """Who asks; nobody in particular where nothing will be left in a cache to come home to."""
        if request.endpoint in _LEAVES_NOTHING:
            return None
        fields, chat = request.fields, request.chat
        if chat is not None and chat is not fields:
            fields = {**fields, "messages": chat["messages"]}
        return identify(headers, fields, tenant=tenant, first=self._settings.session_headers)

    def prepare_tokens(
        self,
        model: str,
        tokens: array[int],
        *,
        fields: Mapping[str, object],
        session: SessionKey | None = None,
        most_tokens: int | None = None,
        is_whole: bool = False,
    ) -> PreparedRequest:
        """Key a prompt whose token ids are known. ``fields`` are the request's: some divide caches. Its answer has no
        more than ``most_tokens``, and with ``is_whole`` no fewer.
        """
        seed, plain_seed = self.seeds(model, fields)
        return PreparedRequest(
            model,
            session=session,
            tokens=tokens,
            prompt_tokens=len(tokens),
            output_tokens=self._lengths.expected(model, most_tokens=most_tokens),
            seed=seed,
            plain_seed=plain_seed,
            most_tokens=most_tokens,
            is_whole=is_whole,
        )

    def _output_tokens(self, request: InferenceRequest, model: str, *, prompt_tokens: int) -> int:
        """What the answer is expected to take: seldom what the client would allow, never more than the context has."""
        if request.endpoint is Endpoint.EMBEDDINGS:
            return 0
        most_tokens, context_tokens = request.max_tokens, self.context_tokens(model)
        if context_tokens is not None:
            left_tokens = max(0, context_tokens - prompt_tokens)
            most_tokens = left_tokens if most_tokens is None else min(most_tokens, left_tokens)
        return self._lengths.expected(model, most_tokens=most_tokens)

    def hold(
        self, prepared: PreparedRequest, go: Callable[[], None], *, exclude: frozenset[int] = frozenset()
    ) -> HeldRequest | None:
        """Whether the request must wait for room in the caches; ``go`` is called when there is.

        ``exclude`` are slots where it failed: it waits for room elsewhere.
        """
        if self._holding is None:
            return None

        def gone(slots: frozenset[int] | None) -> None:
            prepared.allowed = slots
            go()

        def route() -> RouteRequest:
            return self._route(prepared, exclude=exclude, now=self._fleet.clock())

        prepared.allowed = None
        answer = self._holding.offer(route, gone)
        if isinstance(answer, HeldRequest):
            if (decided := prepared.decided) is not None:
                self._remember(decided, route())
                decided.waiting = answer.waiting
            return answer
        prepared.allowed = answer
        return None

    def choose(self, prepared: PreparedRequest, *, exclude: frozenset[int] = frozenset()) -> Attempt:
        """Decide, and open a lease on the chosen rank. Raises ``NoWorker``."""
        fleet = self._fleet
        now = fleet.clock()
        request = self._route(prepared, exclude=exclude, now=now)
        failing = fleet.breakers.closed_to(now=now)
        decision, leaving = self._decide(request, self._policy, self._rng, failing=failing, now=now)
        self._decision_seconds.observe(fleet.clock() - now)
        if decision is None:
            raise NoWorker("No other worker is left to try.") if exclude else no_worker(fleet.view, prepared.model)
        self._metrics.decisions.labels(self._settings.policy, decision.reason).inc()
        half = decision.prefill
        lease = self._open(prepared, decision, request, now=now, partner=None if half is None else half.slot)
        self._note(lease, request, failing=failing, now=now)
        if leaving is not None:
            self._departures.left(request, leaving, lease.claim)
        prefill = None
        if half is not None:
            other = self._open(prepared, half, request, now=now, partner=decision.slot)
            other.noted = lease.noted
            prefill = Attempt(target=other.member.target, decision=half, lease=other)
        return Attempt(target=lease.member.target, decision=decision, lease=lease, prefill=prefill)

    def full(self) -> frozenset[int]:
        """Slots that have just said that they are full."""
        return self._fleet.full.slots(now=self._fleet.clock())

    def _open(
        self, prepared: PreparedRequest, decision: Decision, request: RouteRequest, *, now: float, partner: int | None
    ) -> Lease:
        """A lease on the decision's rank, of which ``partner`` is the other of the pair."""
        lease = self._leases.open(prepared, decision, now=now)
        # Where it fetches a part from below its first token says little of how fast it computes.
        lease.is_loading = request.loadable_tokens.get(decision.slot, 0) > decision.expected_cached_tokens
        if self._holding is not None:
            lease.visit = self._holding.started(request, decision.slot, partner=partner, heard_by=lease.claim.heard_by)
        return lease

    def _decide(
        self, request: RouteRequest, policy: Policy, rng: random.Random, *, failing: frozenset[int], now: float
    ) -> tuple[Decision | None, RouteRequest | None]:
        """Where it goes, and the request without the homes that it leaves for that, if it leaves any. It stays where
        it is drained while it was admitted to no other rank.
        """
        view = self._fleet.view

        def among_sound(request: RouteRequest) -> Decision | None:
            """Among the ranks that do not keep failing; among all when nothing else is left."""
            if failing:
                allowed = request.allowed if request.allowed is not None else {rank.slot for rank in view.ranks}
                sound = msgspec.structs.replace(request, allowed=frozenset(allowed) - failing)
                if (decision := policy(view, sound, rng, now)) is not None:
                    return decision
            return policy(view, request, rng, now)

        leaving = self._departures.leaving(request, view)
        if leaving is not None and (decision := among_sound(leaving)) is not None:
            return decision, leaving
        decision = among_sound(request)
        if decision is None and request.allowed is not None:  # the ranks it was admitted to cannot serve it now
            decision = among_sound(msgspec.structs.replace(request, allowed=None))
        return decision, None

    def _home(self, request: RouteRequest) -> RankId | None:
        return None if request.home is None else self._fleet.member(request.home).id

    def _route(self, prepared: PreparedRequest, *, exclude: frozenset[int], now: float) -> RouteRequest:
        """What the policy is asked, as of now."""
        fleet, knowledge = self._fleet, self._knowledge
        model, session = prepared.model, prepared.session
        self._promises.expire(now)
        reusable = knowledge.reusable(prepared)
        home = prefill_home = parent_home = prefill_parent_home = None
        is_beginning = False
        charged_elsewhere: Mapping[int, int] = {}
        common_tokens: int | None = None
        if session is not None:
            answering = reusable
            if self.makes_pairs:
                answering, computing = by_part(reusable, fleet.view)
                prefill_home = fleet.home(model, session, now=now, held=computing, is_prefill=True)
                prefill_home = knowledge.home(prepared, computing, prefill_home)
                prefill_parent_home = fleet.prompts.parent_home(model, session, now=now)
            home = knowledge.home(prepared, answering, fleet.home(model, session, now=now, held=answering))
            is_beginning = fleet.sessions.is_beginning(model, session)
            parent_home = fleet.sessions.parent_home(model, session, now=now)
            if self._holding is not None and fleet.shared.is_shared:
                charged_elsewhere = self._holding.charged_elsewhere(model, session)
            if self._holding is not None and len(reusable) > 1 and prepared.tokens is not None:
                common_tokens = knowledge.common(prepared)
        return RouteRequest(
            model=prepared.model,
            prompt_tokens=prepared.prompt_tokens,
            output_tokens=prepared.output_tokens,
            reusable_tokens=reusable,
            loadable_tokens=knowledge.loadable(prepared),
            session=prepared.session,
            home=home,
            exclude=exclude,
            allowed=prepared.allowed,
            return_ratio=fleet.sessions.returns.ratio(model),
            handovers=prepared.handovers,
            prefill_home=prefill_home,
            is_beginning=is_beginning,
            charged_elsewhere=charged_elsewhere,
            stored_tokens=knowledge.stored(prepared) if home is None and session is not None else {},
            common_tokens=common_tokens,
            at_home={**fleet.sessions.at_home, **fleet.prompts.at_home} if self.makes_pairs else fleet.sessions.at_home,
            parent_home=parent_home,
            prefill_parent_home=prefill_parent_home,
        )

    def _note(self, lease: Lease, request: RouteRequest, *, failing: frozenset[int], now: float) -> None:
        """Remember the decision for whoever asks why."""
        decided, view = lease.prepared.decided, self._fleet.view
        if decided is None or not decided.request_id:
            return
        self._remember(decided, request)
        reusable = request.reusable_tokens
        lease.noted = self.decisions.add(
            decided, lease.decision, view=view, reusable=reusable, failing=failing, now=now
        )

    def _remember(self, decided: Decided, request: RouteRequest) -> None:
        """That there is such a request, until its first attempt."""
        if decided.request_id and not decided.attempts:
            decided.home = self._home(request)
            self.decisions.open(decided)


def _decided(prepared: PreparedRequest, request_id: str, *, tenant: str, keyed: str) -> Decided:
    return Decided(
        request_id,
        prepared.model,
        tenant=tenant,
        session=session_hash(prepared.session),
        keyed=keyed,
        prompt_tokens=prepared.prompt_tokens,
        ideal_tokens=prepared.ideal_tokens,
    )
