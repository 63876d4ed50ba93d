"""From an accepted request to its answer's bytes: run it on a rank, word what comes, give up when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from engine_shim.answers import DONE, Piece, Shape, Usage, WordedLogprob, join, sse
from engine_shim.api import ApiError
from engine_shim.engine import Engine, EngineStopped
from engine_shim.mailbox import Delta, Mailbox
from engine_shim.structured import ToolForce
from engine_shim.text import TextStream
from engine_shim.tools import CallReader
from engine_shim.transfer.legs import Leg
from engine_shim.types import FinishReason, Request, TokenLogprob
from router.wire.headers import SERVED_DP_RANK

_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Generation:
    """The requests of one HTTP request, one per prompt, on one rank."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        *,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        leg: Leg | None = None,
        choices: int = 1,
        force: ToolForce | None = None,
    ) -> None:
        """``leg``: what is to be done with another shim."""
        self.engine = engine
        self._leg = leg
        self._handing: asyncio.Future[None] | None = None
        self.requests = tuple(requests)
        self._texts = [
            TextStream(tokenizer, stops=stops, stop_token_ids=request.sampling.stop_token_ids) for request in requests
        ]
        self._calls = [CallReader(force.name) for _ in requests] if force is not None else None
        self._names_tool = force is not None and force.name is not None
        self._tokenizer = tokenizer
        self._choices = choices
        self._offsets = [0] * len(requests)
        self._mailbox = Mailbox(len(requests))
        self._running = set(range(len(requests)))
        self._completion_tokens = 0

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Submit, then yield what each step or burst of steps made, until every prompt has its end.

        Raises ``ApiError`` when the rank gives up, ``ClientGone`` after ``close``.
        """
        if self._leg is not None:
            await self._hand(self._leg.before(self.engine, self.requests))
        try:
            for index, request in enumerate(self.requests):
                self.engine.submit(request, mailbox=self._mailbox, index=index)
        except EngineStopped as error:
            raise _unavailable(str(error)) from error
        while self._running:
            deltas = await self._mailbox.take()
            if not deltas:
                raise ClientGone
            pieces = [self._piece(delta) for delta in deltas if delta.index in self._running]
            if self._leg is not None and not self._running:
                await self._hand(self._leg.after(self.engine, self.requests))
            if pieces:
                yield pieces

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=sum(len(request.prompt) for request in self.requests[:: self._choices]),
            cached_tokens=self._cached_tokens(),
            completion_tokens=self._completion_tokens,
        )

    def _cached_tokens(self) -> int:
        told = None if self._leg is None else self._leg.cached_tokens
        return sum(request.cached_tokens for request in self.requests[:: self._choices]) if told is None else told

    @property
    def fields(self) -> Mapping[str, object]:
        """What a whole answer says beside its choices."""
        return {} if self._leg is None else self._leg.fields()

    async def _hand(self, work: Coroutine[None, None, None]) -> None:
        """Exchange something with another shim, as long as there is somebody to answer."""
        self._handing = asyncio.ensure_future(work)
        try:
            await self._handing
        except asyncio.CancelledError as error:
            raise ClientGone from error
        except EngineStopped as error:
            raise _unavailable(str(error)) from error

    def close(self) -> None:
        """Stop reading; what still runs is aborted within one step."""
        self._mailbox.close()
        if self._handing is not None:
            self._handing.cancel()
        if self._leg is not None:
            self._leg.close()
        for index in self._running:
            self.engine.abort(self.requests[index].id)
        self._running.clear()

    def _piece(self, delta: Delta) -> Piece:
        if delta.finish in (FinishReason.ABORT, FinishReason.ERROR):
            self._refuse(self.requests[delta.index])
        told = self._texts[delta.index].push(delta.tokens, finish=delta.finish)
        self._completion_tokens += len(told.ids)
        if told.finish is not None:
            self._running.discard(delta.index)
            if delta.finish is None:  # ended by a stop string, of which the engine knows nothing
                self.engine.abort(self.requests[delta.index].id)
        piece = Piece(delta.index, told.text, told.ids, told.finish, told.stop_reason)
        if self.requests[delta.index].sampling.logprobs is not None:
            piece = replace(piece, logprobs=self._worded(delta.index, told.ids, delta.logprobs))
        if self._calls is None:
            return piece
        # As OpenAI does it: where the client named the function, a call is no reason of its own to stop.
        ended = "tool_calls" if piece.finish == FinishReason.STOP and not self._names_tool else piece.finish
        return replace(piece, finish=ended, calls=tuple(self._calls[delta.index].push(told.text)))

    def _worded(self, index: int, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> tuple[WordedLogprob, ...]:
        """The logprobs of the tokens that count, in words."""
        worded = []
        for token, each in zip(ids, logprobs, strict=False):  # what lies behind a stop string does not count
            text = self._word(token)
            top = tuple((self._word(other), logprob) for other, logprob in each.top)
            worded.append(WordedLogprob(text, each.logprob, top, self._offsets[index]))
            self._offsets[index] += len(text)
        return tuple(worded)

    def _word(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _refuse(self, request: Request) -> NoReturn:
        if self.engine.accepts and request.constraint is not None and request.computed_tokens:
            message = "The answer cannot go on: nothing fits its grammar any more, or that is too large to follow"
            raise ApiError(message, code="invalid_grammar")
        if self.engine.accepts:
            raise ApiError("The request needs more cache pages than this rank has", code="context_too_large")
        raise _unavailable(self.engine.failure or "the engine is stopping")


class GenerationResponse(Response):
    """Answers with a generation, streamed or whole; a client that leaves ends it at once, also while it is silent.

    The head is sent with the first token, so that a failure before it has a status of its own.
    """

    def __init__(self, generation: Generation, *, shape: Shape, stream: bool) -> None:
        super().__init__()
        self._generation = generation
        self._shape = shape
        self._stream = stream
        self._rank = (SERVED_DP_RANK, str(generation.engine.rank).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generation and send its answer."""
        watch = asyncio.create_task(_when_gone(receive, self._generation.close))
        try:
            await (self._send_stream(send) if self._stream else self._send_whole(send))
        except ClientGone:
            pass
        finally:
            watch.cancel()
            self._generation.close()

    async def _send_whole(self, send: Send) -> None:
        told: list[list[Piece]] = [[] for _ in self._generation.requests]
        try:
            async for pieces in self._generation.pieces():
                for piece in pieces:
                    told[piece.index].append(piece)
        except ApiError as error:
            await self._send_json(send, error.status, error.body())
            return
        body = self._shape.whole([join(pieces) for pieces in told], self._generation.usage)
        await self._send_json(send, 200, {**body, **self._generation.fields})

    async def _send_stream(self, send: Send) -> None:
        begun: set[int] = set()
        try:
            async for pieces in self._generation.pieces():
                if not begun:
                    await self._send_head(send, 200, (_SSE, (b"cache-control", b"no-cache")))
                events = [self._shape.chunks(piece, first=piece.index not in begun) for piece in pieces]
                begun.update(piece.index for piece in pieces)
                await _send_part(send, b"".join(events))
        except ApiError as error:
            if not begun:
                await self._send_json(send, error.status, error.body())
                return
            await _send_part(send, sse(error.body()) + DONE, last=True)
            return
        usage = self._generation.usage
        tail = sse(self._shape.usage_chunk(usage)) if self._shape.tells_usage else b""
        await _send_part(send, tail + DONE, last=True)

    async def _send_json(self, send: Send, status: int, body: dict[str, object]) -> None:
        content = msgspec.json.encode(body)
        await self._send_head(send, status, (_JSON, (b"content-length", str(len(content)).encode())))
        await _send_part(send, content, last=True)

    async def _send_head(self, send: Send, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [*headers, self._rank]})


async def _send_part(send: Send, part: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": not last})


async def _when_gone(receive: Receive, tell: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    tell()


def _unavailable(why: str) -> ApiError:
    return ApiError(f"This rank takes no requests: {why}", status=503, code="engine_unavailable")
