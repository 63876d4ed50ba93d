"""The shim's HTTP face: OpenAI's API, vLLM's operational endpoints, and the two that only the shim has.

Handlers read, check and choose a rank; ``generate`` does the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from tokenizers import Tokenizer

from engine_shim import api, types
from engine_shim.answers import ChatShape, CompletionShape
from engine_shim.api import ApiError
from engine_shim.chat import ChatTemplate
from engine_shim.engine import Engine
from engine_shim.generate import Generation, GenerationResponse
from engine_shim.grammar import GrammarCompiler
from engine_shim.metrics import ShimCollector
from engine_shim.ranks import Ranks, event_source
from engine_shim.replies import HANDLERS, json_reply
from engine_shim.settings import Role
from engine_shim.structured import structure_of
from engine_shim.transfer.legs import Transfer
from router.wire.kv_events import encode_snapshot

_S = TypeVar("_S", bound=msgspec.Struct)
#: Longer texts are tokenized off the event loop, so that other streams go on.
_LONG_TEXT_CHARS = 8_192
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the server must know of the model; the weights are the runner's matter.

    ``tokenizer_config`` is what ``/tokenizer_info`` tells: transformers' file of that name, as far as it matters.
    ``has_logits``: tokens are chosen from logits, as requests wish; ``grammars``: answers can be held to one.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tokenizer_config: Mapping[str, object]
    vocab_tokens: int
    max_context_tokens: int
    version: str
    has_logits: bool = True
    grammars: GrammarCompiler | None = None


@dataclass(frozen=True, slots=True)
class Handing:
    """A shim with a role: what it exchanges pages with, and the door where a prefill shim's are fetched."""

    role: Role
    transfer: Transfer
    door: socket.socket | None = None


def create_app(
    model: ServedModel, engines: Sequence[Engine], *, max_body_bytes: int, handing: Handing | None = None
) -> FastAPI:
    """The application. Its lifespan starts the engines in the running loop and ends them."""
    offers = handing.transfer.offers if handing is not None else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        for engine in engines:
            engine.start(loop)
        if offers is not None and handing is not None and handing.door is not None:
            await offers.listen(handing.door)
        try:
            yield
        finally:
            if offers is not None:
                offers.close()
            for engine in engines:
                engine.stop()
            for engine in engines:
                await asyncio.to_thread(engine.join)

    return _application(ShimApi(model, Ranks(engines), max_body_bytes=max_body_bytes, handing=handing), lifespan)


Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def _application(shim: ShimApi, lifespan: Lifespan) -> FastAPI:
    app = FastAPI(title="Homing shim", version=shim.model.version, lifespan=lifespan)
    posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/v1/chat/completions": shim.chat,
        "/v1/completions": shim.complete,
        "/v1/chat/completions/render": shim.render,
        "/tokenize": shim.tokenize,
        "/detokenize": shim.detokenize,
        "/reset_prefix_cache": shim.reset_prefix_cache,
    }
    gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/v1/models": shim.models,
        "/health": shim.health,
        "/ping": shim.health,
        "/metrics": shim.metrics,
        "/version": shim.version,
        "/tokenizer_info": shim.tokenizer_info,
        "/tokenizer.json": shim.tokenizer_json,
        "/server_info": shim.server_info,
        "/kv_event_sources": shim.kv_event_sources,
        "/kv_snapshot": shim.kv_snapshot,
    }
    for path, handler in posts.items():
        app.add_api_route(path, handler, methods=["POST"], response_class=Response)
    for path, handler in gets.items():
        app.add_api_route(path, handler, methods=["GET"], response_class=Response)
    for kind, tell in HANDLERS.items():
        app.add_exception_handler(kind, tell)
    return app


class ShimApi:
    """The handlers, one method per path."""

    def __init__(
        self, model: ServedModel, ranks: Ranks, *, max_body_bytes: int, handing: Handing | None = None
    ) -> None:
        self.model = model
        self._handing = handing
        self._ranks = ranks
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())
        self._ids = itertools.count()
        self._registry = CollectorRegistry()
        self._registry.register(ShimCollector(ranks.engines, model_name=model.name))

    # --- generation ---------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        asked = await self._read(request, api.ChatRequest)
        asked.require_supported(has_logits=self.model.has_logits)
        text = self._render(asked.messages, asked.tools, asked.add_generation_prompt, asked.chat_template_kwargs)
        ids = await self._encode(text, add_special_tokens=False)
        max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        return await self._generate(request, asked, prompts=[ids], max_tokens=max_tokens, shape=ChatShape)

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        asked = await self._read(request, api.CompletionRequest)
        asked.require_supported(has_logits=self.model.has_logits)
        prompts = [
            await self._encode(prompt, add_special_tokens=asked.add_special_tokens)
            if isinstance(prompt, str)
            else self._known(prompt, param="prompt")
            for prompt in api.prompts(asked.prompt)
        ]
        max_tokens = _COMPLETION_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        return await self._generate(request, asked, prompts=prompts, max_tokens=max_tokens, shape=CompletionShape)

    async def _generate(
        self,
        request: Request,
        asked: api.ChatRequest | api.CompletionRequest,
        *,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        shape: type[ChatShape | CompletionShape],
    ) -> Response:
        self._check_model(asked.model)
        wanted = api.wanted_rank(request.headers, asked.routed_dp_rank, ranks=len(self._ranks.engines))
        leg = None
        if self._handing is not None:
            leg = self._handing.transfer.leg(asked, prompts=len(prompts), host=_own_host(request))
            if leg is not None and self._handing.role is Role.PREFILL:
                max_tokens = 1
        choices = asked.choices
        if leg is not None and choices > 1:
            raise ApiError("a prompt that two shims share has one answer", param="n")
        requests = [self._request(asked, ids, max_tokens, choice) for ids in prompts for choice in range(choices)]
        structure = await structure_of(asked, self.model.grammars, answers=len(requests))
        for item, constraint in zip(requests, structure.constraints, strict=True):
            item.constraint, item.priority = constraint, api.wanted_priority(request.headers, asked.priority)
        stops = asked.stops
        engine = self._ranks.choose(wanted)
        generation = Generation(
            engine,
            requests,
            tokenizer=self.model.tokenizer,
            stops=stops,
            leg=leg,
            choices=choices,
            force=structure.force,
        )
        prefix = "chatcmpl" if shape is ChatShape else "cmpl"
        worded = shape(
            id=f"{prefix}-{request.headers.get('x-request-id') or uuid.uuid4().hex}",
            model=self.model.name,
            created=int(time.time()),
            prompts=tuple(item.prompt for item in requests),
            tells_token_ids=bool(asked.return_token_ids),
            tells_usage=asked.includes_usage,
        )
        return GenerationResponse(generation, shape=worded, stream=bool(asked.stream))

    def _request(
        self,
        asked: api.ChatRequest | api.CompletionRequest,
        ids: Sequence[int],
        max_tokens: int | None,
        choice: int,
    ) -> types.Request:
        limit = self.model.max_context_tokens
        if not ids:
            raise ApiError("the prompt has no tokens", param="prompt")
        if len(ids) + (max_tokens or 1) > limit:
            raise ApiError(
                f"This model's maximum context length is {limit} tokens. The prompt has {len(ids)} tokens and "
                f"{max_tokens or 1} are asked for.",
                code="context_length_exceeded",
                param="messages" if isinstance(asked, api.ChatRequest) else "prompt",
            )
        if max_tokens is not None and max_tokens < 1:
            raise ApiError(f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")
        return types.Request(
            id=str(next(self._ids)),
            prompt=tuple(ids),
            sampling=asked.sampling(
                max_tokens=limit - len(ids) if max_tokens is None else max_tokens,
                vocab_tokens=self.model.vocab_tokens,
                choice=choice,
            ),
            namespace=asked.cache_salt or "",
            arrival_seconds=time.perf_counter(),
        )

    # --- tokens -------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``: the ids a prompt or chat would be run with."""
        asked = await self._read(request, api.TokenizeRequest)
        self._check_model(asked.model)
        if asked.messages is not None:
            text = self._render(asked.messages, asked.tools, asked.add_generation_prompt, asked.chat_template_kwargs)
            ids = await self._encode(text, add_special_tokens=bool(asked.add_special_tokens))
        elif asked.prompt is not None:
            ids = await self._encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
        else:
            raise ApiError("either prompt or messages is needed", param="prompt")
        return json_reply({"count": len(ids), "max_model_len": self.model.max_context_tokens, "tokens": ids})

    async def render(self, request: Request) -> Response:
        """``POST /v1/chat/completions/render``: the ids a chat request would be run with, as vLLM tells them."""
        asked = await self._read(request, api.ChatRequest)
        self._check_model(asked.model)
        text = self._render(asked.messages, asked.tools, asked.add_generation_prompt, asked.chat_template_kwargs)
        return json_reply({"token_ids": await self._encode(text, add_special_tokens=False), "model": self.model.name})

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``: the text of token ids."""
        asked = await self._read(request, api.DetokenizeRequest)
        self._check_model(asked.model)
        ids = self._known(asked.tokens, param="tokens")
        return json_reply({"prompt": self.model.tokenizer.decode(ids, skip_special_tokens=False)})

    async def tokenizer_info(self, _: Request) -> Response:
        """``GET /tokenizer_info``: the model's tokenizer_config with its chat template."""
        return json_reply(dict(self.model.tokenizer_config))

    async def tokenizer_json(self, _: Request) -> Response:
        """``GET /tokenizer.json``: the fast tokenizer's file, so that a router needs no copy of its own."""
        return Response(self.model.tokenizer.to_str(), media_type="application/json")

    # --- cache --------------------------------------------------------------------------------------

    async def reset_prefix_cache(self, _: Request) -> Response:
        """``POST /reset_prefix_cache``: empty every rank's cache; false where requests hold pages."""
        done = await asyncio.gather(*(engine.reset_cache() for engine in self._ranks.engines))
        return json_reply({"success": all(done)})

    async def kv_event_sources(self, _: Request) -> Response:
        """``GET /kv_event_sources``: where each rank publishes, in vLLM's shape."""
        return json_reply({str(engine.rank): event_source(engine) for engine in self._ranks.engines})

    async def kv_snapshot(self, request: Request) -> Response:
        """``GET /kv_snapshot?dp_rank=N``: what is resident, and the sequence number it is true at."""
        unknown = request.query_params.keys() - {"dp_rank"}
        if unknown:
            name = min(unknown)
            raise ApiError(f"there is no query parameter {name}; the rank is named by dp_rank", param=name)
        text = request.query_params.get("dp_rank", "0")
        ranks = len(self._ranks.engines)
        if not text.isdecimal() or int(text) >= ranks:
            raise ApiError(f"dp_rank {text} is out of range [0, {ranks}).", param="dp_rank")
        snapshot = await self._ranks.engines[int(text)].snapshot()
        if snapshot is None:
            raise ApiError("This shim publishes no cache events.", status=404, code="events_disabled")
        content = await asyncio.to_thread(encode_snapshot, snapshot)
        return Response(content, media_type="application/x-msgpack")

    # --- operation ----------------------------------------------------------------------------------

    async def models(self, _: Request) -> Response:
        """``GET /v1/models``: the one model."""
        entry = {"id": self.model.name, "object": "model", "created": self._created, "owned_by": "homing"}
        entry |= {"root": self.model.name, "parent": None, "max_model_len": self.model.max_context_tokens}
        return json_reply({"object": "list", "data": [entry]})

    async def health(self, _: Request) -> Response:
        """``GET /health``: 200 while every rank works."""
        broken = [engine for engine in self._ranks.engines if not engine.accepts]
        if broken:
            why = ", ".join(f"rank {engine.rank}: {engine.failure or 'stopping'}" for engine in broken)
            raise ApiError(why, status=503, code="engine_unavailable")
        return Response()

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics``: Prometheus text."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def server_info(self, _: Request) -> Response:
        """``GET /server_info``: what SGLang tells there of its role, and where its prompts are fetched."""
        handing = self._handing
        role = None if handing is None else handing.role
        told: dict[str, object] = {"version": self.model.version, "disaggregation_mode": role or "null"}
        if handing is not None and handing.transfer.port:
            told["disaggregation_bootstrap_port"] = handing.transfer.port
        return json_reply(told)

    async def version(self, _: Request) -> Response:
        """``GET /version``."""
        return json_reply({"version": self.model.version})

    # --- shared steps -------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[_S]) -> _S:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body_bytes:
                raise self._too_large()
            parts.append(part)
        return api.decode(b"".join(parts), kind)

    def _too_large(self) -> ApiError:
        message = f"The body exceeds {self._max_body_bytes} bytes."
        return ApiError(message, status=413, code="request_body_too_large")

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.model.name):
            message = f"The model `{name}` does not exist."
            raise ApiError(message, status=404, code="model_not_found", param="model")

    def _render(
        self,
        messages: Sequence[api.Message],
        tools: Sequence[api.Message] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, object] | None,
    ) -> str:
        if self.model.template is None:
            raise ApiError("This model has no chat template.", param="messages")
        if not messages:
            raise ApiError("messages is empty", param="messages")
        return self.model.template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra or {}
        )

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encode = self.model.tokenizer.encode_batch_fast  # the batch call lets go of the interpreter lock
        if len(text) < _LONG_TEXT_CHARS:
            return encode([text], add_special_tokens=add_special_tokens)[0].ids
        batch = await asyncio.to_thread(encode, [text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def _known(self, ids: list[int], *, param: str) -> list[int]:
        if ids and not (min(ids) >= 0 and max(ids) < self.model.vocab_tokens):
            raise ApiError(f"token ids must be in [0, {self.model.vocab_tokens})", param=param)
        return ids


def _own_host(request: Request) -> str:
    """This shim's address as the request reached it."""
    host, _ = request.scope.get("server") or ("127.0.0.1", 0)
    return str(host)
