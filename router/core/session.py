"""Who is asking: the header or field that names a session.

The signals that real clients send, in order; the first one present wins. Names are compared in lower case.
Credentials never name a session, not even when configured: whatever has a name as theirs counts as one. An id is a
hint, not a right: it is scoped by tenant and model, and hashed when longer than ``MAX_ID_CHARS`` or not printable.
Without any signal the stable head of the conversation names the session.

| signal | sent by |
|---|---|
| configured headers, then ``x-homing-session-id`` | the operator |
| ``x-dynamo-session-id`` | Dynamo clients, AgentX recipes |
| ``x-smg-routing-key`` | SMG clients |
| ``x-claude-code-session-id`` (+ ``x-claude-code-agent-id`` for a subagent) | Claude Code |
| ``thread-id``, ``session-id``, ``session_id`` | Codex, pi |
| ``x-session-affinity``, ``x-session-id``, ``x-opencode-session`` | OpenCode, aiperf, vLLM router |
| ``agent-session-id`` | goose |
| ``x-task-id`` | Cline |
| ``x-grok-conv-id``, any ``x-*-session-id`` but a parent's | others |
| ``x-litellm-trace-id`` | LiteLLM |
| ``x-correlation-id`` | aiperf |
| body ``prompt_cache_key``, ``session_id``, ``conversation_id`` | OpenAI, SGLang |
| body ``session_params.session_id``, ``metadata.session_id`` | SGLang, LiteLLM |
| body ``rid`` that ends in a turn, ``_t<n>`` or ``_r<n>``, without that | SMG clients |
| body ``metadata.user_id`` with a session inside | Claude Code through gateways |
| body ``user`` | OpenAI, deprecated |

A conversation that names a parent beside itself (``x-dynamo-parent-session-id``, ``x-parent-session-id``,
``x-codex-parent-thread-id``) is a subagent under its own name, and of that parent.

These name nobody: ``x-user-id``, since one person has many conversations, whose heads tell them apart (who has one each
may configure it); a ``rid`` without a turn and ``x-request-id``, which are one request's; ``x-dynamo-session-final``,
which is passed on to the worker like every header that is not the router's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import xxhash

from router.core.types import SessionKey

MAX_ID_CHARS = 256
_HEADERS = (
    "x-homing-session-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-session-id",
    "x-opencode-session",
    "agent-session-id",
    "x-task-id",
    "x-grok-conv-id",
)
_AGENT_HEADERS = ("x-claude-code-agent-id",)
_PARENT_HEADERS = ("x-dynamo-parent-session-id", "x-parent-session-id", "x-codex-parent-thread-id")
#: Begins the agent of a conversation that says no more than who its parent is, whose session follows.
CHILD = "child of "
#: Some clients have a new one for each request: what is surely a session's goes before them.
_LATE_HEADERS = ("x-litellm-trace-id", "x-correlation-id")
#: A request carries one of them, or two: those are found at once, and then put in order.
_ORDER = {name: place for place, name in enumerate((*_AGENT_HEADERS, *_PARENT_HEADERS, *_HEADERS, *_LATE_HEADERS))}
_SIGNALS = frozenset(_ORDER)
_FIELDS = ("prompt_cache_key", "session_id", "conversation_id")
#: What headers with credentials have in their names. There are many such headers, and each vendor has its own.
_CREDENTIAL = re.compile(
    r"auth|token|key|secret|passw|cookie|credential|signature|jwt|bearer"
    r"|(?<![a-z0-9])(?:sso|saml|oidc|openid|idp|login|logon|signin|csrf|xsrf|otp|mfa|pwd)(?![a-z0-9])"
)
#: A parent's session is somebody else's: it must not name its child's.
_VENDOR_SESSION = re.compile(r"^x-(?!(?:[a-z0-9-]+-)?parent-session-id$)[a-z0-9-]+-session-id$")
_TURN = re.compile(r"(?<=.)(?:_[tr]\d+)+$")
_OLD_USER_ID = re.compile(r"_session_([0-9a-fA-F-]{36})$")
#: Claude Code's first system block changes every turn; it must not take part in a conversation's name.
_VOLATILE_NAME = "x-anthropic-billing-header:"
#: What a conversation's name is made of: so many of its first messages, and parts of each; of a long text its first and
#: last characters. What a client sends beyond that costs no time.
_HEAD_ITEMS = 64
_HEAD_CHARS = 64 * 1024
_USER_ID_CHARS = 4096
_VOLATILE_LINE = re.compile(rf"^{_VOLATILE_NAME}[^\n]*\n?", re.MULTILINE)


def is_credential(header: str) -> bool:
    """Whether a header may carry a credential, by its name. The documented signals carry none."""
    name = header.lower()
    return name not in _SIGNALS and _CREDENTIAL.search(name) is not None


def session_header(name: str) -> str:
    """The name of a header that may name a session. Raises ``ValueError`` for one that ``is_credential``."""
    if is_credential(name):
        raise ValueError(f"by its name {name!r} may carry a credential, and no credential may name a session")
    return name


def identify(
    headers: Mapping[str, str], fields: Mapping[str, Any], *, tenant: str, first: Sequence[str] = ()
) -> SessionKey | None:
    """Name the session of a request, or None if nothing names it. ``headers`` has lower-case names."""
    agent, named, late = "", "", ""
    told: Collection[str] = _SIGNALS.intersection(headers)
    for name in told if len(told) < 2 else sorted(told, key=_ORDER.__getitem__):
        value = headers[name]
        if name in _AGENT_HEADERS:
            agent = _clean(value)
        elif name in _PARENT_HEADERS:
            agent = agent or (CHILD + _clean(value) if value else "")
        elif name in _LATE_HEADERS:
            late = late or value
        else:
            named = named or value
    for name in map(str.lower, first):
        if (value := headers.get(name, "")) and not is_credential(name):
            named = value
            break
    if not named:
        vendors = (name for name in headers if _VENDOR_SESSION.match(name) and not is_credential(name))
        named = next((headers[name] for name in vendors if headers[name]), late)
    if named:
        return SessionKey(tenant, _clean(named), agent)
    if (session := _from_body(fields)) is not None:
        return SessionKey(tenant, _clean(session), agent)
    if (head := conversation_head(fields)) is not None:
        return SessionKey(tenant, f"head:{head:016x}", agent)
    return None


def _from_body(fields: Mapping[str, Any]) -> str | None:
    for name in _FIELDS:
        if isinstance(value := fields.get(name), str) and value:
            return value
    for outer in ("session_params", "metadata"):
        inner = fields.get(outer)
        if isinstance(inner, Mapping) and isinstance(value := inner.get("session_id"), str) and value:
            return value
    request_id = fields.get("rid")
    # To search for a turn takes the square of a hostile id's length.
    if isinstance(request_id, str) and len(request_id) <= MAX_ID_CHARS and (turn := _TURN.search(request_id)):
        return request_id[: turn.start()]
    metadata = fields.get("metadata")
    if isinstance(metadata, Mapping) and isinstance(user := metadata.get("user_id"), str):
        if match := _OLD_USER_ID.search(user[-_USER_ID_CHARS:]):
            return match.group(1)
        if user.startswith("{") and len(user) <= _USER_ID_CHARS and (session := _session_in_json(user)):
            return session
    user = fields.get("user")
    return user if isinstance(user, str) and user else None


def _session_in_json(text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    session = value.get("session_id") if isinstance(value, dict) else None
    return session if isinstance(session, str) and session else None


def conversation_head(fields: Mapping[str, Any]) -> int | None:
    """A hash of what stays the same through a conversation: everything up to its first user message.

    A plain prompt has no turns, so nothing of it is stable: its prefix alone speaks for it (None), as it does where the
    first messages are no user's.
    """
    messages = fields.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return None
    digest = xxhash.xxh3_64()
    for message in islice(messages, _HEAD_ITEMS):
        if not isinstance(message, Mapping):
            return None
        role = message.get("role")
        name = role if isinstance(role, str) else ""
        digest.update(_encoded(f"{name}\x00{_text(message.get('content'))}\x01"))
        if role == "user":
            return digest.intdigest()
    return None


def _text(content: object) -> str:
    """The text of a message's first parts, which are kept apart, without volatile lines."""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else (content,)
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in islice(parts, _HEAD_ITEMS))
    return "\x02".join(map(_steady, (text for text in texts if isinstance(text, str))))


def _steady(text: str) -> str:
    if len(text) > 3 * _HEAD_CHARS:  # its ends, and how long it is: volatile lines count for none of them
        head = _steady(text[: 2 * _HEAD_CHARS])
        steady_chars = len(text) - 2 * _HEAD_CHARS + len(head)
        return f"{head[:_HEAD_CHARS]}\x03{steady_chars}\x03{text[-_HEAD_CHARS:]}"
    # The expression is tried at every character, and hardly any text has the name in it.
    return _VOLATILE_LINE.sub("", text) if _VOLATILE_NAME in text else text


def _clean(value: str) -> str:
    if len(value) <= MAX_ID_CHARS and value.isprintable():
        return value
    return f"hashed:{xxhash.xxh3_128_hexdigest(_encoded(value))}"


def _encoded(text: str) -> bytes:
    """JSON may carry half a surrogate pair, which plain UTF-8 refuses."""
    return text.encode("utf-8", "surrogatepass")
