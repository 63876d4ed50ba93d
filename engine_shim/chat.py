"""Chat messages to prompt text, through the model's own template (Jinja, as ``transformers`` renders it)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_shim.api import ApiError, Message


class ChatTemplate:
    """A compiled template. ``special_tokens`` are the names templates use, such as ``bos_token``."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """Compile. Raises ``jinja2.TemplateSyntaxError``."""
        extensions: list[type[Extension]] = [loopcontrols]
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
            "messages": [_flat(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(f"The chat template refuses: {error}", param="messages") from error


def _flat(message: Message) -> Message:
    """A message whose content is text: a list of text parts becomes their lines."""
    if not isinstance(message.get("role"), str):
        raise ApiError("each message needs a role", param="messages")
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise ApiError("a message's content is a string or a list of parts", param="messages")
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise ApiError("only text parts are understood", param="messages")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
