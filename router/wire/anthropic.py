"""The Anthropic Messages API: its prompts as chat messages, its errors as bodies and events.

The worker translates a request itself; the router repeats that translation to know the prompt's tokens. It follows
vLLM's (``entrypoints/anthropic/serving.py``), so that what is keyed here is what the engine's template renders.
What a client sends is never judged: junk is skipped, and the worker refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from router.errors import RequestError, anthropic_error_body, wait_field

Json = Mapping[str, Any]

#: Claude Code's attribution block changes with every request. Engines leave it out of the prompt.
_ATTRIBUTION: Final = "x-anthropic-billing-header"


def chat_fields(fields: Json) -> dict[str, Any]:
    """The fields of a chat request with the same prompt: messages, tools, template arguments. Never raises."""
    messages = [*_system(fields.get("system")), *_messages(fields.get("messages"))]
    chat: dict[str, Any] = {"messages": messages, "tools": _tools(fields.get("tools"))}
    extra = fields.get("chat_template_kwargs")
    chat["chat_template_kwargs"] = {**_effort(fields), **(extra if isinstance(extra, Mapping) else {})}
    return chat


def system_first(messages: Sequence[Json]) -> list[Json]:
    """All system messages as one at the head, for templates that refuse them elsewhere."""
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": system}, *rest] if system else rest


def error_event(error: RequestError) -> bytes:
    """An error as the last event of a stream that has begun."""
    return b"event: error\ndata: " + anthropic_error_body(error, **wait_field(error)) + b"\n\n"


# --- messages -----------------------------------------------------------------------------------


def _system(system: object) -> Iterator[Json]:
    if text := _system_text(system):
        yield {"role": "system", "content": text}


def _system_text(content: object) -> str:
    if isinstance(content, str):
        return content
    texts = (block.get("text") for block in _blocks(content) if block.get("type") == "text")
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(_ATTRIBUTION))


def _messages(messages: object) -> Iterator[Json]:
    for message in _blocks(messages):
        role, content = message.get("role"), message.get("content")
        if role == "system":
            text = _system_text(content)
            if text and not text.startswith(_ATTRIBUTION):
                yield {"role": "system", "content": text}
        elif isinstance(role, str):
            if isinstance(content, str):
                yield {"role": role, "content": content}
            else:
                yield from _from_blocks(role, content)


def _from_blocks(role: str, content: object) -> Iterator[Json]:
    """One message of blocks. What tools said stands before the rest, each as a message of its own."""
    parts: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for block in _blocks(content):
        match block.get("type"):
            case "text" if isinstance(text := block.get("text"), str) and text:
                parts.append({"type": "text", "text": text})
            case "image":
                parts.append(_image(block.get("source")))
            case "thinking" if isinstance(thought := block.get("thinking"), str):
                thoughts.append(thought)
            case "tool_use":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                yield from _tool_result(block)
            case "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
    message: dict[str, Any] = {"role": role}
    if thoughts:
        # Templates differ on the name; vLLM gives both.
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        is_plain = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if is_plain else parts
    if role != "user" or "content" in message:
        yield message


def _call(block: Json) -> Json:
    """Keys in vLLM's order: templates may print a call as it is."""
    arguments = block.get("input")
    function = {"arguments": arguments if isinstance(arguments, Mapping) else {}, "name": block.get("name") or ""}
    return {"id": block.get("id") or "", "function": function, "type": "function"}


def _tool_result(block: Json) -> Iterator[Json]:
    content, call_id = block.get("content"), block.get("tool_use_id") or ""
    if isinstance(content, str):
        text = content
    else:
        texts = (item.get("text") for item in _blocks(content) if item.get("type") == "text")
        text = "\n".join(text for text in texts if isinstance(text, str))
    yield {"role": "tool", "tool_call_id": call_id, "content": text}
    images = [_image(item.get("source")) for item in _blocks(content) if item.get("type") == "image"]
    if images:
        yield {"role": "user", "content": images}


def _image(source: object) -> Json:
    source = source if isinstance(source, Mapping) else {}
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


# --- the rest -----------------------------------------------------------------------------------


def _tools(tools: object) -> list[Json] | None:
    """Tools as vLLM hands them to a template: the same keys in the same order whatever the client's."""
    if not isinstance(tools, list):
        return None
    converted: list[Json] = []
    for tool in _blocks(tools):
        schema = tool.get("input_schema")
        schema = dict(schema) if isinstance(schema, Mapping) else {}
        schema.setdefault("type", "object")
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
        function |= {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
        converted.append({"type": "function", "function": function})
    return converted


def _effort(fields: Json) -> Json:
    """How hard to think, as template arguments."""
    thinking, output = fields.get("thinking"), fields.get("output_config")
    if isinstance(thinking, Mapping) and thinking.get("type") == "disabled":
        effort: object = "none"
    else:
        effort = output.get("effort") if isinstance(output, Mapping) else None
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} if isinstance(effort, str) else {}


def _blocks(value: object) -> Iterator[Json]:
    """The objects of a list; nothing else."""
    return (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else iter(())
