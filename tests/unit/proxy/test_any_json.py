"""Any JSON in any field's place, on every endpoint: it is refused for what it is, or goes to a worker, which judges."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import BadRequest
from router.proxy.brain import RouterBrain
from router.proxy.prepared import guessed_tokens
from router.proxy.splitting import contracts
from router.proxy.tokenization import PromptTokenizer
from router.proxy.types import Outcome
from router.wire import handover
from router.wire.openai import Endpoint, parse_request, with_model
from tests.fakes.brain_world import FILES, TOKENIZER, World

#: One that looks at everything, and one that walks parts.
TEMPLATES = {
    "fields": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson(indent=2) }}{% endfor %}"
    "{% endfor %}{% for tool in tools or [] %}{{ tool | tojson }}{{ tool.function.parameters.items() }}{% endfor %}"
    "{% for document in documents or [] %}{{ document.title }}{% endfor %}{{ enable_thinking }}",
    "parts": "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
    "{% endfor %}{{ tools | tojson if tools }}",
}
WORDS = st.sampled_from(
    [
        *("text", "image_url", "type", "role", "content", "function", "name", "arguments", "tool_calls", "input_text"),
        *("user", "assistant", "system", "tool", "developer", "id", "reasoning", "thinking", "tool_use", "tool_result"),
        *(
            "input",
            "call_id",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "output",
            "summary",
            "parts",
        ),
        *("source", "url", "session_id", "user_id", "parameters", "input_schema", "items", "effort", "message"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, 1, -1, 5, 10**25, 1.5, ""]) | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
MESSAGE = st.builds(
    lambda role, rest: {**rest, **role},
    st.fixed_dictionaries({}, optional={"role": ROLES}),
    st.dictionaries(WORDS, JSON, max_size=4),
)
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=3) | JSON
OTHERS = (
    *("tools", "documents", "chat_template_kwargs", "metadata", "user", "prompt_cache_key", "session_params", "n"),
    *("add_generation_prompt", "cache_salt", "extra_key", "max_tokens", "stream", "stream_options", "ignore_eos"),
    *("system", "thinking", "output_config", "instructions", "reasoning", "previous_response_id", "conversation"),
    *("kv_transfer_params", "bootstrap_room", "best_of", "min_tokens", "tool_choice", "response_format"),
)
MAIN = {
    Endpoint.CHAT: {"messages": MESSAGES},
    Endpoint.COMPLETIONS: {"prompt": JSON},
    Endpoint.RESPONSES: {"input": MESSAGES},
    Endpoint.MESSAGES: {"messages": MESSAGES},
    Endpoint.COUNT_TOKENS: {"messages": MESSAGES},
    Endpoint.EMBEDDINGS: {"input": JSON},
    Endpoint.RERANK: {"query": JSON, "documents": JSON},
    Endpoint.TOKENIZE: {"prompt": JSON, "messages": MESSAGES},
}
KEYED = ("text", "needle", *TEMPLATES)


@cache
def brain_of(keyed: str) -> RouterBrain:
    world = World(tokens=False)
    if keyed == "needle":
        world.brain.set_tokenizer("m", TOKENIZER)
    elif keyed in TEMPLATES:
        tokenizer = PromptTokenizer.from_files(FILES[0], {"chat_template": TEMPLATES[keyed]})
        world.brain.set_tokenizer("m", tokenizer)
    return world.brain


async def serve(endpoint: Endpoint, body: bytes, *, keyed: str) -> None:
    """All that the router makes of a request, but for sending it."""
    try:
        request = parse_request(endpoint, body)
    except BadRequest:
        return
    brain = brain_of(keyed)
    attempt = brain.choose(await brain.prepare(request, {}, tenant="t"))
    attempt.lease.close(Outcome.CLIENT_ERROR, None)
    guessed_tokens(request)
    contracts(request)
    for edited in (
        with_model(request, "other").body,
        handover.alone_body(request, rank=1),
        handover.prefill_body(request, rank=1),
        handover.decode_body(request, None, rank=1),
    ):
        assert isinstance(json.loads(edited), dict)


@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize("endpoint", Endpoint)
@given(data=st.data())
async def test_no_body_is_an_error_of_the_routers_own(endpoint: Endpoint, data: st.DataObject) -> None:
    """With a tokenizer, with templates that look at everything, and by the text alone."""
    fields: dict[str, Any] = {"model": "m"}
    fields |= data.draw(st.fixed_dictionaries({}, optional=MAIN[endpoint]) | st.fixed_dictionaries(MAIN[endpoint]))
    fields |= data.draw(st.dictionaries(st.sampled_from(OTHERS), JSON, max_size=4))
    await serve(endpoint, json.dumps(fields).encode(), keyed=data.draw(st.sampled_from(KEYED)))


@pytest.mark.parametrize("keyed", KEYED)
@pytest.mark.parametrize("depth", [100, 900, 960, 970, 975, 980, 985, 990, 995, 1000])
@pytest.mark.parametrize(
    ("endpoint", "form"),
    [
        (Endpoint.CHAT, '{"model": "m", "messages": [{"role": "user", "content": %s}]}'),
        (Endpoint.CHAT, '{"model": "m", "messages": [{"role": "user", "content": "x", "y": %s}]}'),
        (Endpoint.CHAT, '{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [%s]}'),
        (Endpoint.CHAT, '{"model": "m", "messages": [{"role": "user", "content": "x"}], "metadata": %s}'),
        (Endpoint.MESSAGES, '{"model": "m", "messages": [{"role": "user"}], "tools": [{"input_schema": {"a": %s}}]}'),
        (Endpoint.RESPONSES, '{"model": "m", "input": [{"role": "user", "content": %s}]}'),
        (Endpoint.COMPLETIONS, '{"model": "m", "prompt": [%s]}'),
    ],
)
async def test_no_nesting_is_an_error_of_the_routers_own(endpoint: Endpoint, form: str, depth: int, keyed: str) -> None:
    """Up to what can be decoded, and beyond: what is too deep to be written again has no keys."""
    await serve(endpoint, (form % ("[" * depth + "]" * depth)).encode(), keyed=keyed)
    await serve(endpoint, (form % ('{"a":' * depth + "1" + "}" * depth)).encode(), keyed=keyed)


@pytest.mark.parametrize("keyed", KEYED)
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": 5},
        {"tools": True},
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        {"messages": [{"role": "user", "content": [{"type": []}]}]},
        {"chat_template_kwargs": {"raise_exception": 5, "tools": 5, "range": 1}},
    ],
)
async def test_what_templates_cannot_render_goes_by_its_text(fields: dict[str, Any], keyed: str) -> None:
    """A client's mistake that workers have a word for."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    request = parse_request(Endpoint.CHAT, json.dumps(body).encode())
    prepared = await brain_of(keyed).prepare(request, {}, tenant="t")
    assert prepared.model == "m"
    assert prepared.prompt_tokens > 0
