"""Chats as they come from the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from router.wire.openai import Endpoint, InferenceRequest, parse_request

NEEDLE = Path(__file__).parents[3] / "engine_shim" / "model" / "needle"


def chat(messages: Sequence[Mapping[str, Any]], **fields: Any) -> InferenceRequest:
    """A request as it comes from the wire."""
    body = json.dumps({"model": "m", "messages": list(messages), **fields})
    return parse_request(Endpoint.CHAT, body.encode())


def turns(*contents: Any) -> list[dict[str, Any]]:
    """System, user, assistant, user, ..."""
    roles = ("system", *("user", "assistant") * len(contents))
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
