"""The decision side of the data plane: what a request is, where it goes, and what came of it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy

import msgspec

from router.core.admission import Admission, AdmissionParameters, Visit
from router.core.cost import CostParameters
from router.core.forecast import Allocation
from router.core.load import Claim
from router.core.pace import judge
from router.core.pd import can_serve, make_role_policy, transfer_seconds
from router.core.seen import SeenPrefixes
from router.core.session import Binding, SessionTable, identify
from router.core.types import Decision, RankStatus, RouteRequest, SessionKey, WorkerRole
from router.errors import NoWorker
from router.fleet.decisions import Attempted, Decided, DecisionLog, session_hash
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.proxy.holding import HeldRequest, Holding
from router.proxy.models import Models
from router.proxy.prepared import BYTES_A_TOKEN, PreparedRequest, guessed_tokens, request_text_keys
from router.proxy.promises import Promise, Promises, counts_at_dispatch
from router.proxy.splitting import contracts, learn_pace, no_worker
from router.proxy.types import Attempt, Outcome
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.openai import Endpoint, InferenceRequest
from router.wire.text_keys import text_bytes
from router.wire.usage import Usage

#: The header that names a request, as the data plane gives it here and to the client.
REQUEST_ID = "x-request-id"
_ASSUMED_OUTPUT_TOKENS = 256
#: These go by load alone.
_LEAVES_NOTHING = frozenset({Endpoint.COUNT_TOKENS, Endpoint.TOKENIZE, Endpoint.RERANK})


class RouterBrain(Models):
    """Implements ``proxy.types.Brain`` over a ``Fleet``."""

    def __init__(
        self, fleet: Fleet, *, settings: RoutingSettings, metrics: Metrics, decisions: DecisionLog | None = None
    ) -> None:
        self.decisions = DecisionLog() if decisions is None else decisions
        super().__init__(fleet)
        self._settings = settings
        self._metrics = metrics
        self._policy = make_role_policy(
            settings.policy, CostParameters(move_weight=settings.move_weight), agree=fleet.shared.is_shared
        )
        self._rng = random.Random(settings.seed)
        self._seen: dict[str, SeenPrefixes] = {}
        self._holding = (
            Holding(Admission(AdmissionParameters()), fleet, metrics) if settings.admission == "guarded" else None
        )
        self._promises = Promises(fleet, special_ids=self.special_ids)

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

    async def prepare(self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str) -> PreparedRequest:
        """Recognise the session and key the prompt. Raises ``NotFound`` for a model nobody serves."""
        model = self.resolve(request.model)
        session = self._session(request, headers, tenant=tenant)
        if session is not None and self._fleet.shared.is_shared:
            await self._fleet.shared.look_up(model, session)
        seed, plain_seed = self.seeds(model, request.fields)
        started = self._fleet.clock()
        prompt = await self.tokenize(request, model=model, seed=seed)
        tokens = None if prompt is None else prompt.tokens
        prepared = PreparedRequest(
            model,
            session=session,
            tokens=tokens,
            prompt_tokens=len(tokens) if tokens is not None else guessed_tokens(request),
            output_tokens=request.max_tokens or _ASSUMED_OUTPUT_TOKENS,
            seed=seed,
            plain_seed=plain_seed,
            handovers=contracts(request) if self.makes_pairs else frozenset(),
        )
        if prompt is not None:
            self._metrics.tokenize_seconds.observe(self._fleet.clock() - started)
            prepared.know_keys(prompt.keys)
            self._promises.recall(prepared, now=self._fleet.clock())
        if tokens is None:
            prepared.text_keys = request_text_keys(request, model=model, seed=prepared.seed)
        if tokens is not None:
            keyed = "tokens" if model in self._tokenizers else "worker"
        else:
            keyed = "text" if prepared.text_keys else "none"
        self._metrics.prompts.labels(keyed).inc()
        prepared.ideal_tokens = self._ideal_tokens(prepared)
        prepared.decided = Decided(
            headers.get(REQUEST_ID, ""),
            model,
            tenant=tenant,
            session=session_hash(session),
            keyed=keyed,
            prompt_tokens=prepared.prompt_tokens,
            ideal_tokens=prepared.ideal_tokens,
        )
        return prepared

    async def preview(self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str) -> Decided:
        """Decide about a request without sending it. Nothing but its having been seen is remembered."""
        prepared = await self.prepare(request, headers, tenant=tenant)
        assert prepared.decided is not None
        now = self._fleet.clock()
        route = self._route(prepared, exclude=frozenset(), now=now)
        rng = random.Random()
        rng.setstate(self._rng.getstate())  # the draw that the next request will have
        decision = copy(self._policy)(self._fleet.view, route, rng, now)
        if decision is None:
            raise no_worker(self._fleet.view, prepared.model)
        prepared.decided.request_id = ""
        self.decisions.add(prepared.decided, decision, view=self._fleet.view, reusable=route.reusable_tokens, now=now)
        return prepared.decided

    def _session(self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str) -> SessionKey | None:
        """Who asks; nobody in particular where nothing will be left in a cache to come home to."""
        if request.endpoint in _LEAVES_NOTHING:
            return None
        fields, chat = request.fields, request.chat
        if chat is not None and chat is not fields:
            fields = {**fields, "messages": chat["messages"]}
        return identify(headers, fields, tenant=tenant, first=self._settings.session_headers)

    def prepare_tokens(
        self, model: str, tokens: array[int], *, fields: Mapping[str, object], session: SessionKey | None = None
    ) -> PreparedRequest:
        """Key a prompt whose token ids are known. ``fields`` are the request's: some divide caches."""
        seed, plain_seed = self.seeds(model, fields)
        return PreparedRequest(
            model,
            session=session,
            tokens=tokens,
            prompt_tokens=len(tokens),
            output_tokens=_ASSUMED_OUTPUT_TOKENS,
            seed=seed,
            plain_seed=plain_seed,
        )

    def hold(self, prepared: PreparedRequest, go: Callable[[], None]) -> HeldRequest | None:
        """Whether the request must wait for room in the caches; ``go`` is called when there is."""
        if self._holding is None or self.makes_pairs:  # whose caches it does not know how to fill
            return None

        def gone(slots: frozenset[int] | None) -> None:
            prepared.allowed = slots
            go()

        request = self._route(prepared, exclude=frozenset(), now=self._fleet.clock())
        answer = self._holding.offer(request, gone)
        if isinstance(answer, HeldRequest):
            return answer
        prepared.allowed = answer
        return None

    def choose(self, prepared: PreparedRequest, *, exclude: frozenset[int] = frozenset()) -> Attempt:
        """Decide, and open a lease on the chosen rank. Raises ``NoWorker``."""
        fleet = self._fleet
        now = fleet.clock()
        self._promises.expire(now)
        request = self._route(prepared, exclude=exclude, now=now)
        decision = self._decide(request, now=now)
        self._metrics.decision_seconds.observe(fleet.clock() - now)
        if decision is None:
            raise NoWorker("No other worker is left to try.") if exclude else no_worker(fleet.view, prepared.model)
        self._metrics.decisions.labels(self._settings.policy, decision.reason).inc()
        lease = self._open(prepared, decision, now=now)
        lease.is_loading = _is_loading(request, decision)
        if self._holding is not None and not self.makes_pairs:
            lease.visit = self._holding.started(request, decision.slot)
        self._note(lease, request, now=now)
        attempt = Attempt(target=lease.member.target, decision=decision, lease=lease)
        if decision.prefill is None:
            return attempt
        half = self._open(prepared, decision.prefill, now=now)
        half.is_loading = _is_loading(request, decision.prefill)
        prefill = Attempt(target=half.member.target, decision=decision.prefill, lease=half)
        return msgspec.structs.replace(attempt, prefill=prefill)

    def _decide(self, request: RouteRequest, *, now: float) -> Decision | None:
        """Among the ranks that do not keep failing; among all when nothing else is left."""
        view = self._fleet.view
        failing = self._fleet.breakers.closed_to(now=now)
        if failing:
            allowed = request.allowed if request.allowed is not None else {rank.slot for rank in view.ranks}
            sound = msgspec.structs.replace(request, allowed=frozenset(allowed) - failing)
            if (decision := self._policy(view, sound, self._rng, now)) is not None:
                return decision
        decision = self._policy(view, request, self._rng, now)
        if decision is None and request.allowed is not None:  # the ranks it was admitted to cannot serve it now
            return self._policy(view, msgspec.structs.replace(request, allowed=None), self._rng, now)
        return decision

    def _route(self, prepared: PreparedRequest, *, exclude: frozenset[int], now: float) -> RouteRequest:
        """What the policy is asked, as of now."""
        fleet = self._fleet
        model, session = prepared.model, prepared.session
        home = fleet.home(model, session, now=now) if session else None
        return RouteRequest(
            model=prepared.model,
            prompt_tokens=prepared.prompt_tokens,
            output_tokens=prepared.output_tokens,
            reusable_tokens=self._reusable(prepared, home),
            loadable_tokens=self._loadable(prepared),
            session=prepared.session,
            home=home,
            exclude=exclude,
            allowed=prepared.allowed,
            handovers=prepared.handovers,
            prefill_home=fleet.prompts.home(model, session, now=now) if session and self.makes_pairs else None,
        )

    def _note(self, lease: _Lease, request: RouteRequest, *, now: float) -> None:
        """Remember the decision for whoever asks why."""
        decided, view = lease.prepared.decided, self._fleet.view
        if decided is None or not decided.request_id:
            return
        if not decided.attempts:
            decided.home = None if request.home is None else self._fleet.member(request.home).id
            self.decisions.open(decided)
        lease.noted = self.decisions.add(decided, lease.decision, view=view, reusable=request.reusable_tokens, now=now)

    def _reusable(self, prepared: PreparedRequest, home: int | None = None) -> Mapping[int, int]:
        reusable: dict[int, int] = {}
        if prepared.tokens is None:
            most = prepared.prompt_tokens - 1
            for slot, blocks in self._fleet.texts.blocks_sent(prepared.text_keys).items():
                reusable[slot] = min(most, text_bytes(blocks) // BYTES_A_TOKEN)
            if home is not None and (sent := self._sent_elsewhere(prepared)):
                reusable[home] = max(reusable.get(home, 0), min(most, sent))
            return reusable
        for index in self._fleet.indexes(prepared.model):
            keys = prepared.keys(index.block_tokens)
            reusable.update(index.reusable_tokens(keys, prompt_tokens=prepared.prompt_tokens))
        return reusable

    def _loadable(self, prepared: PreparedRequest) -> Mapping[int, int]:
        """What lower tiers hold counts as well here; nothing where there are none."""
        loadable: dict[int, int] = {}
        if prepared.tokens is not None:
            for index in self._fleet.indexes(prepared.model):
                keys = prepared.keys(index.block_tokens)
                loadable.update(index.loadable_tokens(keys, prompt_tokens=prepared.prompt_tokens))
        return loadable

    def _sent_elsewhere(self, prepared: PreparedRequest) -> int:
        """Tokens of the session's last prompt if another replica sent it: text that this one has not seen."""
        assert prepared.session is not None, "only a session has a home"
        shared = self._fleet.shared.home(prepared.model, prepared.session)
        return 0 if shared is None or shared.is_own else shared.prompt_tokens

    def _homes(self, member: Member) -> SessionTable:
        """Where it is noted which rank of this role a session used last."""
        return self._fleet.prompts if member.target.part.role is WorkerRole.PREFILL else self._fleet.sessions

    def _tell_home(self, prepared: PreparedRequest, member: Member) -> None:
        assert prepared.session is not None, "only a session has a home"
        self._fleet.shared.bound(prepared.model, prepared.session, member.id, prompt_tokens=prepared.prompt_tokens)

    def _open(self, prepared: PreparedRequest, decision: Decision, *, now: float) -> _Lease:
        """A lease on the decision's own rank; of a pair, on the one that is handed the prompt."""
        fleet = self._fleet
        member = fleet.member(decision.slot)
        fleet.breakers.sent(decision.slot, now=now)
        is_handed = decision.prefill is not None
        claim = fleet.loads.open(
            decision.slot,
            prompt_tokens=prepared.prompt_tokens,
            prefill_tokens=0 if is_handed else prepared.prompt_tokens - decision.expected_cached_tokens,
            seconds=(
                transfer_seconds(member.pace, tokens=decision.transfer_tokens)
                if is_handed
                else decision.expected_prefill_seconds
            ),
            now=now,
        )
        binding = None
        if prepared.session is not None:
            binding = self._homes(member).start(prepared.model, prepared.session, slot=decision.slot, now=now)
            if member.target.part.role is not WorkerRole.PREFILL:
                self._tell_home(prepared, member)
        lease = _Lease(self, prepared, decision, member, claim, binding)
        lease.allocation = self._promises.sent(member, prepared)
        if prepared.tokens is None:
            fleet.texts.add(decision.slot, prepared.text_keys)
        elif counts_at_dispatch(member) and (promise := self._promises.prompt(member, prepared)):
            lease.promises.append(promise)
        return lease

    def _ideal_tokens(self, prepared: PreparedRequest) -> int:
        """Tokens of the prompt that an endless cache shared by all ranks would have, and remember the prompt."""
        indexes = self._fleet.indexes(prepared.model)
        if prepared.tokens is None or not indexes:
            return 0
        block_tokens = min(index.block_tokens for index in indexes)
        keys = prepared.keys(block_tokens)
        earlier = self._seen.setdefault(prepared.model, SeenPrefixes())
        seen = earlier.blocks_seen(keys)
        earlier.add(keys)
        return min(seen, max(0, prepared.prompt_tokens - 1) // block_tokens) * block_tokens

    # --- called by leases -------------------------------------------------------------------------------

    def _first_byte(self, lease: _Lease) -> None:
        if lease.noted is not None:
            lease.noted.first_token_seconds = self._fleet.clock() - lease.noted.started
        if not lease.promises and (promise := self._promises.prompt(lease.member, lease.prepared)):
            lease.promises.append(promise)
        self._promises.begun(lease.allocation)
        if self._holding is not None and lease.visit is not None:
            self._holding.first_token(lease.visit)
        served = self._fleet.loads.first_byte(lease.claim, now=self._fleet.clock())
        if served is not None and lease.prepared.tokens is not None and not lease.is_loading:
            tokens = lease.prepared.prompt_tokens
            learn_pace(lease.member, lease.decision, prompt_tokens=tokens, served_seconds=served)

    def _close(self, lease: _Lease, outcome: Outcome, usage: Usage | None, output: Sequence[int]) -> None:
        now = self._fleet.clock()
        prepared = lease.prepared
        self._fleet.loads.close(lease.claim, now=now)
        if self._fleet.knows(lease.member):
            ranks = len(self._fleet.view.ranks)
            self._fleet.breakers.ended(lease.member.slot, outcome.verdict, ranks=ranks, now=now)
        if prepared.session is not None and lease.binding is not None:
            self._homes(lease.member).finish(prepared.model, prepared.session, lease.binding, now=now)
            shared = self._fleet.shared.home(prepared.model, prepared.session)
            if shared is not None and shared.rank == lease.member.id:  # else it has moved on meanwhile
                self._tell_home(prepared, lease.member)
        if outcome in (Outcome.OK, Outcome.CLIENT_GONE, Outcome.DEADLINE):
            if promise := self._promises.output(lease.member, prepared, output):
                lease.promises.append(promise)
            elif usage is not None:
                self._promises.answered(lease.member, prepared, output_tokens=usage.completion_tokens, now=now)
            self._promises.keep(lease.promises, now=now)
            self._promises.leave(lease.allocation, lease.member, prepared, output, now=now)
        else:
            self._promises.take_back(lease.promises, lease.allocation)
        is_handed = lease.decision.prefill is not None  # the engine counts what it was handed as it likes
        if outcome is Outcome.OK and not is_handed and usage is not None and usage.cached_tokens is not None:
            prompt_tokens = max(0, usage.prompt_tokens)  # a worker may say anything
            actual_tokens = min(prompt_tokens, max(0, usage.cached_tokens))
            self._compare(lease, prompt_tokens=prompt_tokens, actual_tokens=actual_tokens)
        if lease.noted is not None and prepared.decided is not None:
            lease.noted.outcome = outcome
            lease.noted.seconds = now - lease.noted.started
            if usage is not None:
                lease.noted.prompt_tokens, lease.noted.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            self.decisions.close(prepared.decided, lease.noted)
        if self._holding is not None and lease.visit is not None:
            cached_tokens = usage.cached_tokens if usage is not None and outcome is Outcome.OK else None
            ideal_tokens = prepared.ideal_tokens if prepared.tokens is not None else None
            self._holding.finished(lease.visit, cached_tokens=cached_tokens, ideal_tokens=ideal_tokens)

    def _compare(self, lease: _Lease, *, prompt_tokens: int, actual_tokens: int) -> None:
        metrics, member, decision = self._metrics, lease.member, lease.decision
        labels = member.labels
        predicted = decision.expected_cached_tokens
        metrics.prompt_tokens.labels(*labels).inc(prompt_tokens)
        metrics.cached_tokens.labels(*labels).inc(actual_tokens)
        metrics.predicted_tokens.labels(*labels).inc(predicted)
        metrics.best_tokens.labels(*labels).inc(decision.best_cached_tokens)
        metrics.ideal_tokens.labels(*labels).inc(lease.prepared.ideal_tokens)
        if actual_tokens != predicted:
            metrics.mispredicted.labels(*labels, "over" if predicted > actual_tokens else "under").inc()
        if lease.prepared.tokens is not None:
            judge(
                member.trust,
                predicted_tokens=predicted,
                actual_tokens=actual_tokens,
                slack_tokens=member.block_tokens or 0,
            )


def _is_loading(request: RouteRequest, decision: Decision) -> bool:
    """Whether the rank will fetch a part from below, so that its first token says little of how fast it computes."""
    return request.loadable_tokens.get(decision.slot, 0) > decision.expected_cached_tokens


class _Lease:
    """One attempt's claim on a rank; see ``proxy.types.Lease``."""

    __slots__ = (
        "_brain",
        "_open",
        "allocation",
        "binding",
        "claim",
        "decision",
        "is_loading",
        "member",
        "noted",
        "prepared",
        "promises",
        "visit",
    )

    def __init__(
        self,
        brain: RouterBrain,
        prepared: PreparedRequest,
        decision: Decision,
        member: Member,
        claim: Claim,
        binding: Binding | None,
    ) -> None:
        self._brain = brain
        self._open = True
        self.prepared = prepared
        self.decision = decision
        self.member = member
        self.claim = claim
        self.binding = binding
        self.noted: Attempted | None = None
        self.visit: Visit | None = None
        self.promises: list[Promise] = []
        self.allocation: Allocation | None = None
        self.is_loading = False

    def first_byte(self) -> None:
        """Prefill is over."""
        self._brain._first_byte(self)

    def handed(self) -> None:
        """Its part begins now: the other rank's is done."""
        self.claim.opened_at = self._brain._fleet.clock()

    def worker_answers(self) -> bool | None:
        """Whether the worker answers probes; None once it has left."""
        return self.member.status is not RankStatus.DOWN if self._brain._fleet.knows(self.member) else None

    def close(self, outcome: Outcome, usage: Usage | None, *, output: Sequence[int] = ()) -> None:
        """The attempt is over; once. ``output`` are the ids of the tokens it brought, where they are known."""
        if self._open:
            self._open = False
            self._brain._close(self, outcome, usage, output)
