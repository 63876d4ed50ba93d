"""The OpenAI API's bodies: the few fields a router reads, and the edits it makes. Bytes to values, no sockets.

A body is decoded once and forwarded as received; only an engine's rank field is ever put into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from router.errors import BadRequest, RequestError, openai_error_body
from router.wire import sse


class Endpoint(StrEnum):
    """A path of the API that carries a prompt. The value is a metric label."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """What the router reads of a request. ``body`` is what the client sent, byte for byte.

    ``fields`` is the decoded top-level object (messages, prompt, tools, session fields, ...).
    """

    endpoint: Endpoint
    model: str
    stream: bool
    max_tokens: int | None
    fields: Mapping[str, Any]
    body: bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts a worker reports. ``cached_tokens`` is None where the engine does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


# --- requests -----------------------------------------------------------------------------------


def parse_request(endpoint: Endpoint, body: bytes) -> InferenceRequest:
    """Decode and check what the router needs. Raises ``BadRequest``. Other fields are never judged."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")

    model = fields.get("model")
    if model is None or model == "":
        raise BadRequest("The field 'model' is required.", code="missing_required_parameter", param="model")
    if not isinstance(model, str):
        raise BadRequest("The field 'model' must be a string.", code="invalid_type", param="model")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("The field 'stream' must be true or false.", code="invalid_type", param="stream")
    if endpoint is Endpoint.CHAT:
        _check_messages(fields.get("messages"))
    else:
        _check_prompt(fields.get("prompt"))
    return InferenceRequest(
        endpoint=endpoint,
        model=model,
        stream=stream is True,
        max_tokens=_max_tokens(fields),
        fields=fields,
        body=body,
    )


def _check_messages(messages: object) -> None:
    if messages is None:
        raise BadRequest("The field 'messages' is required.", code="missing_required_parameter", param="messages")
    if not isinstance(messages, list) or not set(map(type, messages)) <= {dict}:
        raise BadRequest("The field 'messages' must be an array of objects.", code="invalid_type", param="messages")
    if not messages:
        raise BadRequest("The field 'messages' must not be empty.", code="empty_array", param="messages")


def _check_prompt(prompt: object) -> None:
    """A string, strings, token ids, or lists of token ids."""
    if prompt is None:
        raise BadRequest("The field 'prompt' is required.", code="missing_required_parameter", param="prompt")
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise BadRequest("The field 'prompt' must be a string or an array.", code="invalid_type", param="prompt")
    if not prompt:
        raise BadRequest("The field 'prompt' must not be empty.", code="empty_array", param="prompt")
    kind = type(prompt[0])
    if kind not in (str, int, list) or not all(type(item) is kind for item in prompt):
        raise BadRequest(
            "The field 'prompt' must hold strings, token ids or lists of token ids.",
            code="invalid_type",
            param="prompt",
        )


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    """The newer name wins, as engines have it. Ill-typed values are for the engine to refuse."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if type(value) is int:
            return value
    return None


# --- the one edit -------------------------------------------------------------------------------

#: A string, a bracket, a comma or a colon; numbers and words between them need no name.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]', re.DOTALL)


def with_field(request: InferenceRequest, name: str, value: int) -> bytes:
    """``request.body`` with the top-level field ``name`` set to ``value``; every other byte is kept.

    A field given twice is replaced twice, since parsers differ on which of the two counts.
    """
    body, encoded = request.body, b"%d" % value
    if name not in request.fields:
        start = body.index(b"{") + 1
        comma = b"," if request.fields else b""
        return b"".join((body[:start], b'"', name.encode(), b'":', encoded, comma, body[start:]))
    pieces: list[bytes] = []
    kept_to = 0
    for key, start, end in _top_level_values(body):
        if msgspec.json.decode(key) == name:
            pieces += (body[kept_to:start], encoded)
            kept_to = end
    return b"".join((*pieces, body[kept_to:]))


def _top_level_values(body: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Key (with its quotes), start and end of each value of the object ``body``, which is known to be valid."""
    depth = 0
    key = last_string = b""
    start = 0
    for match in _TOKEN.finditer(body):
        token = match.group()
        if token in (b"{", b"["):
            depth += 1
        elif depth == 1 and token == b":":
            key, start = last_string, match.end()
        elif depth == 1 and token in (b",", b"}"):
            if key:
                value = body[start : match.start()]
                leading = len(value) - len(value.lstrip())
                yield key, start + leading, start + len(value.rstrip())
            key = b""
            depth -= token == b"}"
        elif token in (b"}", b"]"):
            depth -= 1
        elif depth == 1:
            last_string = token


# --- answers ------------------------------------------------------------------------------------


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_DECODE_USAGE: Final = msgspec.json.Decoder(_WithUsage).decode


def parse_usage(document: bytes) -> Usage | None:
    """The ``usage`` of an answer or of one streamed chunk; None where it is absent, null or malformed."""
    try:
        usage = _DECODE_USAGE(document).usage
    except (msgspec.DecodeError, RecursionError):
        return None
    if usage is None:
        return None
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens or 0,
        cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None,
    )


class StreamTap:
    """Reads the usage of a streamed answer in passing, and cuts the stream at event boundaries."""

    __slots__ = ("_cutter", "events", "usage")

    def __init__(self) -> None:
        self._cutter = sse.EventCutter()
        self.usage: Usage | None = None
        self.events = 0

    @property
    def midway(self) -> bool:
        """What has been passed on ends inside an event."""
        return self._cutter.midway

    def feed(self, data: bytes) -> bytes:
        """What may be passed on now. Only events that name a usage are looked into."""
        whole = self._cutter.feed(data)
        self.events += whole.count(b"\n\n")
        if b'"usage"' in whole:
            self._read(whole)
        return whole

    def flush(self) -> bytes:
        """What is left when the answer has ended."""
        rest = self._cutter.flush()
        if b'"usage"' in rest:
            self._read(rest)
        return rest

    def _read(self, whole: bytes) -> None:
        for event in sse.events(whole):
            if b'"usage"' in event:
                self.usage = parse_usage(sse.event_data(event)) or self.usage


class BodyTap:
    """Reads the usage of an answer that is one JSON document. Passes every byte on at once."""

    #: Longer answers are passed on without being read: their pieces would have to be held until the end.
    MAX_BYTES: Final = 512 * 1024

    __slots__ = ("_bytes", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0

    #: Such an answer has no events.
    events: Final = 0

    def feed(self, data: bytes) -> bytes:
        self._bytes += len(data)
        if self._bytes <= self.MAX_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()
        return data

    def flush(self) -> bytes:
        return b""

    @property
    def usage(self) -> Usage | None:
        """Of what has been fed; None until the document is whole."""
        return parse_usage(b"".join(self._pieces))


def error_event(error: RequestError) -> bytes:
    """An error as the last event of a stream that has begun. No ``[DONE]`` follows it."""
    body = openai_error_body(error.message, type_=error.type, code=error.code, param=error.param)
    return b"data: " + body + b"\n\n"
