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
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
import msgspec
from jinja2 import nodes
from jinja2.runtime import LoopContext

Message = Mapping[str, Any]

#: What a template's own expressions raise on values they were not made for.
_TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_BILLING_LINE = "x-anthropic-billing-header"
_DICT_METHODS = frozenset(dir(dict))
_MOST_INDENTS = 32
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
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._walks_parts = walks_parts(environment.parse(source))
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
            shown = [_shown(message, walks_parts=self._walks_parts) for message in messages]
            if not self._knows_developer and any(message["role"] == "developer" for message in shown):
                shown = _with_one_system([_as_system(message) for message in shown])
            values = {
                **self._variables,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **(extra or {}),
                "messages": shown,
                "tools": [_shown_tool(tool) for tool in tools] if tools else None,
            }
            return self._template.render(values)
        except TemplateRefusal:
            raise
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise TemplateRefusal(str(error)) from error


# --- messages as templates expect them -------------------------------------------------------------


def _shown(message: Message, *, walks_parts: bool) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise TemplateRefusal("each message needs a role")
    content = message.get("content")
    if type(content) is str and (role == "tool" or not walks_parts):  # as most are
        if role == "user" or role == "tool":
            return message
        if role == "assistant" and "tool_calls" not in message and "reasoning" not in message:
            return message
    shown = dict(message)
    parts = _parts(content, is_system=role == "system")
    if walks_parts and role != "tool":
        shown["content"] = [part if isinstance(part, Mapping) else {"type": "text", "text": part} for part in parts]
    else:
        shown["content"] = "\n".join(_text(part) for part in parts)
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            shown["tool_calls"] = [_with_object(call) for call in calls]
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


def _with_object(call: object) -> object:
    """A tool call whose arguments are an object, not its JSON."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise TemplateRefusal("a tool call names a function")
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, Mapping) else {}}}


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


# --- what a template does itself ---------------------------------------------------------------------


def walks_parts(template: nodes.Template) -> bool:
    """Whether the template loops over a message's list of parts. vLLM's rule (``renderers/hf.py``): over the content of
    a message, over a macro's parameter that is given one, or over whatever is named ``content`` outside of macros.
    """
    messages = _names_of_messages(template)
    in_macros: set[int] = set()
    for macro in template.find_all(nodes.Macro):
        given = _parameters_given_content(template, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                return True
    return any(
        any(_is_of(loop.iter, name, "content") for name in messages)
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" and id(loop) not in in_macros)
        for loop in template.find_all(nodes.For)
    )


def _names_of_messages(template: nodes.Template) -> set[str]:
    """Names that stand for one message: targets of loops over ``messages`` or over what was assigned from it."""
    lists = {"messages"}
    while True:
        more = {
            assigned.target.name
            for assigned in template.find_all(nodes.Assign)
            if isinstance(assigned.target, nodes.Name) and any(_is_of(assigned.node, name) for name in lists)
        }
        if more <= lists:
            break
        lists |= more
    return {
        loop.target.name
        for loop in template.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_is_of(loop.iter, name) for name in lists)
    }


def _parameters_given_content(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    names = [parameter.name for parameter in macro.args]
    given: set[str] = set()
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            arguments: Iterator[tuple[str, nodes.Expr]] = zip(names, call.args, strict=False)
            named = ((keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names)
            for parameter, argument in (*arguments, *named):
                if any(_is_of(argument, message, "content") for message in messages):
                    given.add(parameter)
    return given


def _is_of(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable ``name``, or its ``key``; through filters, tests and slices."""
    match node:
        case nodes.Filter(node=inner) | nodes.Test(node=inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_of(inner, name, key)
        case nodes.Getattr(node=inner, attr=attribute) if key is not None:
            return attribute == key and _is_of(inner, name) and isinstance(inner, nodes.Name)
        case nodes.Getitem(node=inner, arg=nodes.Const(value=attribute)) if key is not None:
            return bool(attribute == key) and _is_of(inner, name) and isinstance(inner, nodes.Name)
        case nodes.Name(name=found, ctx="load"):
            return key is None and found == name
    return False


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's, with short cuts to the same answers where templates spend their time: a message's fields, ``loop``."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A field of a dictionary that hides none of its methods, or a public name of ``loop``."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_METHODS:
            return obj[attribute]
        if type(obj) is LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks what training learns from; in a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        """Drop the tags, keep what they enclose."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``transformers``' filter: unlike Jinja's own it does not escape HTML.

    Indented it refuses what is nested deeper than schemas are, as blanks by the depth make gigabytes of a megabyte.
    """
    if indent is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    if _is_deep(value):
        raise TemplateRefusal(f"JSON is nested deeper than {_MOST_INDENTS}")
    if type(indent) is int and indent > 0 and separators is None:
        with contextlib.suppress(msgspec.DecodeError):  # infinities, which JSON has not
            # The same in a tenth of the time: Python's own encoder indents value by value.
            compact = json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
            return msgspec.json.format(compact, indent=indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_INDENTS + 1):
        if not level:
            return False
        level = [
            child
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for child in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
    return bool(level)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
