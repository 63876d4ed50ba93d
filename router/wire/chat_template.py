"""Chat messages to prompt text through a model's own template, as ``transformers`` renders it and vLLM feeds it.

The router and the engine shim both render with this module: a difference of one character would end every shared
prefix there. What vLLM does to messages before a template sees them (``renderers/chat_utils.py``):

- text parts are one string joined by line breaks, or, where the template itself walks parts, a list of parts;
- no content is empty content; a tool's result is always a string;
- a tool call's arguments are an object, whatever its JSON was: what is no object becomes an empty one;
- tools are shown by their known fields, those absent as null;
- a template that does not name the role ``developer`` sees it as ``system``, all system messages as one at the start;
- Claude Code's billing line, another in every request, is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any, NoReturn, TypeGuard

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from router.wire.rendered_heads import FEWEST_MESSAGES, RenderedHeads, Rendering
from router.wire.resumable import make_resumable
from router.wire.template_analysis import walks_parts
from router.wire.template_json import TemplateJson

Message = Mapping[str, Any]

#: What a template's own expressions raise on values they were not made for.
_TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_BILLING_LINE = "x-anthropic-billing-header"
_DICT_METHODS = frozenset(dir(dict))
#: Memory for what conversations' first messages were rendered to, and for tools and calls as JSON.
MAX_RENDERED_BYTES = 128 * 1024 * 1024
MAX_JSON_BYTES = 32 * 1024 * 1024
_LOOP_NAMES = frozenset({"first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0"})


class TemplateRefusal(ValueError):
    """The template, or the form that messages must have for it, refuses these messages."""


class MediaContent(TemplateRefusal):
    """A message holds more than text: what stands for it in the prompt is the engine's own affair."""


class ChatTemplate:
    """A compiled template. ``variables`` are the names templates use for special tokens, such as ``bos_token``."""

    def __init__(self, source: str, *, variables: Mapping[str, str]) -> None:
        """Compile. Raises ``jinja2.TemplateError``."""
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
        self._json = TemplateJson(max_bytes=MAX_JSON_BYTES)
        environment.filters["tojson"] = self._json.write
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._environment = environment
        self._template = environment.from_string(source)
        tree = environment.parse(source)
        self._walks_parts = walks_parts(tree)
        self._resumable: jinja2.Template | None = None
        if make_resumable(tree):
            tree.set_environment(environment)
            self._resumable = environment.from_string(tree)
        self._heads = RenderedHeads(max_bytes=MAX_RENDERED_BYTES)
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
        documents: object = None,
    ) -> str:
        """The prompt's text. Raises ``TemplateRefusal``; ``MediaContent`` where a message is not all text.

        Any JSON may stand in any place: what is of the wrong type is refused, here or by the template's expressions.
        """
        try:
            shown = self._show(messages)
            is_merged = not self._knows_developer and "developer" in map(itemgetter("role"), shown)
            if is_merged:
                shown = _with_one_system([_as_system(message) for message in shown])
            values = {
                **self._variables,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **(extra or {}),
                "messages": shown,
                "tools": [_shown_tool(tool) for tool in tools] if tools else None,
            }
            if self._resumable is None or is_merged or len(messages) < FEWEST_MESSAGES:
                return self._template.render(values)
            rendering = Rendering(
                self._heads,
                self._environment,
                messages=messages,
                shown=shown,
                arguments=(tools, documents, add_generation_prompt, extra),
            )
            return rendering.run(self._resumable, values)
        except TemplateRefusal:
            raise
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise TemplateRefusal(str(error)) from error

    def _show(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template expects them. Those that are so already stay as they are: most, in a long chat."""
        shown: list[Message] = []
        is_plain = not self._walks_parts
        for message in messages:
            role = message.get("role")
            is_shown = role == "tool" or (is_plain and (role == "user" or (role == "assistant" and len(message) == 2)))
            if not is_shown or type(message.get("content")) is not str:
                message = _shown(message, json=self._json, walks_parts=self._walks_parts)
            shown.append(message)
        return shown


# --- messages as templates expect them -------------------------------------------------------------


def _shown(message: Message, *, json: TemplateJson, walks_parts: bool) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise TemplateRefusal("each message needs a role")
    content = message.get("content")
    shown = dict(message)
    if type(content) is not str or walks_parts or role == "system":
        parts = _parts(content, is_system=role == "system")
        if walks_parts and role != "tool":
            shown["content"] = [part if isinstance(part, Mapping) else {"type": "text", "text": part} for part in parts]
        else:
            shown["content"] = "\n".join(_text(part) for part in parts)
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            shown["tool_calls"] = [_with_object(call, json) for call in calls]
        else:
            shown.pop("tool_calls", None)
        if (reasoning := message.get("reasoning")) is not None:
            shown["reasoning_content"] = reasoning
    return shown


def _parts(content: object, *, is_system: bool) -> list[str | Message]:
    """A message's text parts: strings, or objects with a text of their own and perhaps more fields."""
    if content is None:
        return []
    if not isinstance(content, list | str):
        raise TemplateRefusal("a message's content is a string or a list of parts")
    parts = [_part(part) for part in ([content] if isinstance(content, str) else content)]
    if is_system:
        parts = [kept for part in parts if (kept := _without_billing_line(part)) is not None]
    return parts


def _part(part: object) -> str | Message:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        kind = part.get("type", "text")
        text = part.get("text") or part.get(kind) or ""
        if kind in _TEXT_PARTS and isinstance(text, str):
            return part if kind == "text" and "text" in part else {**part, "type": "text", "text": text}
        if isinstance(kind, str) and kind not in _TEXT_PARTS:
            raise MediaContent(f"a part of type {kind!r} is no text")
    raise TemplateRefusal("a part of a message's content is a string or an object with a text")


def _text(part: str | Message) -> str:
    return part if isinstance(part, str) else str(part["text"])


def _without_billing_line(part: str | Message) -> str | Message | None:
    text = _text(part)
    if not text.startswith(_BILLING_LINE):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else {**part, "text": rest}


def _with_object(call: Any, json: TemplateJson) -> object:
    """A tool call whose arguments are an object, not its JSON."""
    function = call.get("function") if _is_object(call) else None
    if not _is_object(function):
        raise TemplateRefusal("a tool call names a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.read(arguments)
    return {**call, "function": {**function, "arguments": arguments if _is_object(arguments) else {}}}


def _is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    return type(value) is dict or isinstance(value, Mapping)  # abstract types answer slowly


def _shown_tool(tool: Message) -> Message:
    """A tool as vLLM's own types print it. One that is not a described function stays as it is."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    shown |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {"type": tool.get("type", "function"), "function": shown}


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _with_one_system(messages: list[Message]) -> list[Message]:
    """All system messages as one at the start, where one of them stands elsewhere."""
    if not any(message["role"] == "system" for message in messages[1:]):
        return messages
    contents = (message["content"] for message in messages if message["role"] == "system")
    texts = (content if isinstance(content, str) else "\n".join(map(_text, content)) for content in contents)
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


# --- what templates may do -----------------------------------------------------------------------------


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's, with short cuts to the same answers where templates spend their time: fields of messages, of ``loop``
    and of namespaces.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A field of a dictionary that hides none of its methods, or a public name of ``loop``."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_METHODS:
            return obj[attribute]
        if type(obj) is LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        if type(obj) is Namespace and not attribute.startswith("_"):
            with contextlib.suppress(AttributeError):
                return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks what training learns from; in a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        """Drop the tags, keep what they enclose."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
