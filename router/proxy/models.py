"""What the router knows of models: names, tokenizers, and what divides their caches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from router.core.types import Engine
from router.errors import NotFound, NoWorker
from router.fleet.fleet import Fleet
from router.fleet.target import ModelCard
from router.proxy.lanes import Lanes
from router.proxy.prepared import request_text_keys
from router.proxy.token_cache import Chain
from router.proxy.tokenization import MOST_PROMPT_TOKENS, SLICE_CHARS, Draft, Prompt, PromptTokenizer, TooLong
from router.proxy.weight import is_light, is_short
from router.proxy.worker_tokens import WorkerTokenizer
from router.wire.block_keys import namespace_seed
from router.wire.openai import Endpoint, InferenceRequest, parse_request

#: More new text than this is tokenized off the event loop, and more than that never before shorter prompts.
_INLINE_CHARS: Final = 8 * 1024
_SHORT_CHARS: Final = 256 * 1024
#: Names in errors are no longer than this.
_SHOWN_CHARS: Final = 256


class Named(NamedTuple):
    """What a client means by a model's name: the model, an adapter (LoRA) over it or "", and what workers call both."""

    model: str
    adapter: str
    told: str


class Census(NamedTuple):
    """How many workers are registered, and how many of those are down."""

    known: int
    down: int

    def __str__(self) -> str:
        if not self.known:
            return "No worker is registered yet."
        if not self.down:
            return f"No worker is up yet: {self.known} {'is' if self.known == 1 else 'are'} being asked."
        if self.down == self.known:
            return (
                "No worker is up: the only one is down."
                if self.known == 1
                else f"No worker is up: all {self.known} are down."
            )
        return f"No worker is up: of {self.known}, {self.down} {'is' if self.down == 1 else 'are'} down."


class Models:
    """Names clients may use, and how each model's prompts are keyed."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tokenizers: dict[str, PromptTokenizer] = {}
        self._lanes = Lanes()
        self._workers: WorkerTokenizer | None = None
        self._aliases: dict[str, str] = {}
        self._adapters: set[str] = set()
        self._census: Callable[[], Census] = lambda: Census(0, 0)
        #: By model, as of one version of the fleet's view (``_renew``).
        self._contexts: dict[str, list[int]] = {}
        self._most_tokens: dict[str, int] = {}
        self._are_sglang: dict[str, bool] = {}
        self._renewed_version = -1

    def set_tokenizer(self, model: str, tokenizer: PromptTokenizer) -> None:
        """Key this model's prompts by tokens from now on."""
        self._tokenizers[model] = tokenizer

    def share_tokenizer(self, adapter: str, *, of: str) -> bool:
        """Key an adapter's prompts by the tokenizer of its model, unless it has its own; whether there is one now."""
        if adapter not in self._tokenizers and of in self._tokenizers:
            self._tokenizers[adapter] = self._tokenizers[of]
        return adapter in self._tokenizers

    def ask_workers(self, workers: WorkerTokenizer) -> None:
        """Have workers tokenize for models without a tokenizer of their own here."""
        self._workers = workers

    def count_workers(self, census: Callable[[], Census]) -> None:
        """Who knows the workers, also those that no rank is known of."""
        self._census = census

    def has_tokenizer(self, model: str) -> bool:
        """Whether prompts of this model are keyed by tokens."""
        return model in self._tokenizers

    def token_ids(self, model: str, body: bytes) -> Sequence[int] | None:
        """The prompt's ids of a chat request's body; None without a tokenizer or template. For the self-check."""
        tokenizer = self._tokenizers.get(model)
        return tokenizer.encode(parse_request(Endpoint.CHAT, body)) if tokenizer is not None else None

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
        return json.dumps({"object": "list", "data": [self._card(name) for name in self._names()]}).encode()

    def model_card(self, name: str) -> bytes:
        """The JSON answer of ``GET /v1/models/NAME``. Raises ``NotFound``."""
        if name not in self._names():
            raise _no_such_model(name)
        return json.dumps(self._card(name)).encode()

    def _card(self, name: str) -> ModelCard:
        """As the first worker says it that serves the model, but with the shortest context among all of them."""
        model = self._aliases.get(name, name)
        cards = [member.cards[model] for member in self._fleet.members() if model in member.cards]
        context_tokens = self.context_tokens(model)
        return {
            "object": "model",
            "created": 0,
            "owned_by": "homing",
            **(cards[0] if cards else {}),
            **({} if context_tokens is None else {"max_model_len": context_tokens}),
            "id": name,
        }

    def context_tokens(self, model: str) -> int | None:
        """The shortest context among the ranks that serve a model; None where none of them says."""
        return min(self._contexts_of(model), default=None)

    def most_tokens(self, model: str) -> int:
        """The longest prompt that a rank may take."""
        contexts = self._contexts_of(model)
        most_tokens = self._most_tokens.get(model)
        if most_tokens is None:
            all_say = contexts and len(contexts) == len(self._cards_of(model))
            most_tokens = max(contexts) if all_say else max([MOST_PROMPT_TOKENS, *contexts])
            self._most_tokens[model] = most_tokens
        return most_tokens

    def _cards_of(self, model: str) -> list[ModelCard]:
        return [member.cards[model] for member in self._fleet.members() if model in member.cards]

    def _contexts_of(self, model: str) -> list[int]:
        """Of the ranks that say."""
        self._renew()
        if model not in self._contexts:
            told = (card.get("max_model_len") for card in self._cards_of(model))
            self._contexts[model] = [tokens for tokens in told if isinstance(tokens, int)]
        return self._contexts[model]

    def _is_sglang(self, model: str) -> bool:
        """SGLang alone serves it, which has ways of its own to ask for an adapter."""
        self._renew()
        if model not in self._are_sglang:
            engines = {member.target.engine for member in self._fleet.members() if model in member.models}
            self._are_sglang[model] = engines == {Engine.SGLANG}
        return self._are_sglang[model]

    def _renew(self) -> None:
        """Forget what was found of another view of the fleet."""
        version = self._fleet.view.version
        if version != self._renewed_version:
            self._contexts, self._most_tokens, self._are_sglang, self._renewed_version = {}, {}, {}, version

    def _names(self) -> list[str]:
        models = self.models()
        return sorted({*models, *(alias for alias, model in self._aliases.items() if model in models)})

    def resolve(self, name: str) -> Named:
        """What a client means. Raises ``NotFound``, or ``NoWorker`` while no worker has ever been up."""
        model = self._aliases.get(name, name)
        if model in self._fleet.models:
            return Named(model, "", model)
        if (named := self._with_adapter(name)) is not None:
            return named
        if not self._fleet.models:
            raise NoWorker(str(self._census()))
        raise _no_such_model(name)

    def _with_adapter(self, name: str) -> Named | None:
        """``model:adapter``, as SGLang's clients ask for an adapter. A model's own name may have colons."""
        names = (base for base in (*self._fleet.models, *self._aliases) if name.startswith(base + ":"))
        base = max((base for base in names if self._is_sglang(self._aliases.get(base, base))), key=len, default=None)
        if base is None:
            return None
        model, adapter = self._aliases.get(base, base), name[len(base) + 1 :]
        return Named(model, adapter.strip(), f"{model}:{adapter}")

    # --- keys -----------------------------------------------------------------------------------------

    def special_ids(self, model: str) -> frozenset[int]:
        """Ids of the special tokens its chat template may set between messages; empty without a tokenizer."""
        tokenizer = self._tokenizers.get(model)
        return frozenset() if tokenizer is None else frozenset(tokenizer.special_ids)

    def text_of(self, model: str, ids: Sequence[int]) -> str:
        """The text that tokens stand for; empty without a tokenizer."""
        tokenizer = self._tokenizers.get(model)
        return "" if tokenizer is None else tokenizer.decode(ids)

    def tokenizes(self, model: str) -> bool:
        """Whether prompts of this model may be keyed by tokens."""
        return self._workers is not None or model in self._tokenizers

    async def tokenize(self, request: InferenceRequest, *, model: str, seed: int) -> Prompt | None:
        """The prompt's ids, and its keys in the blocks of all ranks that serve the model; None without a tokenizer.

        Raises ``TooLong`` for more ids than any rank takes, whoever counts them. Cancelled, it ends with its slice.
        """
        most_tokens = self.most_tokens(model)
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None:
            return await self._told(request, model=model, most_tokens=most_tokens)
        start = partial(tokenizer.start, request, most_tokens=most_tokens)
        draft = start() if is_light(request) else await self._lanes.run(start, is_long=not is_short(request))
        if draft is None:
            return None
        chains = {Chain(index.block_tokens, seed) for index in self._fleet.indexes(model)}
        unknown_chars = draft.unknown_chars
        if unknown_chars <= _INLINE_CHARS:
            return draft.finish(chains)
        is_long = unknown_chars > _SHORT_CHARS
        while isinstance(draft, Draft) and draft.unknown_chars > SLICE_CHARS:
            await self._lanes.run(draft.advance, is_long=is_long)
        return await self._lanes.run(partial(draft.finish, chains), is_long=is_long)

    async def _told(self, request: InferenceRequest, *, model: str, most_tokens: int) -> Prompt | None:
        """The ids that a worker tells."""
        if self._workers is None:
            return None
        tokens = await self._workers.tokens(request, model=model, most_tokens=most_tokens)
        if tokens is None:
            return None
        if len(tokens) > most_tokens:
            raise TooLong
        return Prompt(tokens, {})

    async def text_keys(self, request: InferenceRequest, *, model: str, seed: int) -> Sequence[int] | None:
        """The prompt's keys by its text alone; None where there is no text to key."""
        keyed = partial(request_text_keys, request, model=model, seed=seed)
        return keyed() if is_light(request) else await self._lanes.run(keyed, is_long=not is_short(request))

    def seeds(self, model: str, fields: Mapping[str, object]) -> tuple[int, int | None]:
        """Roots of a prompt's chain: of its own, and without the extra key. Other adapters and salts share nothing."""
        adapter = self._adapter(model, fields)
        salt, extra = fields.get("cache_salt"), fields.get("extra_key")
        if not isinstance(salt, str):
            salt = ""
        plain = namespace_seed(adapter, salt)
        return (namespace_seed(adapter, salt, extra), plain) if extra and isinstance(extra, str) else (plain, None)

    def _adapter(self, model: str, fields: Mapping[str, object]) -> str:
        """What the model is computed with; "" for itself. SGLang computes a model that has an adapter's name alone as
        the model below it.
        """
        if model in self._adapters:
            return model
        if self._is_sglang(model):
            name, path = fields.get("model"), fields.get("lora_path")
            if isinstance(name, str) and self._aliases.get(name, name) != model:
                named = self._with_adapter(name)
                if named is not None and named.adapter:
                    return named.adapter
            return path if isinstance(path, str) else ""
        return model if any(model in one.adapters for one in self._fleet.indexes(model)) else ""


def _no_such_model(name: str) -> NotFound:
    shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."
    return NotFound(
        f"The model {shown!r} does not exist or no worker serves it.", code="model_not_found", param="model"
    )
