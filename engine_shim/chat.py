"""Chat messages to prompt text, through the model's own template.

Templates are rendered as ``transformers`` does; messages are put into the form that templates expect as vLLM does: text
parts as lines, absent content as empty, a tool call's arguments as an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_shim.api import ApiError, Message


class ChatTemplate:
    """A compiled template. ``special_tokens`` are the names templates use, such as ``bos_token``."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """Compile. Raises ``jinja2.TemplateSyntaxError``."""
        extensions: list[type[Extension]] = [loopcontrols, _Generation]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, object],
    ) -> str:
        """The prompt's text. Raises ``ApiError`` where the messages or the template refuse."""
        variables = {
            **self._special_tokens,
            **extra,
            "messages": [_expected(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(f"The chat template refuses: {error}", param="messages") from error


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; for a prompt it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Drop the tags, keep what they enclose."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _expected(message: Message) -> Message:
    if not isinstance(message.get("role"), str):
        raise ApiError("each message needs a role", param="messages")
    expected = {**message, "content": _text(message.get("content"))}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        expected["tool_calls"] = [_with_object(call) for call in calls]
    return expected


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError("a message's content is a string or a list of parts", param="messages")
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise ApiError("only text parts are understood", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _with_object(call: object) -> object:
    """A tool call whose arguments are an object, not its JSON."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise ApiError("a tool call names a function", param="messages")
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ApiError(f"a tool call's arguments are not JSON: {error}", param="messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``transformers``' filter: unlike Jinja's own it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
