"""The OpenAI API's bodies: the few fields a router reads, and the edits it makes. Bytes to values, no sockets.

A body is decoded once and forwarded as received; only an engine's rank field is ever put into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Endpoint(StrEnum):
    """A path of the API that carries a prompt. The value is a metric label."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """What the router reads of a request. ``body`` is what the client sent, byte for byte.

    ``fields`` is the decoded top-level object (messages, prompt, tools, session fields, ...).
    """

    endpoint: Endpoint
    model: str
    stream: bool
    max_tokens: int | None
    fields: Mapping[str, Any]
    body: bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts a worker reports. ``cached_tokens`` is None where the engine does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
