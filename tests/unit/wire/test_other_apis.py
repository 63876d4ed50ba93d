"""Anthropic's and the Responses API: prompts as vLLM renders them, usage as vLLM reports it, errors as clients read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import NoWorker, RequestError, TooManyRequests, Unauthorized, to_answer
from router.wire import anthropic, responses
from router.wire.chat_template import ChatTemplate
from router.wire.openai import (
    Endpoint,
    error_event,
    parse_request,
    with_model,
)
from router.wire.taps import StreamTap
from router.wire.usage import Usage, parse_usage

RECORDED = json.loads((Path(__file__).parent / "vllm_renders.json").read_text(encoding="utf-8"))
ENDPOINTS = {"/v1/messages": Endpoint.MESSAGES, "/v1/responses": Endpoint.RESPONSES}


def _values(prompt: str) -> object:
    """A dumped prompt with each message as a value: in which order a message's own keys stand is no template's affair,
    but the order inside its tool calls is, since some print them whole.
    """
    *messages, tail = prompt.replace("R<|im_end|>", "<|im_end|>").split("<|im_end|>\n")
    decoded = [json.loads(message.removeprefix("<|im_start|>")) for message in messages]
    return decoded, [json.dumps(message.get("tool_calls")) for message in decoded], tail


@pytest.mark.parametrize("number", range(len(RECORDED["renders"])))
def test_prompts_are_what_vllm_renders(number: int) -> None:
    """Under a template that prints all it is given, the translated conversation gives vLLM's own prompt."""
    case = RECORDED["renders"][number]
    request = parse_request(ENDPOINTS[case["path"]], json.dumps(case["body"]).encode())
    assert request.chat is not None
    template = ChatTemplate(RECORDED["chat_template"], variables={})
    extra = request.chat["chat_template_kwargs"]
    rendered = template.render(request.chat["messages"], tools=request.chat["tools"], extra=extra)
    assert _values(rendered) == _values(case["prompt"])


def test_system_messages_can_be_brought_to_the_head() -> None:
    """vLLM's rule for templates that want one system message first: all of them joined, in order."""
    fields = {
        "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "x-anthropic-billing-header: z"}],
        "messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": "b"}],
    }
    messages = anthropic.system_first(anthropic.chat_fields(fields)["messages"])
    assert messages == [{"role": "system", "content": "ab"}, {"role": "user", "content": "hi"}]


def test_cache_marks_change_nothing() -> None:
    """Moving a ``cache_control`` mark, as clients do at every turn, leaves the prompt the same."""

    def body(marked: int) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": str(number)} for number in range(3)]
        blocks[marked]["cache_control"] = {"type": "ephemeral"}
        return {"system": blocks, "messages": [{"role": "user", "content": blocks}]}

    assert anthropic.chat_fields(body(0)) == anthropic.chat_fields(body(2))


def test_a_conversation_that_a_worker_keeps_has_no_known_prompt() -> None:
    """What ``previous_response_id`` stands for is not in the body, so nothing is keyed."""
    body = {"model": "m", "input": "and?", "previous_response_id": "resp_1"}
    request = parse_request(Endpoint.RESPONSES, json.dumps(body).encode())
    assert request.chat is None
    assert request.prompt is None


_KEYS = st.sampled_from(
    [
        "type",
        "role",
        "content",
        "text",
        "thinking",
        "input",
        "id",
        "name",
        "source",
        "tool_use_id",
        "arguments",
        "call_id",
        "output",
        "summary",
        "namespace",
        "description",
        "input_schema",
        "parameters",
        "strict",
        "system",
        "messages",
        "instructions",
        "tools",
        "reasoning",
        "effort",
        "url",
        "data",
    ]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=6),
    max_leaves=25,
)
_TYPES = st.sampled_from(
    [
        "text",
        "image",
        "thinking",
        "tool_use",
        "tool_result",
        "function_call",
        "custom_tool_call",
        "reasoning",
        "function_call_output",
        "message",
        "function",
        "input_text",
    ]
)
_ITEMS = st.builds(
    lambda item, type_, role: {**item, "type": type_, "role": role},
    st.dictionaries(_KEYS, _JSON, max_size=6),
    _TYPES,
    st.sampled_from(["user", "assistant", "system", 1]),
)


@given(st.lists(_ITEMS | _JSON, max_size=5), st.dictionaries(_KEYS, _JSON, max_size=5))
def test_junk_is_translated_without_an_error_and_always_alike(items: list[object], fields: dict[str, object]) -> None:
    """Whatever JSON a client sends, both translations return messages with roles, and the same ones again."""
    before = json.dumps([items, fields])
    for translate, name in ((anthropic.chat_fields, "messages"), (responses.chat_fields, "input")):
        body = {**fields, name: items}
        chat = translate(body)
        assert chat is not None
        assert all(isinstance(message["role"], str) for message in chat["messages"])
        assert chat == translate(body)
    assert json.dumps([items, fields]) == before, "the body was changed"


# --- what is read of bodies ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (Endpoint.MESSAGES, {}, "messages"),
        (Endpoint.MESSAGES, {"messages": []}, "messages"),
        (Endpoint.COUNT_TOKENS, {"messages": "x"}, "messages"),
        (Endpoint.RESPONSES, {}, "input"),
        (Endpoint.RESPONSES, {"input": ["x"]}, "input"),
        (Endpoint.RESPONSES, {"input": 1}, "input"),
        (Endpoint.EMBEDDINGS, {}, "input"),
        (Endpoint.EMBEDDINGS, {"input": []}, "input"),
        (Endpoint.EMBEDDINGS, {"messages": "x"}, "messages"),
        (Endpoint.RERANK, {"query": "q"}, "documents"),
        (Endpoint.RERANK, {"documents": ["d"]}, "query"),
        (Endpoint.TOKENIZE, {}, "prompt"),
    ],
)
def test_what_is_missing_or_ill_typed_is_named(endpoint: Endpoint, body: dict[str, object], param: str) -> None:
    """400 names the field."""
    with pytest.raises(RequestError) as raised:
        parse_request(endpoint, json.dumps({"model": "m", **body}).encode())
    assert raised.value.status == 400
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("endpoint", "body", "prompt"),
    [
        (Endpoint.EMBEDDINGS, {"input": "a b"}, "a b"),
        (Endpoint.EMBEDDINGS, {"input": [1, 2]}, [1, 2]),
        (Endpoint.COMPLETIONS, {"prompt": ["a"]}, ["a"]),
        (Endpoint.RERANK, {"query": "q", "documents": ["d"]}, None),
        (Endpoint.TOKENIZE, {"prompt": "a"}, None),
        (Endpoint.COUNT_TOKENS, {"messages": [{"role": "user", "content": "a"}]}, None),
    ],
)
def test_plain_prompts_are_found(endpoint: Endpoint, body: dict[str, object], prompt: object) -> None:
    """Where there is one that a cache will hold."""
    request = parse_request(endpoint, json.dumps({"model": "m", **body}).encode())
    assert request.prompt == prompt
    assert request.chat is None


def test_a_model_can_be_renamed() -> None:
    """Only the name's bytes change."""
    body = b'{"messages": [{"role": "user", "content": "model"}], "model" : "alias", "x": 1.50}'
    renamed = with_model(parse_request(Endpoint.CHAT, body), 're"al')
    assert renamed.body == body.replace(b'"alias"', b'"re\\"al"')
    assert renamed.model == 're"al'


# --- usage, as vLLM 0.32 reported one warm request of 423 prompt tokens, 416 of them cached, 3 generated ------------

USAGE = Usage(prompt_tokens=423, completion_tokens=3, cached_tokens=416)
MESSAGES_USAGE = {
    "input_tokens": 7,
    "output_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 416,
}
RESPONSES_USAGE = {
    "input_tokens": 423,
    "input_tokens_details": {"cached_tokens": 416, "cache_write_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 426,
}


@pytest.mark.parametrize(
    "document",
    [
        {"type": "message", "usage": MESSAGES_USAGE},
        {"object": "response", "usage": RESPONSES_USAGE},
        {"type": "response.completed", "response": {"usage": RESPONSES_USAGE}},
        {"type": "message_start", "message": {"usage": MESSAGES_USAGE}},
    ],
)
def test_usage_is_read_in_every_spelling(document: object) -> None:
    """Anthropic counts reused tokens apart, the others within."""
    assert parse_usage(json.dumps(document).encode()) == USAGE


def _event(value: dict[str, object]) -> bytes:
    return f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode()


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ({"input_tokens": 423, "output_tokens": 0}, MESSAGES_USAGE),  # vLLM
        ({**MESSAGES_USAGE, "output_tokens": 1}, {"output_tokens": 3}),  # Anthropic's own
    ],
)
def test_usage_of_an_anthropic_stream(first: dict[str, int], last: dict[str, int]) -> None:
    """The prompt is counted at the start or at the end, the output at the end."""
    tap = StreamTap()
    tap.feed(_event({"type": "message_start", "message": {"usage": first}}))
    tap.feed(_event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": '"usage"'}}))
    tap.feed(_event({"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": last}))
    tap.feed(_event({"type": "message_stop"}))
    assert tap.usage == USAGE


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "type_"),
    [
        (NoWorker("no"), "overloaded_error"),
        (TooManyRequests("no"), "rate_limit_error"),
        (RequestError("x"), "api_error"),
    ],
)
def test_anthropic_errors(error: RequestError, type_: str) -> None:
    """Anthropic's shape and names, with the router's own code beside them."""
    answer = to_answer(error, dialect=Endpoint.MESSAGES.dialect)
    expected: dict[str, Any] = {"type": "error", "error": {"type": type_, "message": error.message, "code": error.code}}
    assert json.loads(answer.body) == expected
    event = error_event(error, Endpoint.COUNT_TOKENS)
    head, _, data = event.partition(b"\n")
    assert head == b"event: error"
    if error.retry_after_seconds is not None:  # which no header can say
        expected["error"]["retry_after_seconds"] = error.retry_after_seconds
    assert json.loads(data.removeprefix(b"data: ")) == expected
    assert event.endswith(b"\n\n")


def test_responses_error_event() -> None:
    """An ``error`` event that continues the stream's numbers."""
    lines = error_event(NoWorker("no"), Endpoint.RESPONSES, number=7).decode().splitlines()
    assert lines[0] == "event: error"
    value = json.loads(lines[1].removeprefix("data: "))
    assert (value["type"], value["sequence_number"], value["code"]) == ("error", 7, "no_worker_available")
    assert value["error"]["message"] == "no"
    assert value["retry_after_seconds"] == value["error"]["retry_after_seconds"] == 1


def test_a_401_says_how_to_prove_oneself() -> None:
    """RFC 9110 15.5.2: a challenge comes with it."""
    assert ("www-authenticate", 'Bearer realm="homing"') in to_answer(Unauthorized("who?")).headers
