"""The OpenAI Responses API: its prompts as chat messages, its errors as events.

The worker translates a request itself; the router repeats that translation to know the prompt's tokens. It follows
vLLM's (``entrypoints/openai/responses/utils.py``), so that what is keyed here is what the engine's template renders.
What a client sends is never judged: junk is skipped, and the worker refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.errors import RequestError, wait_field

Json = Mapping[str, Any]


def chat_fields(fields: Json) -> dict[str, Any] | None:
    """The fields of a chat request with the same prompt: messages, tools, template arguments. Never raises.

    None where part of the prompt is kept by a worker (``previous_response_id``, ``conversation``).
    """
    if fields.get("previous_response_id") is not None or fields.get("conversation") is not None:
        return None
    messages: list[dict[str, Any]] = []
    instructions, given = fields.get("instructions"), fields.get("input")
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            if isinstance(item, Mapping):
                _add(item, messages)
    chat: dict[str, Any] = {"messages": messages, "tools": _tools(fields.get("tools"))}
    extra, reasoning = fields.get("chat_template_kwargs"), fields.get("reasoning")
    arguments: dict[str, Any] = {}
    if isinstance(reasoning, Mapping) and isinstance(effort := reasoning.get("effort"), str):
        arguments = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    chat["chat_template_kwargs"] = {**arguments, **(extra if isinstance(extra, Mapping) else {})}
    return chat


def error_event(error: RequestError, *, number: int) -> bytes:
    """An error as the last event of a stream that has begun. ``number``: how many events came before it.

    The API's own ``error`` event, with an ``error`` object besides: that is what the official client raises on.
    """
    detail: dict[str, object] = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    detail |= wait_field(error)
    event = {**detail, "type": "error", "sequence_number": number, "error": detail}
    return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"


# --- input items --------------------------------------------------------------------------------


def _add(item: Json, messages: list[dict[str, Any]]) -> None:
    """One item of the input. Thoughts, words and calls of one turn of the model become one message."""
    match item.get("type"):
        case "function_call":
            _add_call(item, item.get("arguments"), messages)
        case "custom_tool_call":
            _add_call(item, {"input": item.get("input") or ""}, messages)
        case "reasoning":
            thought = _first_text(item.get("content")) or _first_text(item.get("summary")) or ""
            _say({"reasoning": thought, "reasoning_content": thought}, messages)
        case "function_call_output" | "custom_tool_call_output":
            output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
            messages.append(output)
        case _ if item.get("role") == "assistant":
            content = item.get("content")
            text = content if isinstance(content, str) else _first_text(content)
            if text is not None:
                _say({"content": text}, messages)
        case _ if isinstance(role := item.get("role"), str):
            messages.append({"role": role, "content": _content(item.get("content"))})


def _say(said: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add to the model's turn; where that has such a thing already, another begins."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and not said.keys() & last.keys():
        last |= said
    else:
        messages.append({"role": "assistant", **said})


def _add_call(item: Json, arguments: object, messages: list[dict[str, Any]]) -> None:
    name = item.get("name") or ""
    if isinstance(namespace := item.get("namespace"), str) and namespace:
        name = f"{namespace}__{name}"
    # In vLLM's order: templates may print a call as it is.
    call = {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}, "type": "function"}
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant":
        last.setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _content(content: object) -> object:
    """Parts by the names that chat templates know."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text"}
        if isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text")
        else part
        for part in content
    ]


def _first_text(parts: object) -> str | None:
    if isinstance(parts, list) and parts and isinstance(parts[0], Mapping):
        text = parts[0].get("text")
        return text if isinstance(text, str) else None
    return None


# --- tools --------------------------------------------------------------------------------------


def _tools(tools: object) -> list[Json] | None:
    """Function tools as vLLM hands them to a template; it shows the model no other kind."""
    if not isinstance(tools, list) or not tools:
        return None
    converted: list[Json] = []
    for tool in tools:
        if isinstance(tool, Mapping) and tool.get("type") == "function":
            function = {name: tool.get(name) for name in ("name", "description", "parameters")}
            function |= {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
            converted.append({"type": "function", "function": function})
    return converted
