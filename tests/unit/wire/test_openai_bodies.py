"""Bodies of the OpenAI API: what is checked, the one edit, and errors as events."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError, TooManyRequests, UpstreamFailed
from router.wire.openai import (
    Endpoint,
    InferenceRequest,
    error_event,
    parse_request,
    with_field,
)
from router.wire.usage import MAX_TOKENS

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_request_is_read_and_kept() -> None:
    """The fields a router needs are decoded; the body is kept as it came, unknown fields and all."""
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 7, "foo": {"temperature": 99}}, indent=3).encode()
    request = parse_request(Endpoint.CHAT, body)
    assert (request.model, request.stream, request.max_tokens, request.body) == ("m", True, 7, body)
    assert request.fields["foo"] == {"temperature": 99}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_tokens": "many"}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": -(10**9)}, 1),
        ({"max_tokens": 10**12}, MAX_TOKENS),
        ({"max_completion_tokens": 10**400, "max_tokens": 5}, MAX_TOKENS),
    ],
)
def test_max_tokens(fields: dict[str, object], expected: int | None) -> None:
    """The newer name wins; other types are the engine's to judge, and absurd values count as the nearest possible."""
    assert parse_request(Endpoint.CHAT, json.dumps({**CHAT, **fields}).encode()).max_tokens == expected


@pytest.mark.parametrize("prompt", ["hi", "", ["a", "b"], [1, 2, 3], [[1], [2, 3]]])
def test_prompts(prompt: object) -> None:
    """Text, texts, token ids and lists of token ids are prompts."""
    assert parse_request(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode()).model == "m"


@pytest.mark.parametrize(
    ("endpoint", "body", "code", "param"),
    [
        (Endpoint.CHAT, b"", "invalid_json", None),
        (Endpoint.CHAT, b"{", "invalid_json", None),
        (Endpoint.CHAT, b"[" * 100_000, "invalid_json", None),
        (Endpoint.CHAT, b'{"model": "\xff"}', "invalid_json", None),
        (Endpoint.CHAT, b"[1]", "invalid_json", None),
        (Endpoint.CHAT, b'{"model": "m", "messages": [' + b"[]," * 1_000_001 + b"1]}", "too_many_values", None),
        (Endpoint.CHAT, b"{" + b'"a":1,' * 1_000_001 + b'"model": "m"}', "too_many_values", None),
        (Endpoint.CHAT, {"messages": [{}]}, "missing_required_parameter", "model"),
        (Endpoint.CHAT, {"model": "", "messages": [{}]}, "missing_required_parameter", "model"),
        (Endpoint.CHAT, {"model": 3, "messages": [{}]}, "invalid_type", "model"),
        (Endpoint.CHAT, {"model": "m"}, "missing_required_parameter", "messages"),
        (Endpoint.CHAT, {"model": "m", "messages": []}, "empty_array", "messages"),
        (Endpoint.CHAT, {"model": "m", "messages": "hi"}, "invalid_type", "messages"),
        (Endpoint.CHAT, {"model": "m", "messages": ["hi"]}, "invalid_type", "messages"),
        (Endpoint.CHAT, {**CHAT, "stream": "yes"}, "invalid_type", "stream"),
        (Endpoint.COMPLETIONS, {"model": "m"}, "missing_required_parameter", "prompt"),
        (Endpoint.COMPLETIONS, {"model": "m", "prompt": []}, "empty_array", "prompt"),
        (Endpoint.COMPLETIONS, {"model": "m", "prompt": 3}, "invalid_type", "prompt"),
        (Endpoint.COMPLETIONS, {"model": "m", "prompt": [1, "a"]}, "invalid_type", "prompt"),
        (Endpoint.COMPLETIONS, {"model": "m", "prompt": [True]}, "invalid_type", "prompt"),
    ],
)
def test_bad_requests(endpoint: Endpoint, body: object, code: str, param: str | None) -> None:
    """What the router cannot use is refused with a stable code and the name of the field."""
    with pytest.raises(RequestError) as caught:
        parse_request(endpoint, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (caught.value.code, caught.value.param) == (code, param)


# --- the one edit ---------------------------------------------------------------------------------

NAME = "routed_dp_rank"
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(max_size=12)
    | st.sampled_from([NAME, '\\"', "{["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.just(NAME), inner, max_size=3),
    max_leaves=8,
)
SPACE = st.sampled_from(["", " ", "\n\t ", "\r\n"])


def spelt(draw: st.DrawFn, key: str) -> str:
    """A key as a JSON string, sometimes with every character escaped."""
    if draw(st.booleans()):
        return json.dumps(key)
    units = key.encode("utf-16-be")
    return '"' + "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)) + '"'


@st.composite
def members(draw: st.DrawFn) -> list[tuple[str, str, str, str]]:
    """Members of an object, repetitions included: what stands before the value, key, value, what stands after."""
    made = []
    for _ in range(draw(st.integers(0, 5))):
        key = draw(st.text(max_size=6) | st.just(NAME) | st.sampled_from(["model", "messages"]))
        before = draw(SPACE) + spelt(draw, key) + draw(SPACE) + ":" + draw(SPACE)
        made.append((before, key, json.dumps(draw(VALUES), ensure_ascii=draw(st.booleans())), draw(SPACE)))
    return made


@given(members(), SPACE, st.integers(0, 1000))
def test_one_field_is_set_and_every_other_byte_kept(
    made: list[tuple[str, str, str, str]], space: str, value: int
) -> None:
    """The decoded object differs in that field alone; the bytes are the body's with only its value changed."""

    def document(*, change: bool) -> str:
        texts = [before + (str(value) if change and key == NAME else text) + after for before, key, text, after in made]
        inner = ",".join(texts) or space
        if change and all(key != NAME for _, key, _, _ in made):
            inner = f'"{NAME}":{value}' + ("," if made else "") + inner
        return space + "{" + inner + "}" + space

    body = document(change=False).encode()
    fields = json.loads(body)
    request = InferenceRequest(Endpoint.CHAT, "m", stream=False, max_tokens=None, fields=fields, body=body)
    edited = with_field(request, NAME, value)
    assert json.loads(edited) == {**fields, NAME: value}
    assert edited == document(change=True).encode()


@pytest.mark.parametrize("letter", ["x", "\\n", '",1,"'])
def test_an_edit_costs_no_more_than_the_edited_body(letter: str) -> None:
    """Whatever the body is made of: matching that remembers ways back takes a hundred times its size."""
    prompt = letter * 500_000
    body = f'{{"prompt": ["{prompt}"], "{NAME}": 1, "model": "m"}}'.encode()
    fields = {"prompt": None, NAME: None, "model": None}
    request = InferenceRequest(Endpoint.COMPLETIONS, "m", stream=False, max_tokens=None, fields=fields, body=body)
    tracemalloc.start()
    try:
        edited = with_field(request, NAME, 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert edited == body.replace(f'"{NAME}": 1'.encode(), f'"{NAME}": 2'.encode())
    assert peak < 3 * len(body)


# --- errors ----------------------------------------------------------------------------------------


def test_error_as_an_event() -> None:
    """An error within a stream is one event with the error object of the API."""
    event = error_event(UpstreamFailed("gone"))
    assert event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: ")) == {
        "error": {"message": "gone", "type": "server_error", "param": None, "code": "upstream_failed"}
    }
    assert json.loads(error_event(TooManyRequests("full")).removeprefix(b"data: "))["error"]["retry_after_seconds"] == 1
