"""What clients are told: the JSON objects of chat and text completions, whole and in chunks. No I/O.

Beside OpenAI's fields stand vLLM's ``stop_reason`` and, on request, ``prompt_token_ids`` and ``token_ids``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

Json = dict[str, object]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one choice; ``ids`` are the tokens it was made of, ``finish`` is told with the last one."""

    index: int
    text: str
    ids: tuple[int, ...]
    finish: str | None = None
    stop_reason: str | int | None = None


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
    ids = tuple(token for piece in pieces for token in piece.ids)
    return Piece(last.index, "".join(piece.text for piece in pieces), ids, last.finish, last.stop_reason)


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
        is_silent = not piece.text and piece.finish is None and not self.tells_token_ids
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

    @staticmethod
    def _end(piece: Piece) -> Json:
        return {"logprobs": None, "finish_reason": piece.finish, "stop_reason": piece.stop_reason}


class ChatShape(Shape):
    """``chat.completion``: one prompt, one choice; prompt ids stand beside the choices."""

    __slots__ = ()
    _CHUNK = "chat.completion.chunk"

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Json:
        (piece,) = choices
        choice: Json = {"index": 0, "message": {"role": "assistant", "content": piece.text}}
        choice |= self._end(piece)
        body = self._envelope("chat.completion", [choice]) | {"usage": usage.body()}
        if self.tells_token_ids:
            choice["token_ids"] = piece.ids
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
        choice: Json = {"index": piece.index, "delta": delta} | self._end(piece)
        if self.tells_token_ids:
            choice["token_ids"] = piece.ids
        return self._chunk_envelope(self._CHUNK, [choice])

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope(self._CHUNK, ()) | {"usage": usage.body()}


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
