"""Request bodies of all endpoints: the few fields a router reads, and the edits it makes. Bytes to values, no sockets.

A body is decoded once and forwarded as received; only an engine's rank field is ever put into it, the name of a
model that the client called by an alias, and what two ranks need to share a request (``wire/handover``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from router.errors import BadRequest, Dialect, PayloadTooLarge, RequestError, openai_error_body, wait_field
from router.wire import anthropic, responses
from router.wire.frozen import Frozen
from router.wire.usage import MAX_TOKENS


class Endpoint(StrEnum):
    """A path of the API that a worker answers. The value is a metric label."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    TOKENIZE = "tokenize"

    @property
    def dialect(self) -> Dialect:
        """Whose errors its clients understand."""
        return Dialect.ANTHROPIC if self in _ANTHROPIC else Dialect.OPENAI


#: Decoding takes the loop's time by the value, not by the byte; a prompt with so many commas, colons and brackets fills
#: any model's context. They are counted where a body is long enough to matter.
_MAX_VALUES: Final = 2_000_000
_MANY_BYTES: Final = 1 << 20

_ANTHROPIC: Final = frozenset({Endpoint.MESSAGES, Endpoint.COUNT_TOKENS})


class InferenceRequest(Frozen, frozen=True):
    """What the router reads of a request. ``body`` is what the client sent, byte for byte.

    ``fields`` is the decoded top-level object (messages, prompt, tools, session fields, ...).
    ``chat`` is its conversation as a chat request's fields, whatever the endpoint; ``prompt`` its plain prompt. At most
    one is not None; neither where nothing is left in a cache (tokenizing, ranking) or a worker keeps the conversation.
    """

    endpoint: Endpoint
    model: str
    stream: bool
    max_tokens: int | None
    fields: dict[str, Any]
    body: bytes
    chat: Mapping[str, Any] | None = None
    prompt: Any = None

    @property
    def wants_ids(self) -> bool:
        """Its answer is asked to have the ids of its tokens."""
        return self.fields.get("return_token_ids") is True


# --- requests -----------------------------------------------------------------------------------


def parse_request(endpoint: Endpoint, body: bytes) -> InferenceRequest:
    """Decode and check what the router needs. Other fields are never judged.

    Raises ``BadRequest``, and ``PayloadTooLarge`` for more values than a prompt can have use for.
    """
    if len(body) > _MANY_BYTES and sum(map(body.count, b"[{,:")) > _MAX_VALUES:
        raise PayloadTooLarge(f"The body has more than {_MAX_VALUES} values.", code="too_many_values")
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")

    model = fields.get("model")
    if model is None or model == "":
        raise _missing("model")
    if not isinstance(model, str):
        raise BadRequest("The field 'model' must be a string.", code="invalid_type", param="model")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("The field 'stream' must be true or false.", code="invalid_type", param="stream")
    chat, prompt = _checked_prompt(endpoint, fields)
    return InferenceRequest(
        endpoint=endpoint,
        model=model,
        stream=stream is True,
        max_tokens=_max_tokens(fields),
        fields=fields,
        body=body,
        chat=chat,
        prompt=prompt,
    )


def _checked_prompt(endpoint: Endpoint, fields: dict[str, Any]) -> tuple[Mapping[str, Any] | None, object]:
    """``chat`` and ``prompt`` of a request. Raises ``BadRequest`` where its prompt is missing or ill-typed."""
    match endpoint:
        case Endpoint.CHAT:
            _check_messages(fields.get("messages"))
            return fields, None
        case Endpoint.COMPLETIONS:
            _check_prompt(fields.get("prompt"), name="prompt")
            return None, fields["prompt"]
        case Endpoint.RESPONSES:
            _check_input(fields.get("input"))
            return responses.chat_fields(fields), None
        case Endpoint.MESSAGES:
            _check_messages(fields.get("messages"))
            return anthropic.chat_fields(fields), None
        case Endpoint.COUNT_TOKENS:
            _check_messages(fields.get("messages"))
        case Endpoint.EMBEDDINGS if "messages" in fields:  # vLLM embeds conversations, too
            _check_messages(fields["messages"])
            return fields, None
        case Endpoint.EMBEDDINGS:
            _check_prompt(fields.get("input"), name="input")
            return None, fields["input"]
        case Endpoint.RERANK:
            for name in ("query", "documents"):
                if fields.get(name) is None:
                    raise _missing(name)
        case Endpoint.TOKENIZE if fields.get("prompt") is None and fields.get("messages") is None:
            raise _missing("prompt")
    return None, None


def _missing(name: str) -> BadRequest:
    return BadRequest(f"The field '{name}' is required.", code="missing_required_parameter", param=name)


def _check_input(given: object) -> None:
    """What the Responses API takes: a text, or items."""
    if given is None:
        raise _missing("input")
    if not isinstance(given, str) and (not isinstance(given, list) or not set(map(type, given)) <= {dict}):
        raise BadRequest(
            "The field 'input' must be a string or an array of objects.", code="invalid_type", param="input"
        )


def _check_messages(messages: object) -> None:
    if messages is None:
        raise _missing("messages")
    if not isinstance(messages, list) or not set(map(type, messages)) <= {dict}:
        raise BadRequest("The field 'messages' must be an array of objects.", code="invalid_type", param="messages")
    if not messages:
        raise BadRequest("The field 'messages' must not be empty.", code="empty_array", param="messages")


def _check_prompt(prompt: object, *, name: str) -> None:
    """A string, strings, token ids, or lists of token ids."""
    if prompt is None:
        raise _missing(name)
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise BadRequest(f"The field '{name}' must be a string or an array.", code="invalid_type", param=name)
    if not prompt:
        raise BadRequest(f"The field '{name}' must not be empty.", code="empty_array", param=name)
    kind = type(prompt[0])
    if kind not in (str, int, list) or not all(type(item) is kind for item in prompt):
        raise BadRequest(
            f"The field '{name}' must hold strings, token ids or lists of token ids.", code="invalid_type", param=name
        )


#: Ways to say how long an answer may be.
_LIMITS: Final = frozenset({"max_completion_tokens", "max_tokens", "max_output_tokens"})


def _max_tokens(fields: dict[str, Any]) -> int | None:
    """The newer name wins, as engines have it; 1 at least, and no more than any context has.

    What is ill-typed or out of range is for the engine to refuse: the client's bytes go on as they are.
    """
    if _LIMITS.isdisjoint(fields):
        return None
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = fields.get(name)
        if type(value) is int:
            return max(1, min(value, MAX_TOKENS))
    return None


# --- edits --------------------------------------------------------------------------------------

# Possessive: the body is valid, and to remember ways back costs a hundred bytes for each of its own.
_STRING: Final = rb'"(?:[^"\\]++|\\.)*+"'
_KEY: Final = re.compile(rb"[\s,]*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_SCALAR: Final = re.compile(_STRING + rb"|[^\s,}]++", re.DOTALL)
#: All up to the next bracket that is not in a string.
_TO_BRACKET: Final = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+[\[\]{}]", re.DOTALL)


def with_model(request: InferenceRequest, model: str) -> InferenceRequest:
    """The same request to another model."""
    return msgspec.structs.replace(request, model=model, body=with_field(request, "model", model))


def with_field(request: InferenceRequest, name: str, value: int | str) -> bytes:
    """``request.body`` with the top-level field ``name`` set to ``value``; see ``with_fields``."""
    return with_fields(request, {name: value})


def with_fields(request: InferenceRequest, values: Mapping[str, object]) -> bytes:
    """``request.body`` with these top-level fields set; every other byte is kept. ``Raw`` values go in as they are.

    A field given twice is replaced twice, since parsers differ on which of the two counts.
    """
    body, fields = request.body, request.fields
    encoded = {name: msgspec.json.encode(value) for name, value in values.items()}
    start = body.index(b"{") + 1
    added = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in encoded.items() if name not in fields)
    pieces = [body[:start], added, b"," if added and fields else b""]
    if not encoded.keys().isdisjoint(fields):
        for key, value_start, value_end in _top_level_values(body):
            value = encoded.get(msgspec.json.decode(key))
            if value is not None:
                pieces += (body[start:value_start], value)
                start = value_end
    return b"".join((*pieces, body[start:]))


def _top_level_values(body: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Key (with its quotes), start and end of each value of the object ``body``, which is known to be valid."""
    values: dict[str, msgspec.Raw] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    end = body.index(b"{") + 1
    while (key := _KEY.match(body, end)) is not None:
        start = key.end()
        if body[start] in b"[{":
            end = _nested_end(body, start, values[msgspec.json.decode(key[1])])
        else:
            end = _end(_SCALAR.match(body, start))
        yield key[1], start, end


def _nested_end(body: bytes, start: int, last: msgspec.Raw) -> int:
    """Where the array or object ends that begins at ``start``: after the ``last`` value of its key, if that is it."""
    value = memoryview(last)
    if memoryview(body)[start : start + value.nbytes] == value:
        return start + value.nbytes
    depth, end = 1, start + 1
    while depth:
        end = _end(_TO_BRACKET.match(body, end))
        depth += 1 if body[end - 1] in b"[{" else -1
    return end


def _end(match: re.Match[bytes] | None) -> int:
    assert match is not None, "valid JSON"
    return match.end()


# --- answers ------------------------------------------------------------------------------------


def error_event(error: RequestError, endpoint: Endpoint = Endpoint.CHAT, *, number: int = 0) -> bytes:
    """An error as the last event of a stream that has begun, after ``number`` others. No ``[DONE]`` follows it."""
    if endpoint.dialect is Dialect.ANTHROPIC:
        return anthropic.error_event(error)
    if endpoint is Endpoint.RESPONSES:
        return responses.error_event(error, number=number)
    return b"data: " + openai_error_body(error, **wait_field(error)) + b"\n\n"
