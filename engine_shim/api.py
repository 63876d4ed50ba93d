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
_V = TypeVar("_V")
Message = dict[str, object]
#: vLLM's bound: dividing logits by less than this leaves only the likeliest token anyway.
_GREEDY_BELOW = 1e-5
#: vLLM's bound on likeliest tokens told, OpenAI's on choices and on biases.
_MAX_LOGPROBS = 20
_MAX_CHOICES = 128
_MAX_BIAS = 100.0
#: More than any token id has.
_MAX_ID_DIGITS = 18
_Neutral = Mapping[str, tuple[object, ...]]
#: What the engine cannot do, and the values that do not ask for it; absent and null are fine everywhere.
_NEVER: _Neutral = {
    "best_of": (1,),
    "echo": (False,),
    "prompt_logprobs": (False, 0),
    "suffix": ("",),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "stop_regex": ("", []),
    "json_schema": (),
    "structural_tag": (),
    "custom_logit_processor": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}
#: What needs logits, which a timing model has not.
_WITH_LOGITS: _Neutral = {
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
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


class HandoverFields(msgspec.Struct, kw_only=True, frozen=True):
    """What tells a rank that another one has a part in the request: SGLang's fields and vLLM's."""

    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    disagg_prefill_dp_rank: int | None = None
    kv_transfer_params: dict[str, object] | None = None

    def rooms(self, prompts: int) -> list[int]:
        """A room for each prompt; one number counts up. Raises ``ApiError``."""
        room = self.bootstrap_room
        found = list(range(room, room + prompts)) if isinstance(room, int) else list(room or ())
        return self._one_each(found, prompts, param="bootstrap_room")

    def hosts(self, prompts: int) -> list[str]:
        """The prefill host of each prompt. Raises ``ApiError``."""
        host = self.bootstrap_host
        found = [host] * prompts if isinstance(host, str) else list(host or ())
        return self._one_each(found, prompts, param="bootstrap_host")

    def ports(self, prompts: int) -> list[int]:
        """The bootstrap port of each prompt. Raises ``ApiError``."""
        port = self.bootstrap_port
        found = [each for each in ([port] * prompts if isinstance(port, int) else port or ()) if each is not None]
        return self._one_each(found, prompts, param="bootstrap_port")

    @staticmethod
    def _one_each(found: list[_V], prompts: int, *, param: str) -> list[_V]:
        if len(found) != prompts:
            raise ApiError(f"{param} must be one, or one for each of the {prompts} prompts", param=param)
        return found


class _Generation(HandoverFields, kw_only=True, frozen=True):
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
    bad_words: object = None
    allowed_token_ids: object = None
    truncate_prompt_tokens: object = None
    include_stop_str_in_output: object = None
    skip_special_tokens: object = None
    spaces_between_special_tokens: object = None
    use_beam_search: object = None
    length_penalty: object = None
    logits_processors: object = None
    stop_regex: object = None
    json_schema: object = None
    structural_tag: object = None
    custom_logit_processor: object = None
    logprobs: bool | int | None = None
    prompt_logprobs: object = None
    response_format: object = None
    structured_outputs: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    regex: object = None
    ebnf: object = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    routed_dp_rank: int | None = None
    priority: int | None = None
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

    @property
    def choices(self) -> int:
        """How many answers to each prompt. Raises ``ApiError``."""
        return int(_within("n", self.n, 1, low=1, high=_MAX_CHOICES))

    @property
    def told_logprobs(self) -> int | None:
        """Logprobs of how many likeliest tokens are told beside each token's own; None: none at all."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return int(_within("logprobs", self.logprobs, 0, high=_MAX_LOGPROBS))

    def require_supported(self, *, has_logits: bool) -> None:
        """Raise ``ApiError`` for the first field that asks for what this engine, with its runner, cannot do."""
        for name, neutral in (_NEVER if has_logits else {**_NEVER, **_WITH_LOGITS}).items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                told = " or ".join(
                    ["leave it out", *(f"send {msgspec.json.encode(each).decode()}" for each in neutral)]
                )
                raise ApiError(f"{name} is not supported by this engine: {told}", param=name)

    def sampling(self, *, max_tokens: int, vocab_tokens: int, choice: int = 0) -> Sampling:
        """How to choose the tokens of the n-th answer; unnamed fields have OpenAI's defaults. Raises ``ApiError``."""
        temperature = _within("temperature", self.temperature, 1.0, high=100)
        top_p = _within("top_p", self.top_p, 1.0, high=1)
        repetition_penalty = _within("repetition_penalty", self.repetition_penalty, 1.0, high=100)
        for name, value in (("top_p", top_p), ("repetition_penalty", repetition_penalty)):
            if value == 0:
                raise ApiError(f"{name} must be above 0", param=name)
        return Sampling(
            max_tokens=max_tokens,
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_p=top_p,
            top_k=max(0, int(_within("top_k", self.top_k, 0, low=-1, high=1 << 31))),
            min_p=_within("min_p", self.min_p, 0.0, high=1),
            presence_penalty=_within("presence_penalty", self.presence_penalty, 0.0, low=-2, high=2),
            frequency_penalty=_within("frequency_penalty", self.frequency_penalty, 0.0, low=-2, high=2),
            repetition_penalty=repetition_penalty,
            logit_bias=_biases(self.logit_bias or {}, vocab_tokens=vocab_tokens),
            min_tokens=min(max_tokens, int(_within("min_tokens", self.min_tokens, 0, high=1 << 31))),
            logprobs=self.told_logprobs,
            seed=None if self.seed is None else self.seed + choice,
            stop_token_ids=self._stop_ids(vocab_tokens),
            ignore_eos=bool(self.ignore_eos),
        )

    def _stop_ids(self, vocab_tokens: int) -> frozenset[int]:
        ids = frozenset(self.stop_token_ids or ())
        if ids and not (min(ids) >= 0 and max(ids) < vocab_tokens):
            raise ApiError(f"token ids must be in [0, {vocab_tokens})", param="stop_token_ids")
        return ids


class ChatRequest(_Generation, kw_only=True, frozen=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[Message] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, object] | None = None
    functions: object = None
    function_call: object = None
    continue_final_message: object = None
    documents: object = None
    chat_template: object = None
    mm_processor_kwargs: object = None

    @property
    def told_logprobs(self) -> int | None:
        """Here a flag, and a number beside it."""
        likeliest = int(_within("top_logprobs", self.top_logprobs, 0, high=_MAX_LOGPROBS))
        if likeliest and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return likeliest if self.logprobs else None


class CompletionRequest(_Generation, kw_only=True, frozen=True):
    """``POST /v1/completions``; the prompt is read by ``prompts``."""

    prompt: object = None
    add_special_tokens: bool = True
    echo: bool | None = None
    suffix: object = None
    prompt_embeds: object = None


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
    except RecursionError as error:
        raise ApiError("The body is nested too deeply.", code="invalid_json") from error


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


def _within(name: str, value: float | None, default: float, *, low: float = 0, high: float) -> float:
    """A number in [low, high], or the default. Raises ``ApiError``."""
    number = default if value is None else value
    if not low <= number <= high:
        raise ApiError(f"{name} must be in [{low}, {high}], got {number}", param=name)
    return number


def _biases(raw: Mapping[str, float], *, vocab_tokens: int) -> tuple[tuple[int, float], ...]:
    """Token ids, which JSON makes texts, with their biases. Raises ``ApiError``."""
    biases = []
    for key, bias in raw.items():
        if not (key.isdecimal() and len(key) <= _MAX_ID_DIGITS and int(key) < vocab_tokens):
            key = key if len(key) <= _MAX_ID_DIGITS else key[:_MAX_ID_DIGITS] + "..."
            raise ApiError(f"logit_bias: {key!r} is no token id in [0, {vocab_tokens})", param="logit_bias")
        biases.append((int(key), max(-_MAX_BIAS, min(_MAX_BIAS, bias))))
    return tuple(biases)


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


def wanted_priority(headers: Mapping[str, str], body_priority: int | None) -> int:
    """The priority of a request, lower is earlier; as in vLLM header before body, and no header that is not a number.

    Raises ``ApiError`` for a number of more than 64 bits.
    """
    header = headers.get("x-vllm-priority", "").strip()
    wanted = int(header) if re.fullmatch(r"[+-]?\d{1,19}", header) else body_priority
    return int(_within("priority", wanted, 0, low=-(1 << 63), high=(1 << 63) - 1))
