"""What structure a request asks for: the fields of OpenAI, vLLM and SGLang, as one grammar. Pure.

::

    response_format      json_object, json_schema                              OpenAI
    tools, tool_choice   "required" or a named function                        OpenAI
    structured_outputs   json, json_object, regex, choice, grammar             vLLM
    guided_*             json, regex, choice, grammar                          vLLM, older
    regex, ebnf          a regular expression; a grammar                       SGLang
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from engine_shim.api import ApiError, ChatRequest, CompletionRequest
from engine_shim.grammar import Grammar, GrammarCompiler, GrammarError, GrammarKind
from engine_shim.types import Constraint

_KINDS: Mapping[str, GrammarKind] = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.GRAMMAR,
    "ebnf": GrammarKind.GRAMMAR,
}
_SINGLE_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf")
_ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


@dataclass(frozen=True, slots=True)
class ToolForce:
    """What tools an answer has to call: ``name`` alone, with nothing but its arguments as text, or any of several."""

    grammar: Grammar
    name: str | None


@dataclass(frozen=True, slots=True)
class Structure:
    """What form a request's answers have: a constraint for each of them, and the tools they call as they have to."""

    constraints: Sequence[Constraint | None]
    force: ToolForce | None


async def structure_of(
    asked: ChatRequest | CompletionRequest, grammars: GrammarCompiler | None, *, answers: int
) -> Structure:
    """Read the request and compile what it asks for. Raises ``ApiError``."""
    force = None
    if isinstance(asked, ChatRequest):
        force = forced_tools(asked.tools, asked.tool_choice, parallel=asked.parallel_tool_calls is not False)
    guided = {name: getattr(asked, name) for name in _SINGLE_FIELDS}
    named = asked_grammar(
        response_format=asked.response_format, structured_outputs=asked.structured_outputs, guided=guided
    )
    if force is not None:
        if named is not None:
            raise ApiError("a forced tool call leaves no room for another structure", param="tool_choice")
        named = "tool_choice", force.grammar
    if named is None:
        return Structure((None,) * answers, None)
    param, grammar = named
    if grammars is None:
        raise ApiError(f"{param}: this shim cannot hold answers to a grammar", param=param)
    if asked.ignore_eos or asked.min_tokens:
        raise ApiError(f"{param}: how long the answer is, is for the grammar to say", param="ignore_eos")
    try:
        return Structure([await grammars.compile(grammar) for _ in range(answers)], force)
    except GrammarError as error:
        raise ApiError(f"{param}: {error}", code="invalid_grammar", param=param) from error


def forced_tools(tools: Sequence[Mapping[str, object]] | None, choice: object, *, parallel: bool) -> ToolForce | None:
    """What ``tool_choice`` forces; None for "auto", "none" and nothing. Raises ``ApiError``."""
    if choice in (None, "auto", "none"):
        return None
    functions = [_function(tool) for tool in tools or ()]
    if not functions:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return ToolForce(Grammar(GrammarKind.GRAMMAR, _calls(functions, parallel=parallel)), None)
    name = _named(choice)
    if name is None:
        raise ApiError('tool_choice must be "none", "auto", "required" or name a function', param="tool_choice")
    schema = dict(functions).get(name)
    if schema is None:
        raise ApiError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return ToolForce(Grammar(GrammarKind.JSON_SCHEMA, _text(schema)), name)


def asked_grammar(
    *,
    response_format: object,
    structured_outputs: object,
    guided: Mapping[str, object],
) -> tuple[str, Grammar] | None:
    """The one field that asks for a grammar, and what; ``guided`` are the single ones, by name. Raises ``ApiError``."""
    found = [(param, _single(param, value)) for param, value in guided.items() if value is not None]
    if response_format is not None and (grammar := _of_format(response_format)):
        found.append(("response_format", grammar))
    if structured_outputs is not None:
        found.append(("structured_outputs", _of_structured(structured_outputs)))
    if len(found) > 1:
        names = " and ".join(param for param, _ in found)
        raise ApiError(f"{names} exclude each other", param=found[1][0])
    return found[0] if found else None


def _of_format(value: object) -> Grammar | None:
    param = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind == "json_schema" and isinstance(value, Mapping):
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if isinstance(schema, Mapping | bool):
            return Grammar(GrammarKind.JSON_SCHEMA, _text(schema))
        raise ApiError("response_format.json_schema.schema must be a JSON schema", param=param)
    raise ApiError("response_format.type must be text, json_object or json_schema", param=param)


def _of_structured(value: object) -> Grammar:
    param = "structured_outputs"
    if not isinstance(value, Mapping):
        raise ApiError("structured_outputs must be an object", param=param)
    known = (*_KINDS, "json_object", "structural_tag")
    asked = {name: each for name, each in value.items() if name in known and each not in (None, False)}
    if len(asked) != 1 or "structural_tag" in asked:
        raise ApiError("structured_outputs names one of json, json_object, regex, choice and grammar", param=param)
    ((name, each),) = asked.items()
    return _ANY_OBJECT if name == "json_object" else _single(name, each, param=param)


def _single(name: str, value: object, *, param: str | None = None) -> Grammar:
    """One field's value, which says nothing but the grammar."""
    kind, param = _KINDS[name.removeprefix("guided_")], param or name
    match kind:
        case GrammarKind.JSON_SCHEMA:
            if isinstance(value, str):
                return Grammar(kind, value)
            if isinstance(value, Mapping | bool):
                return Grammar(kind, _text(value))
            raise ApiError(f"{param}: a JSON schema is an object", param=param)
        case GrammarKind.CHOICE:
            if isinstance(value, list) and value and all(isinstance(each, str) and each for each in value):
                return Grammar(kind, json.dumps(value))
            raise ApiError(f"{param}: a choice is a list of texts", param=param)
        case _:
            if isinstance(value, str) and value:
                return Grammar(kind, value)
            raise ApiError(f"{param} must be a text", param=param)


def _function(tool: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """A tool's name and the schema of its arguments."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise ApiError("only tools of type function can be forced", param="tools")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise ApiError("a function has a name", param="tools")
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ApiError(f"the parameters of {name!r} must be the JSON schema of an object", param="tools")
    return name, {"type": "object", **schema}


def _named(choice: object) -> str | None:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _calls(functions: Sequence[tuple[str, Mapping[str, object]]], *, parallel: bool) -> str:
    """Calls as ``tools.CallReader`` reads them. Each schema stands alone, so that its references are its own."""
    lines = ['start: "[" call ("," call)* "]"' if parallel else 'start: "[" call "]"']
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, (name, schema) in enumerate(functions):
        head = json.dumps(f'{{"name":{json.dumps(name)},"parameters":')
        lines.append(f'call_{number}: {head} arguments_{number} "}}"')
        lines.append(f"arguments_{number}: %json {_text(schema)}")
    return "\n".join(lines)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
