"""How agents name their session on the wire: the headers and body fields of each client.

One conversation has one id, made from the session's and the agent's name, so that it is the same in every run.
Sources: captures of aiperf 0.13.0; the gateway protocol page of Claude Code; Codex and OpenCode as routers read them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import xxhash


class ClientProfile(StrEnum):
    """Whose headers to send."""

    AIPERF = "aiperf"
    CLAUDE_CODE = "claude-code"
    CODEX = "codex"
    OPENCODE = "opencode"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a conversation adds to each of its requests."""

    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)


def identify(profile: ClientProfile, *, session: str, agent: str = "", parent: str = "") -> Identity:
    """The identity of a conversation; ``agent`` is empty for the main one, ``parent`` names a subagent's parent."""
    session_id = _uuid(session)
    own_id = _uuid(session, agent) if agent else session_id
    parent_id = _uuid(session, parent) if parent else session_id
    match profile:
        case ClientProfile.AIPERF:
            headers = {"X-Correlation-ID": own_id, "X-Session-Affinity": own_id}
            if agent:
                headers["X-Dynamo-Parent-Session-ID"] = parent_id
            return Identity(headers)
        case ClientProfile.CLAUDE_CODE:
            headers = {"X-Claude-Code-Session-Id": session_id}
            if agent:
                headers["x-claude-code-agent-id"] = own_id
            if agent and parent:
                headers["x-claude-code-parent-agent-id"] = parent_id
            return Identity(headers)
        case ClientProfile.CODEX:
            headers = {"session-id": session_id, "thread-id": own_id}
            if agent:
                headers["x-codex-parent-thread-id"] = parent_id
            return Identity(headers, {"prompt_cache_key": own_id})
        case ClientProfile.OPENCODE:
            headers = {"X-Session-Id": own_id, "x-session-affinity": own_id}
            if agent:
                headers["x-parent-session-id"] = parent_id
            return Identity(headers)
        case ClientProfile.NONE:
            return Identity()


def _uuid(*names: str) -> str:
    return str(uuid.UUID(bytes=xxhash.xxh3_128_digest("\0".join(names).encode()), version=4))
