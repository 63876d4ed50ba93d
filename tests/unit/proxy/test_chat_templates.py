"""Chat templates: what they are given, what they may do, and what becomes of their errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from chats import NEEDLE, chat, turns
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.errors import ConfigError
from router.proxy.tokenization import PromptTokenizer
from router.wire.chat_template import ChatTemplate, TemplateRefusal


def rendered(source: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
    return ChatTemplate(source, variables={"bos_token": "<s>"}).render(messages, **fields)


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endif %}{% endfor %}",
        "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}",
        "{% set all = messages %}{% for m in all[0:] %}{% for part in m.content %}[{{ part.text }}]{% endfor %}"
        "{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}{% for part in content %}[{{ part.text }}]{% endfor %}"
        "{% endfor %}",
        "{% macro show(parts) %}{% for part in parts %}[{{ part.text }}]{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "{% for m in messages %}{% for p in m.content | list %}[{{ p.text }}]{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_walks_parts_is_given_them(source: str) -> None:
    """As ``transformers`` and vLLM do."""
    assert rendered(source, [{"role": "user", "content": PARTS}]) == "[a][b]"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_is_given_text(source: str) -> None:
    """Qwen3's looks whether content is a string and drops what is not: vLLM hands it a string."""
    assert rendered(source, [{"role": "user", "content": PARTS}]) == "a\nb"


def test_variables_and_arguments_reach_the_template() -> None:
    """The names of special tokens, the client's own arguments, and never other messages than its messages."""
    source = "{{ bos_token }}{{ thinking }}{{ messages[0].content }}"
    kwargs = {"thinking": True, "messages": []}

    assert rendered(source, turns("x"), extra=kwargs) == "<s>Truex"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[0].content | int('x', 99) + none }}",
    ],
)
def test_what_a_template_refuses_is_for_the_worker_to_judge(source: str) -> None:
    """Whatever its expressions raise, and without a way out of the sandbox: there are no ids, and no error."""
    with pytest.raises(TemplateRefusal):
        rendered(source, turns("x"))
    tokenizer = Tokenizer.from_file(str(NEEDLE / "tokenizer.json"))
    assert PromptTokenizer(tokenizer, ChatTemplate(source, variables={})).encode(chat(turns("x"))) is None


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        (turns("x"), {"tools": 5}),
        (turns("x"), {"tools": True}),
        ([{"role": "assistant", "tool_calls": 5}], {}),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], {}),
        (turns([{"type": []}]), {}),
        (turns([{"type": {}, "text": ""}]), {}),
        ([{}], {}),
    ],
)
def test_what_is_of_the_wrong_type_is_refused(messages: Sequence[Mapping[str, Any]], fields: dict[str, Any]) -> None:
    """By the form that messages must have: no error of the router's own."""
    with pytest.raises(TemplateRefusal):
        rendered("{{ messages[0].content }}", messages, **fields)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(value=JSON, indent=st.integers(-1, 8), sort_keys=st.booleans(), ensure_ascii=st.booleans())
def test_indented_json_is_pythons(value: object, indent: int, sort_keys: bool, ensure_ascii: bool) -> None:
    """Character by character, as ``transformers`` has it."""
    options = {"indent": indent, "sort_keys": sort_keys, "ensure_ascii": ensure_ascii}
    source = "{{ tools[0] | tojson(indent=indent, sort_keys=sort_keys, ensure_ascii=ensure_ascii) }}"
    assert rendered(source, turns("x"), tools=[value], extra=options) == json.dumps(value, **options)  # type: ignore[arg-type]


def test_nesting_makes_no_gigabytes_of_blanks() -> None:
    """Each level is indented: 500 lists in 500 are 500 kB, and with four blanks a level half a gigabyte."""
    schema: object = "x"
    for _ in range(30):
        schema = {"properties": schema}
    assert rendered("{{ tools | tojson(indent=4) }}", turns("x"), tools=[schema]) == json.dumps([schema], indent=4)
    for _ in range(500):
        schema = [schema]
    with pytest.raises(TemplateRefusal):
        rendered("{{ tools | tojson(indent=4) }}", turns("x"), tools=[schema] * 500)


def test_deeply_nested_tools_are_refused_or_rendered() -> None:
    """JSON nested as deep as can be parsed is no internal error."""
    nested: object = "x"
    for _ in range(20_000):
        nested = [nested]
    with pytest.raises(TemplateRefusal):
        rendered("{{ tools | tojson }}", turns("x"), tools=[nested])


def test_broken_files_name_themselves() -> None:
    """A template or tokenizer that cannot be read stops the start, not a request."""
    with pytest.raises(ConfigError, match="chat template"):
        PromptTokenizer.from_files((NEEDLE / "tokenizer.json").read_bytes(), {"chat_template": "{% for %}"})
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        PromptTokenizer.from_files(b"{}", {})


def test_of_several_templates_the_default_counts() -> None:
    """Special tokens are written as text or as objects."""
    config = {
        "bos_token": {"content": "<|im_start|>", "lstrip": False},
        "chat_template": [
            {"name": "rag", "template": "no"},
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
        ],
    }
    ours = PromptTokenizer.from_files((NEEDLE / "tokenizer.json").read_bytes(), config)
    tokenizer = Tokenizer.from_file(str(NEEDLE / "tokenizer.json"))

    assert list(ours.encode(chat(turns("hello"))) or ()) == tokenizer.encode("<|im_start|>hello").ids
