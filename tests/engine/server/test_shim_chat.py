"""Chat templates: the reference is ``transformers`` rendering the same template."""

from __future__ import annotations

from functools import cache

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine_shim.api import ApiError
from engine_shim.chat import ChatTemplate
from engine_shim.model.tokenizer import MissingExtraError, read_card

# The constructs that published templates use: loop controls, tojson with arguments, tools, generation marks, macros.
TOOLS = """\
{%- macro head(role) -%}<|{{ role }}|>{%- endmacro -%}
{{- bos_token }}
{%- if tools %}
    {{- head("tools") }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{% for message in messages %}
    {%- if message.role == "ignored" %}
        {%- continue %}
    {%- endif %}
    {{- head(message.role) }}
    {%- if message.role == "assistant" %}
        {%- generation %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}
                {{- call.function.name + call.function.arguments | tojson }}
            {%- endfor %}
        {%- endgeneration %}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ head("assistant") }}{% endif %}
{%- if thinking is defined and thinking %}<think>{% endif %}
"""
MESSAGES = [
    {"role": "system", "content": "  be <brief> & 'kind' "},
    {"role": "ignored", "content": "x"},
    {"role": "user", "content": "naïve 日本?\n\nsecond line"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "read", "arguments": {"path": "ä/<b>"}}}],
    },
    {"role": "tool", "content": "done"},
]
FUNCTIONS = [
    {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object"}}}
]


def reference(source: str, messages: list[dict], *, tools: list[dict] | None, prompt: bool, **extra: object) -> str:
    (rendered,), _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **extra
    )
    return rendered


@cache
def source_of(spec: str) -> str:
    try:
        card = read_card(spec)
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert card.chat_template
    return card.chat_template


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, FUNCTIONS])
@pytest.mark.parametrize("spec", ["tools", "needle", "smollm2"])
def test_renders_as_transformers(spec: str, tools: list[dict] | None, prompt: bool) -> None:
    """Text equal to the reference, with and without tools, generation prompt and extra variables."""
    source = TOOLS if spec == "tools" else source_of(spec)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(source, special_tokens=special)
    for extra in ({}, {"thinking": True}):
        rendered = template.render(MESSAGES, tools=tools, add_generation_prompt=prompt, extra=extra)
        assert rendered == reference(source, MESSAGES, tools=tools, prompt=prompt, **special, **extra)


def test_messages_take_the_form_templates_expect() -> None:
    """Parts become lines, null content is empty, arguments in JSON become an object."""
    template = ChatTemplate(TOOLS, special_tokens={"bos_token": "<s>"})
    loose = [
        {**MESSAGES[0], "content": [{"type": "text", "text": "  be <brief> & 'kind' "}]},
        {"role": "user", "content": ["naïve 日本?\n", {"type": "text", "text": "second line"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "read", "arguments": '{"path": "ä/<b>"}'}}],
        },
    ]
    strict = [MESSAGES[0], MESSAGES[2], MESSAGES[3]]

    def render(messages: list[dict]) -> str:
        return template.render(messages, tools=None, add_generation_prompt=True, extra={})

    assert render(loose) == render(strict)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('roles must alternate') }}", "{{ messages[9].content + 1 }}", "{{ 1 + 'a' }}"]
)
def test_a_refusing_template_is_the_clients_error(source: str) -> None:
    """What a template raises is told as a 400 about the messages."""
    template = ChatTemplate(source, special_tokens={})
    with pytest.raises(ApiError) as refused:
        template.render(MESSAGES, tools=None, add_generation_prompt=True, extra={})
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_templates_cannot_reach_the_interpreter() -> None:
    """A template from a model directory is foreign code and runs in a sandbox."""
    template = ChatTemplate("{{ ''.__class__.__mro__ }}", special_tokens={})
    with pytest.raises(ApiError):
        template.render(MESSAGES, tools=None, add_generation_prompt=True, extra={})
