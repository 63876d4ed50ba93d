"""What templates read and write as JSON: kept within bounds, and always what it would be without."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from router.wire.chat_template import MAX_JSON_BYTES, ChatTemplate
from router.wire.template_json import TemplateJson

MOST = 2_000_000


def nested(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "ask",
    [
        lambda memory, at: memory.read(json.dumps({"at": at, "all": [{}] * 1000}, separators=(",", ":"))),
        lambda memory, at: memory.read(json.dumps({"at": at, "all": nested(200, {"a": [1.5, "ab"]})})),
        lambda memory, at: memory.write({"at": at, "all": nested(20, [None] * 900)}, indent=4),
        lambda memory, at: memory.write({"at": at}),
    ],
    ids=["many objects read", "deep lists read", "many lines written", "small ones"],
)
def test_what_it_keeps_is_bounded_by_what_it_takes(ask: Callable[[TemplateJson, int], object]) -> None:
    """A few thousand small tools or calls of one request cannot fill the memory: not by what they become, either."""
    memory = TemplateJson(max_bytes=MOST)
    tracemalloc.start()
    try:
        for at in range(3000):
            ask(memory, at)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert 0 < len(memory) <= MOST
    assert taken < 1.5 * MOST


def test_a_template_has_one_of_its_own() -> None:
    template = ChatTemplate("{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}", variables={})
    tools = [{"type": "function", "function": {"name": f"f{at}", "parameters": {"a": 1}}} for at in range(3)]
    text = template.render([{"role": "user", "content": "m"}], tools=tools)

    assert text == template.render([{"role": "user", "content": "m"}], tools=tools)
    assert 0 < len(template._json) < MAX_JSON_BYTES


def test_it_is_read_and_written_as_by_the_library() -> None:
    """Twice each: the second time it is known."""
    memory = TemplateJson(max_bytes=MOST)
    for _ in range(2):
        for text in ('{"a": [1, 1.0, true, null, "é"]}', '"a"', "null", "no json", "[" * 5000):
            try:
                expected = json.loads(text)
            except (ValueError, RecursionError):
                expected = None
            assert repr(memory.read(text)) == repr(expected)
        for value in ({"a": 1}, {"a": True}, {"a": 1.0}, {"b": 1, "a": 2}, {"a": 2, "b": 1}, [1], "a", {"a": "<é>"}):
            assert memory.write(value) == json.dumps(value, ensure_ascii=False)
            assert memory.write(value, True) == json.dumps(value)
            assert memory.write(value, indent=2) == json.dumps(value, ensure_ascii=False, indent=2)
            assert memory.write(value, sort_keys=True) == json.dumps(value, ensure_ascii=False, sort_keys=True)


def test_what_is_nested_too_deep_is_not_indented() -> None:
    memory = TemplateJson(max_bytes=MOST)
    for _ in range(2):
        with pytest.raises(ValueError, match="nested deeper than 32"):
            memory.write({"a": nested(40, 1)}, indent=2)

    assert len(memory) == 0
