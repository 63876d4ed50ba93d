"""The decision side of the data plane: what a request is, where it goes, and what came of it."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial

from router.core.cost import CostParameters
from router.core.index import PrefixIndex
from router.core.load import Claim
from router.core.pace import judge
from router.core.policy import make_policy
from router.core.provisional import Ticket
from router.core.seen import SeenPrefixes
from router.core.session import Binding, identify
from router.core.types import Decision, Engine, RankStatus, RouteRequest, SessionKey
from router.errors import BadRequest, NotFound, NoWorker
from router.fleet.decisions import Attempted, Decided, DecisionLog, session_hash
from router.fleet.fleet import Fleet, Member
from router.proxy.token_cache import Chain
from router.proxy.tokenization import Prompt, PromptTokenizer
from router.proxy.types import Attempt, Outcome
from router.proxy.worker_tokens import WorkerTokenizer
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.openai import Endpoint, InferenceRequest, Usage, parse_request
from router.wire.text_keys import chat_text, prompt_text, text_bytes, text_keys

#: The header that names a request, as the data plane gives it here and to the client.
REQUEST_ID = "x-request-id"
#: After a request has ended its blocks still count for so long: the engine's events may be that late.
PROVISIONAL_SECONDS = 2.0
#: Without a tokenizer a token is taken for so many bytes of text.
BYTES_A_TOKEN = 4
#: Bodies larger than this are rendered, and more new text than this is tokenized, off the event loop.
_INLINE_BYTES = 1024 * 1024
_INLINE_CHARS = 8 * 1024
_ASSUMED_OUTPUT_TOKENS = 256
#: These go by load alone.
_LEAVES_NOTHING = frozenset({Endpoint.COUNT_TOKENS, Endpoint.TOKENIZE, Endpoint.RERANK})


@dataclass(slots=True)
class PreparedRequest:
    """A request keyed once, for any number of attempts. ``tokens`` is None where only text is known.

    ``plain_seed`` is the root that SGLang's events imply, which do not carry the request's extra key; None without one.
    """

    model: str
    session: SessionKey | None
    tokens: array[int] | None
    prompt_tokens: int
    output_tokens: int
    seed: int
    plain_seed: int | None = None
    text_keys: Sequence[int] = ()
    ideal_tokens: int = 0
    decided: Decided | None = None
    _keys: dict[int, Sequence[int]] = field(default_factory=dict)

    def know_keys(self, keys: Mapping[Chain, Sequence[int]]) -> None:
        """Keys that came with the tokens. Others are hashed when they are asked for."""
        self._keys.update((chain.block_tokens, known) for chain, known in keys.items() if chain.seed == self.seed)

    def keys(self, block_tokens: int) -> Sequence[int]:
        """Chain keys of the prompt in blocks of this size; empty without tokens."""
        if self.tokens is None:
            return ()
        if block_tokens not in self._keys:
            self._keys[block_tokens] = block_keys(self.tokens, block_tokens=block_tokens, parent=self.seed)
        return self._keys[block_tokens]

    def keys_after(self, output: Sequence[int], *, block_tokens: int) -> Sequence[int]:
        """Keys of the whole blocks that ``output`` fills after the prompt's own."""
        if self.tokens is None:
            return ()
        known = self.keys(block_tokens)
        rest = self.tokens[len(known) * block_tokens :] + array("I", output)
        return block_keys(rest, block_tokens=block_tokens, parent=known[-1] if known else self.seed)


@dataclass(frozen=True, slots=True)
class _Answered:
    """A request that has just ended, of whose answer only the length is known."""

    member: Member
    prepared: PreparedRequest
    output_tokens: int


#: What one lease has entered as provisional, and where.
Promise = tuple[PrefixIndex, Ticket]


class RouterBrain:
    """Implements ``proxy.types.Brain`` over a ``Fleet``."""

    def __init__(
        self, fleet: Fleet, *, settings: RoutingSettings, metrics: Metrics, decisions: DecisionLog | None = None
    ) -> None:
        self.decisions = DecisionLog() if decisions is None else decisions
        self._fleet = fleet
        self._settings = settings
        self._metrics = metrics
        self._policy = make_policy(
            settings.policy, CostParameters(move_weight=settings.move_weight), agree=fleet.shared.is_shared
        )
        self._rng = random.Random(settings.seed)
        self._tokenizers: dict[str, PromptTokenizer] = {}
        self._workers: WorkerTokenizer | None = None
        self._aliases: dict[str, str] = {}
        self._adapters: set[str] = set()
        self._seen: dict[str, SeenPrefixes] = {}
        self._expiring: deque[tuple[float, Callable[[], object]]] = deque()
        self._answered: dict[tuple[str, SessionKey], _Answered] = {}

    # --- what the router knows of models ------------------------------------------------------------

    def set_tokenizer(self, model: str, tokenizer: PromptTokenizer) -> None:
        """Key this model's prompts by tokens from now on."""
        self._tokenizers[model] = tokenizer

    def ask_workers(self, workers: WorkerTokenizer) -> None:
        """Have workers tokenize for models without a tokenizer of their own here."""
        self._workers = workers

    def has_tokenizer(self, model: str) -> bool:
        """Whether prompts of this model are keyed by tokens."""
        return model in self._tokenizers

    def token_ids(self, model: str, body: bytes) -> Sequence[int] | None:
        """The prompt's ids of a chat request's body; None without a tokenizer or template. For the self-check."""
        tokenizer = self._tokenizers.get(model)
        try:
            return tokenizer.encode(parse_request(Endpoint.CHAT, body)) if tokenizer is not None else None
        except BadRequest:  # the template takes no such chat
            return None

    def set_alias(self, alias: str, model: str) -> None:
        """Another name clients may use: bodies are sent on with the model's own."""
        self._aliases[alias] = model

    def set_adapter(self, model: str) -> None:
        """This model is an adapter (LoRA) over another: engines keep its blocks apart. Else learnt from the events."""
        self._adapters.add(model)

    def models(self) -> list[str]:
        """Names of the models that a known worker serves, sorted."""
        return sorted({model for member in self._fleet.members() for model in member.models})

    def model_list(self) -> bytes:
        """The JSON answer of ``GET /v1/models``: the union over workers, and aliases of what they serve."""
        return json.dumps({"object": "list", "data": [_card(name) for name in self._names()]}).encode()

    def model_card(self, name: str) -> bytes:
        """The JSON answer of ``GET /v1/models/NAME``. Raises ``NotFound``."""
        if name not in self._names():
            raise _no_such_model(name)
        return json.dumps(_card(name)).encode()

    def _names(self) -> list[str]:
        models = self.models()
        return sorted({*models, *(alias for alias, model in self._aliases.items() if model in models)})

    def ready(self) -> bool:
        """Some rank can take a request."""
        return any(rank.status is RankStatus.READY for rank in self._fleet.view.ranks)

    # --- a request ------------------------------------------------------------------------------------

    async def prepare(self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str) -> PreparedRequest:
        """Recognise the session and key the prompt. Raises ``NotFound`` for a model nobody serves."""
        model = self._aliases.get(request.model, request.model)
        if model not in self._fleet.models:
            if not self._fleet.models:
                raise NoWorker("No worker is registered yet.")
            raise _no_such_model(request.model)
        session = self._session(request, headers, tenant=tenant)
        if session is not None:
            await self._fleet.shared.look_up(model, session)
        seed, plain_seed = self._seeds(model, request.fields)
        prompt = await self._tokenize(request, model=model, seed=seed)
        tokens = None if prompt is None else prompt.tokens
        prepared = PreparedRequest(
            model=model,
            session=session,
            tokens=tokens,
            prompt_tokens=len(tokens) if tokens is not None else _guessed_tokens(request),
            output_tokens=request.max_tokens or _ASSUMED_OUTPUT_TOKENS,
            seed=seed,
            plain_seed=plain_seed,
        )
        if prompt is not None:
            prepared.know_keys(prompt.keys)
        if tokens is None:
            prepared.text_keys = _text_keys(request, model=model, seed=prepared.seed)
        if tokens is not None:
            keyed = "tokens" if model in self._tokenizers else "worker"
        else:
            keyed = "text" if prepared.text_keys else "none"
        self._metrics.prompts.labels(keyed).inc()
        prepared.ideal_tokens = self._ideal_tokens(prepared)
        prepared.decided = Decided(
            request_id=headers.get(REQUEST_ID, ""),
            model=model,
            tenant=tenant,
            session=session_hash(session),
            home=None,
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
            raise NoWorker(f"No worker is ready for {prepared.model!r} now.")
        prepared.decided.request_id = ""
        self.decisions.add(prepared.decided, decision, view=self._fleet.view, reusable=route.reusable_tokens, now=now)
        return prepared.decided

    async def _tokenize(self, request: InferenceRequest, *, model: str, seed: int) -> Prompt | None:
        """The prompt's ids, and its keys in the blocks of all ranks that serve the model; None without a tokenizer."""
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None and self._workers is None:
            return None
        started = self._fleet.clock()
        if tokenizer is None:
            assert self._workers is not None
            tokens = await self._workers.tokens(request, model=model)
            return None if tokens is None else Prompt(tokens, {})
        if len(request.body) > _INLINE_BYTES:
            draft = await asyncio.to_thread(tokenizer.start, request)
        else:
            draft = tokenizer.start(request)
        if draft is None:
            return None
        chains = {Chain(index.block_tokens, seed) for index in self._fleet.indexes(model)}
        if draft.unknown_chars > _INLINE_CHARS:
            prompt = await asyncio.to_thread(draft.finish, chains)
        else:
            prompt = draft.finish(chains)
        self._metrics.tokenize_seconds.observe(self._fleet.clock() - started)
        return prompt

    def _session(self, request: InferenceRequest, headers: Mapping[str, str], *, tenant: str) -> SessionKey | None:
        """Who asks; nobody in particular where nothing will be left in a cache to come home to."""
        if request.endpoint in _LEAVES_NOTHING:
            return None
        fields = request.fields if request.chat is None else {**request.fields, "messages": request.chat["messages"]}
        return identify(headers, fields, tenant=tenant, first=self._settings.session_headers)

    def prepare_tokens(
        self, model: str, tokens: array[int], *, fields: Mapping[str, object], session: SessionKey | None = None
    ) -> PreparedRequest:
        """Key a prompt whose token ids are known. ``fields`` are the request's: some divide caches."""
        seed, plain_seed = self._seeds(model, fields)
        return PreparedRequest(
            model=model,
            session=session,
            tokens=tokens,
            prompt_tokens=len(tokens),
            output_tokens=_ASSUMED_OUTPUT_TOKENS,
            seed=seed,
            plain_seed=plain_seed,
        )

    def choose(self, prepared: PreparedRequest, *, exclude: frozenset[int] = frozenset()) -> Attempt:
        """Decide, and open a lease on the chosen rank. Raises ``NoWorker``."""
        fleet = self._fleet
        now = fleet.clock()
        self._expire(now)
        request = self._route(prepared, exclude=exclude, now=now)
        decision = self._policy(fleet.view, request, self._rng, now)
        self._metrics.decision_seconds.observe(fleet.clock() - now)
        if decision is None:
            raise NoWorker(
                "No other worker is left to try." if exclude else f"No worker is ready for {prepared.model!r} now."
            )
        self._metrics.decisions.labels(self._settings.policy, decision.reason).inc()
        member = fleet.member(decision.slot)
        lease = self._open(prepared, decision, member, now=now)
        self._note(lease, request, now=now)
        return Attempt(target=member.target, decision=decision, lease=lease)

    def _route(self, prepared: PreparedRequest, *, exclude: frozenset[int], now: float) -> RouteRequest:
        """What the policy is asked, as of now."""
        fleet = self._fleet
        home = fleet.home(prepared.model, prepared.session, now=now) if prepared.session else None
        return RouteRequest(
            model=prepared.model,
            prompt_tokens=prepared.prompt_tokens,
            output_tokens=prepared.output_tokens,
            reusable_tokens=self._reusable(prepared, home),
            session=prepared.session,
            home=home,
            exclude=exclude,
        )

    def _note(self, lease: _Lease, request: RouteRequest, *, now: float) -> None:
        """Remember the decision for whoever asks why."""
        decided, view = lease.prepared.decided, self._fleet.view
        if decided is None or not decided.request_id:
            return
        if not decided.attempts:
            decided.home = next((rank.id for rank in view.ranks if rank.slot == request.home), None)
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

    def _sent_elsewhere(self, prepared: PreparedRequest) -> int:
        """Tokens of the session's last prompt if another replica sent it: text that this one has not seen."""
        assert prepared.session is not None, "only a session has a home"
        shared = self._fleet.shared.home(prepared.model, prepared.session)
        return 0 if shared is None or shared.is_own else shared.prompt_tokens

    def _tell_home(self, prepared: PreparedRequest, member: Member) -> None:
        assert prepared.session is not None, "only a session has a home"
        self._fleet.shared.bound(prepared.model, prepared.session, member.id, prompt_tokens=prepared.prompt_tokens)

    def _open(self, prepared: PreparedRequest, decision: Decision, member: Member, *, now: float) -> _Lease:
        fleet = self._fleet
        claim = fleet.loads.open(
            decision.slot,
            prompt_tokens=prepared.prompt_tokens,
            prefill_tokens=prepared.prompt_tokens - decision.expected_cached_tokens,
            seconds=decision.expected_prefill_seconds,
            now=now,
        )
        binding = None
        if prepared.session is not None:
            binding = fleet.sessions.start(prepared.model, prepared.session, slot=decision.slot, now=now)
            self._tell_home(prepared, member)
        lease = _Lease(self, prepared, decision, member, claim, binding)
        if prepared.tokens is None:
            fleet.texts.add(decision.slot, prepared.text_keys)
        elif _shares_before_prefill(member):
            self._promise_prompt(lease)
        return lease

    def _seeds(self, model: str, fields: Mapping[str, object]) -> tuple[int, int | None]:
        """Roots of a prompt's chain: of its own, and without the extra key. Other adapters and salts share nothing."""
        is_adapter = model in self._adapters or any(model in index.adapters for index in self._fleet.indexes(model))
        salt, extra = (
            value if isinstance(value := fields.get(name), str) else "" for name in ("cache_salt", "extra_key")
        )
        parts = (model if is_adapter else "", salt)
        plain = namespace_seed(*parts)
        return (namespace_seed(*parts, extra), plain) if extra else (plain, None)

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

    # --- what requests will leave in a rank's cache ---------------------------------------------------

    def _promise_prompt(self, lease: _Lease) -> None:
        member, prepared = lease.member, lease.prepared
        index = member.index
        if index is None or prepared.tokens is None or not self._fleet.knows(member):
            return
        keys = prepared.keys(index.block_tokens)
        if prepared.plain_seed is not None and member.target.engine is Engine.SGLANG:
            plain = block_keys(prepared.tokens, block_tokens=index.block_tokens, parent=prepared.plain_seed)
            index.namespaces.learn(plain, keys, seed=prepared.seed)
        ticket = index.promise(member.slot, keys, prompt_tokens=prepared.prompt_tokens)
        lease.promises.append((index, ticket))

    def _promise_output(self, member: Member, prepared: PreparedRequest, output: Sequence[int]) -> Promise | None:
        """The last token's own keys and values are never computed: blocks end before it."""
        index = member.index
        if index is None or prepared.tokens is None or len(output) < 2 or not self._fleet.knows(member):
            return None
        keys = (*prepared.keys(index.block_tokens), *prepared.keys_after(output[:-1], block_tokens=index.block_tokens))
        start = prepared.prompt_tokens // index.block_tokens
        return index, index.promise_more(member.slot, keys, start=start)

    def _recall_answer(self, prepared: PreparedRequest, *, now: float) -> None:
        """What the session's last answer left behind, if this prompt brings it back whole.

        No ids of an answer are known, only how many there were. The next turn's prompt has its text: where the next
        special token of the template stands just behind so many, they are the answer's.
        """
        answered = self._answered.pop((prepared.model, prepared.session), None) if prepared.session else None
        if answered is None or prepared.tokens is None:
            return
        before, count = answered.prepared, answered.output_tokens
        start = before.prompt_tokens
        if before.seed != prepared.seed or before.tokens != prepared.tokens[:start]:
            return
        rest = prepared.tokens[start : start + count + 1]
        special = self._tokenizers[prepared.model].special_ids if prepared.model in self._tokenizers else frozenset()
        length = next((place for place, token in enumerate(rest) if token in special), None)
        if length in (count - 1, count) and (promise := self._promise_output(answered.member, before, rest[:count])):
            index, ticket = promise
            index.provisional.end(ticket)
            self._expiring.append((now + PROVISIONAL_SECONDS, partial(index.provisional.drop, ticket)))

    def _expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            self._expiring.popleft()[1]()

    # --- called by leases -------------------------------------------------------------------------------

    def _first_byte(self, lease: _Lease) -> None:
        if lease.noted is not None:
            lease.noted.first_token_seconds = self._fleet.clock() - lease.noted.started
        if not lease.promises:
            self._promise_prompt(lease)
        served = self._fleet.loads.first_byte(lease.claim, now=self._fleet.clock())
        if served is not None and lease.prepared.tokens is not None:
            lease.member.learner.observe(
                served_seconds=served,
                uncached_tokens=lease.claim.prefill_tokens,
                context_tokens=lease.prepared.prompt_tokens,
            )

    def _close(self, lease: _Lease, outcome: Outcome, usage: Usage | None, output: Sequence[int]) -> None:
        now = self._fleet.clock()
        prepared = lease.prepared
        self._fleet.loads.close(lease.claim, now=now)
        if prepared.session is not None and lease.binding is not None:
            self._fleet.sessions.finish(prepared.model, prepared.session, lease.binding, now=now)
            shared = self._fleet.shared.home(prepared.model, prepared.session)
            if shared is not None and shared.rank == lease.member.id:  # else it has moved on meanwhile
                self._tell_home(prepared, lease.member)
        if outcome in (Outcome.OK, Outcome.CLIENT_GONE):
            if promise := self._promise_output(lease.member, prepared, output):
                lease.promises.append(promise)
            elif prepared.session is not None and usage is not None:
                key = (prepared.model, prepared.session)
                self._answered[key] = _Answered(lease.member, prepared, usage.completion_tokens)
                self._expiring.append((now + PROVISIONAL_SECONDS, partial(self._answered.pop, key, None)))
            for index, ticket in lease.promises:
                index.provisional.end(ticket)
                self._expiring.append((now + PROVISIONAL_SECONDS, partial(index.provisional.drop, ticket)))
        else:
            for index, ticket in lease.promises:
                index.provisional.drop(ticket)
        if outcome is Outcome.OK and usage is not None and usage.cached_tokens is not None:
            prompt_tokens = max(0, usage.prompt_tokens)  # a worker may say anything
            actual_tokens = min(prompt_tokens, max(0, usage.cached_tokens))
            self._compare(lease, prompt_tokens=prompt_tokens, actual_tokens=actual_tokens)
        if lease.noted is not None and prepared.decided is not None:
            lease.noted.outcome = outcome
            lease.noted.seconds = now - lease.noted.started
            if usage is not None:
                lease.noted.prompt_tokens, lease.noted.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            self.decisions.close(prepared.decided, lease.noted)

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


class _Lease:
    """One attempt's claim on a rank; see ``proxy.types.Lease``."""

    __slots__ = ("_brain", "_open", "binding", "claim", "decision", "member", "noted", "prepared", "promises")

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
        self.promises: list[Promise] = []

    def first_byte(self) -> None:
        """Prefill is over."""
        self._brain._first_byte(self)

    def close(self, outcome: Outcome, usage: Usage | None, *, output: Sequence[int] = ()) -> None:
        """The attempt is over; once. ``output`` are the ids of the tokens it brought, where they are known."""
        if self._open:
            self._open = False
            self._brain._close(self, outcome, usage, output)


def _shares_before_prefill(member: Member) -> bool:
    """Whether a second request finds the blocks of one that has not been prefilled yet.

    vLLM and the shim enter blocks as they schedule them; SGLang once they are computed: what is in flight together all
    misses.
    """
    return member.target.engine is not Engine.SGLANG


def _card(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "homing"}


def _no_such_model(name: str) -> NotFound:
    return NotFound(f"The model {name!r} does not exist or no worker serves it.", code="model_not_found", param="model")


def _guessed_tokens(request: InferenceRequest) -> int:
    """Prompt tokens as far as the body's size tells; tokenizing computes nothing."""
    if request.endpoint in (Endpoint.TOKENIZE, Endpoint.COUNT_TOKENS):
        return 1
    return max(1, len(request.body) // BYTES_A_TOKEN)


def _text_keys(request: InferenceRequest, *, model: str, seed: int) -> Sequence[int]:
    """Keys over the prompt's text; none where a prompt leaves nothing in a cache."""
    if request.chat is not None:
        text = chat_text(request.chat["messages"], tools=request.chat.get("tools"))
    elif request.prompt is not None:
        text = prompt_text(request.prompt)
    else:
        return ()
    return text_keys(text, parent=namespace_seed(model, str(seed)))
