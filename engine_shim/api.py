"""What clients may ask: the bodies of the OpenAI API as far as an engine reads them. Bytes to values, no I/O.

Fields that are not named here are ignored. A field that would change the answer and that the shim cannot honour
is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from engine_shim.types import Sampling

_S = TypeVar("_S", bound=msgspec.Struct)
Message = dict[str, object]
#: vLLM's bound: dividing logits by less than this leaves only the likeliest token anyway.
_GREEDY_BELOW = 1e-5
#: What the engine cannot do, and the values that do not ask for it; absent and null are fine everywhere.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "prompt_logprobs": (False, 0),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "logit_bias": ({},),
}


class ApiError(Exception):
    """An error that the client is told, in the OpenAI shape.

    Statuses: 400 for what the client can mend, 404 for a path or model that is not here, 413 for a body over the
    limit, 503 when the rank takes no work.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, object]:
        """The error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(msgspec.Struct, frozen=True):
    """``stream_options`` of a request."""

    include_usage: bool | None = None


class _Generation(msgspec.Struct, kw_only=True, frozen=True):
    """What chat and text completions have in common. ``None`` stands for an absent field and for null."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: object = None
    logprobs: object = None
    top_logprobs: object = None
    prompt_logprobs: object = None
    response_format: object = None
    presence_penalty: object = None
    frequency_penalty: object = None
    repetition_penalty: object = None
    top_k: object = None
    min_p: object = None
    logit_bias: object = None
    cache_salt: str | None = None
    routed_dp_rank: int | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises ``ApiError`` on an empty one."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(stops):
            raise ApiError("stop strings may not be empty", param="stop")
        return stops

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def require_supported(self) -> None:
        """Raise ``ApiError`` for the first field that asks for what this engine cannot do."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                told = " or ".join(msgspec.json.encode(each).decode() for each in neutral)
                raise ApiError(f"{name} is not supported by this engine: leave it out or send {told}", param=name)

    def sampling(self, *, max_tokens: int) -> Sampling:
        """How to choose tokens; unnamed fields have OpenAI's defaults. Raises ``ApiError``."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else self.top_p
        if not 0 <= temperature <= 100:
            raise ApiError(f"temperature must be in [0, 100], got {temperature}", param="temperature")
        if not 0 < top_p <= 1:
            raise ApiError(f"top_p must be in (0, 1], got {top_p}", param="top_p")
        return Sampling(
            max_tokens=max_tokens,
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_p=top_p,
            seed=self.seed,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatRequest(_Generation, kw_only=True, frozen=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[Message] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, object] | None = None


class CompletionRequest(_Generation, kw_only=True, frozen=True):
    """``POST /v1/completions``; the prompt is read by ``prompts``."""

    prompt: object
    add_special_tokens: bool = True
    echo: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    tools: list[Message] | None = None
    chat_template_kwargs: dict[str, object] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


def decode(body: bytes, kind: type[_S]) -> _S:
    """Read a body. Raises ``ApiError`` that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        found = re.search(r"\$\.(\w+)|field `(\w+)`", message)
        param = (found[1] or found[2]) if found else None
        raise ApiError(message, param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"The body is not JSON: {error}", code="invalid_json") from error


def prompts(raw: object) -> list[str | list[int]]:
    """The prompts of a completion: text, texts, token ids or lists of token ids. Raises ``ApiError``."""
    if isinstance(raw, str):
        return [raw]
    if isinstance(raw, list) and raw:
        if _is_token_ids(raw):
            return [raw]
        if all(isinstance(item, str) or (isinstance(item, list) and _is_token_ids(item)) for item in raw):
            return raw
    raise ApiError("prompt must be a string, strings, token ids or lists of token ids", param="prompt")


def _is_token_ids(items: Sequence[object]) -> bool:
    return set(map(type, items)) == {int}


def wanted_rank(headers: Mapping[str, str], body_rank: int | None, *, ranks: int) -> int | None:
    """The data-parallel rank a request names, body before header; None if it names none.

    A header that is not a number is ignored, as vLLM does. Raises ``ApiError`` for a rank that is not here.
    """
    header = headers.get("x-data-parallel-rank", "").strip()
    rank, param = body_rank, "routed_dp_rank"
    if rank is None and re.fullmatch(r"[+-]?\d{1,9}", header):
        rank, param = int(header), "X-data-parallel-rank"
    if rank is not None and not 0 <= rank < ranks:
        raise ApiError(f"data_parallel_rank {rank} is out of range [0, {ranks}).", param=param)
    return rank
