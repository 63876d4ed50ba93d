"""What clients are told: the JSON objects of chat and text completions, whole and in chunks. No I/O.

Beside OpenAI's fields stand vLLM's ``stop_reason`` and, on request, ``prompt_token_ids`` and ``token_ids``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from engine_shim.tools import CallPiece

Json = dict[str, object]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class WordedLogprob:
    """One token's logarithm of probability, and the likeliest tokens', as texts. ``offset`` counts characters."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one choice; ``ids`` are the tokens it was made of, ``finish`` is told with the last one.

    Where tools are forced ``calls`` stand for the text. ``logprobs`` has an entry for each token, if they are told.
    """

    index: int
    text: str
    ids: tuple[int, ...]
    finish: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[WordedLogprob, ...] | None = None
    calls: tuple[CallPiece, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request, over all its prompts."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def body(self) -> Json:
        """The ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def sse(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def join(pieces: Sequence[Piece]) -> Piece:
    """The pieces of one choice as one."""
    last = pieces[-1]
    return replace(
        last,
        text="".join(piece.text for piece in pieces),
        ids=tuple(token for piece in pieces for token in piece.ids),
        logprobs=None if last.logprobs is None else tuple(each for piece in pieces for each in piece.logprobs or ()),
        calls=None if last.calls is None else tuple(call for piece in pieces for call in piece.calls or ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(ABC):
    """How one API words its answers. ``prompts`` are the token ids of the request's prompts, by index."""

    id: str
    model: str
    created: int
    prompts: tuple[tuple[int, ...], ...]
    tells_token_ids: bool
    tells_usage: bool

    @abstractmethod
    def whole(self, choices: Sequence[Piece], usage: Usage) -> Json:
        """The answer of a request that does not stream."""

    @abstractmethod
    def opening(self, index: int) -> Json | None:
        """The chunk before a choice's first text."""

    @abstractmethod
    def chunk(self, piece: Piece, *, first: bool) -> Json:
        """One chunk of a choice."""

    def chunks(self, piece: Piece, *, first: bool) -> bytes:
        """The server-sent events that tell one piece."""
        opening = self.opening(piece.index) if first else None
        events = sse(opening) if opening else b""
        # Text may be held back: in the middle of a character, or where a stop string may begin.
        is_silent = not (piece.text or piece.calls or piece.logprobs or piece.finish or self.tells_token_ids)
        if is_silent and (events or not first):
            return events
        return events + sse(self.chunk(piece, first=first))

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk when ``stream_options.include_usage`` asks for it."""

    def _envelope(self, kind: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }

    def _chunk_envelope(self, kind: str, choices: Sequence[Json]) -> Json:
        envelope = self._envelope(kind, choices)
        if self.tells_usage:
            envelope["usage"] = None
        return envelope

    def _end(self, piece: Piece) -> Json:
        logprobs = None if piece.logprobs is None else self._logprobs(piece.logprobs)
        return {"logprobs": logprobs, "finish_reason": piece.finish, "stop_reason": piece.stop_reason}

    @abstractmethod
    def _logprobs(self, told: Sequence[WordedLogprob]) -> Json:
        """The ``logprobs`` object of a choice."""


class ChatShape(Shape):
    """``chat.completion``: one prompt, whose ids stand beside the choices."""

    __slots__ = ()
    _CHUNK = "chat.completion.chunk"

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Json:
        told = []
        for piece in sorted(choices, key=lambda piece: piece.index):
            message: Json = {"role": "assistant", "content": piece.text}
            if piece.calls is not None:
                message |= {"content": None, "tool_calls": self._calls(piece.index, piece.calls)}
            choice: Json = {"index": piece.index, "message": message} | self._end(piece)
            if self.tells_token_ids:
                choice["token_ids"] = piece.ids
            told.append(choice)
        body = self._envelope("chat.completion", told) | {"usage": usage.body()}
        if self.tells_token_ids:
            body["prompt_token_ids"] = self.prompts[0]
        return body

    def opening(self, index: int) -> Json | None:
        choice: Json = {"index": index, "delta": {"role": "assistant", "content": ""}}
        choice |= {"logprobs": None, "finish_reason": None}
        body = self._chunk_envelope(self._CHUNK, [choice])
        if self.tells_token_ids:
            body["prompt_token_ids"] = self.prompts[0]
        return body

    def chunk(self, piece: Piece, *, first: bool) -> Json:
        delta: Json = {"content": piece.text} if piece.text or piece.finish is None else {}
        if piece.calls is not None:
            deltas = [self._call_delta(piece.index, call) for call in piece.calls]
            delta = {"tool_calls": deltas} if deltas else {}
        choice: Json = {"index": piece.index, "delta": delta} | self._end(piece)
        if self.tells_token_ids:
            choice["token_ids"] = piece.ids
        return self._chunk_envelope(self._CHUNK, [choice])

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope(self._CHUNK, ()) | {"usage": usage.body()}

    def _logprobs(self, told: Sequence[WordedLogprob]) -> Json:
        def entry(text: str, logprob: float) -> Json:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = [
            entry(each.text, each.logprob) | {"top_logprobs": [entry(*other) for other in each.top]} for each in told
        ]
        return {"content": content, "refusal": None}

    def _calls(self, choice: int, pieces: Sequence[CallPiece]) -> list[Json]:
        """Whole calls, out of their pieces."""
        calls: list[Json] = []
        arguments: list[str] = []
        for piece in pieces:
            if piece.name is not None:
                calls.append(self._call_delta(choice, piece))
                arguments.append("")
            arguments[piece.index] += piece.arguments
        for call, text in zip(calls, arguments, strict=True):
            function = call["function"]
            assert isinstance(function, dict), "a call begins with its function"
            function["arguments"] = text
            del call["index"]
        return calls

    def _call_delta(self, choice: int, piece: CallPiece) -> Json:
        if piece.name is None:
            return {"index": piece.index, "function": {"arguments": piece.arguments}}
        return {
            "index": piece.index,
            "id": f"call-{self.id}-{choice}-{piece.index}",
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }


class CompletionShape(Shape):
    """``text_completion``: a choice per prompt, whose ids stand in the choice."""

    __slots__ = ()
    _KIND = "text_completion"

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Json:
        told = [self._choice(piece, first=True) for piece in sorted(choices, key=lambda piece: piece.index)]
        return self._envelope(self._KIND, told) | {"usage": usage.body()}

    def opening(self, index: int) -> Json | None:
        return None

    def chunk(self, piece: Piece, *, first: bool) -> Json:
        return self._chunk_envelope(self._KIND, [self._choice(piece, first=first)])

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope(self._KIND, ()) | {"usage": usage.body()}

    def _choice(self, piece: Piece, *, first: bool) -> Json:
        choice: Json = {"index": piece.index, "text": piece.text} | self._end(piece)
        if self.tells_token_ids:
            choice["token_ids"] = piece.ids
            if first:
                choice["prompt_token_ids"] = self.prompts[piece.index]
        return choice

    def _logprobs(self, told: Sequence[WordedLogprob]) -> Json:
        return {
            "text_offset": [each.offset for each in told],
            "token_logprobs": [each.logprob for each in told],
            "tokens": [each.text for each in told],
            "top_logprobs": [{**dict(each.top), each.text: each.logprob} for each in told],
        }
