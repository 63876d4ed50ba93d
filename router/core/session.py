"""Who is asking: the header or field that names a session, and where each session is at home.

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
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

import xxhash

from router.core.returns import Conversation, Returns
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
_CHILD = "child of "
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
            agent = agent or (_CHILD + _clean(value) if value else "")
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


#: So many of the ranks that served a session are remembered.
_MAX_HOMES = 8


@dataclass(slots=True, eq=False)
class Tenure:
    """The time for which a slot is one rank's: the next rank there has another."""

    slot: int
    is_over: bool = False


@dataclass(slots=True)
class Binding:
    """Where a session is at home: the ranks that served it, the last one first.

    There may be several: what asks for a title or counts tokens under the session's name leaves nothing of the
    conversation where it is served. ``inflight`` keeps the binding alive while a request of it runs, however long that
    takes. ``is_answered``: one of them was, and ``comes_back``: another has begun soon after.
    """

    homes: tuple[Tenure, ...]
    used_at: float
    inflight: int = 0
    is_answered: bool = False
    comes_back: bool = False

    @property
    def slots(self) -> list[int]:
        """The slots of those ranks that are still there."""
        return [home.slot for home in self.homes if not home.is_over]

    @property
    def slot(self) -> int:
        """The rank that served last. Raises ``IndexError`` if none is there any more."""
        return self.slots[0]

    def serve(self, tenure: Tenure) -> None:
        """The next request goes there."""
        if tenure is not self.homes[0]:
            others = [home for home in self.homes if home is not tenure and not home.is_over]
            self.homes = (tenure, *others[: _MAX_HOMES - 1])


class SessionTable:
    """Homes of sessions per model, least recently used first; bounded, and forgetful of the idle.

    ``returns`` learns from it who comes back. That a rank has gone is noted once, in its tenure: a session that is at
    home nowhere else has none, and is let go of in its turn.
    """

    def __init__(self, *, max_sessions: int, idle_seconds: float) -> None:
        self.returns = Returns()
        self.max_sessions = max_sessions
        self.idle_seconds = idle_seconds
        #: Sessions that have come back soon, by the slot that served them last; subagents are not counted.
        self.at_home: dict[int, int] = {}
        self._bindings: OrderedDict[Conversation, Binding] = OrderedDict()
        self._tenures: dict[int, Tenure] = {}

    def __len__(self) -> int:
        """All that are remembered, those whose ranks have gone too."""
        return len(self._bindings)

    def recent(self) -> Iterator[tuple[Conversation, Binding]]:
        """Bindings to ranks that are there, the last used first."""
        return (item for item in reversed(self._bindings.items()) if item[1].slots)

    def home(
        self, model: str, key: SessionKey, *, now: float, held: Mapping[int, int] = MappingProxyType({})
    ) -> int | None:
        """Of the slots that served this session the one with most of a prompt, ``held[slot]`` tokens; of equals the one
        that served last.
        """
        binding = self._bindings.get((model, key))
        if binding is None or (not binding.inflight and now - binding.used_at > self.idle_seconds):
            return None
        if len(slots := binding.slots) > 1:
            return max(slots, key=lambda slot: held.get(slot, 0))
        return slots[0] if slots else None

    def parent_home(self, model: str, key: SessionKey, *, now: float) -> int | None:
        """The home of the one whose subagent it is, if it is one."""
        parent = key.agent.removeprefix(_CHILD) if key.agent.startswith(_CHILD) else key.session
        return self.home(model, SessionKey(key.tenant, parent), now=now) if key.agent else None

    def is_beginning(self, model: str, key: SessionKey) -> bool:
        """Requests of the session are on their way, and none has been answered yet."""
        binding = self._bound((model, key))
        return binding is not None and binding.inflight > 0 and not binding.is_answered

    def start(self, model: str, key: SessionKey, *, slot: int, now: float) -> Binding:
        """A request of the session was sent to ``slot``, a home of it from now on. Give the binding to ``finish``."""
        conversation = (model, key)
        binding = self._bound(conversation) or self._bind(conversation, slot, used_at=now, now=now)
        is_soon = binding.is_answered and now - binding.used_at <= Returns.SOON_SECONDS
        self._serve(key, binding, slot, comes_back=is_soon)
        binding.used_at = now
        binding.inflight += 1
        self._bindings.move_to_end(conversation)
        self.returns.arrived(conversation, now=now)
        return binding

    def finish(self, model: str, key: SessionKey, binding: Binding, *, now: float, is_answered: bool = True) -> None:
        """That request is over. A binding that was forgotten meanwhile has no say over its successor. Who was not
        answered has not left: what is tried again is no return.
        """
        binding.inflight -= 1
        binding.used_at = now
        binding.is_answered |= is_answered
        conversation = (model, key)
        if is_answered and not binding.inflight:
            self.returns.left(conversation, now=now)
        if self._bindings.get(conversation) is binding:
            self._bindings.move_to_end(conversation)

    def adopt(self, model: str, key: SessionKey, *, slot: int, used_at: float, now: float, is_own: bool) -> None:
        """Another router sent the session to ``slot`` at ``used_at``: its home, unless it was used here since. Who asks
        here next was answered there, as far as anybody knows. ``is_own``: this router did, which it may have forgotten.
        """
        binding = self._bound((model, key))
        if binding is None:
            binding = self._bind((model, key), slot, used_at=used_at, now=now)
        elif is_own or used_at <= binding.used_at:
            return
        self._serve(key, binding, slot, comes_back=False)
        binding.used_at, binding.is_answered = used_at, True
        self._bindings.move_to_end((model, key))

    def forget_slot(self, slot: int) -> None:
        """The rank is gone: it is nobody's home."""
        self.at_home.pop(slot, None)
        if (tenure := self._tenures.pop(slot, None)) is not None:
            tenure.is_over = True

    def _tenure(self, slot: int) -> Tenure:
        tenure = self._tenures.get(slot)
        if tenure is None:
            tenure = self._tenures[slot] = Tenure(slot)
        return tenure

    def _serve(self, key: SessionKey, binding: Binding, slot: int, *, comes_back: bool) -> None:
        """The next request goes to the slot's rank."""
        tenure = self._tenure(slot)
        if tenure is not binding.homes[0] or (comes_back and not binding.comes_back):
            self._count(key, binding, -1)
            binding.serve(tenure)
            binding.comes_back |= comes_back
            self._count(key, binding, 1)

    def _count(self, key: SessionKey, binding: Binding, more: int) -> None:
        home = binding.homes[0]
        if binding.comes_back and not key.agent and not home.is_over:
            self.at_home[home.slot] = self.at_home.get(home.slot, 0) + more

    def _bound(self, conversation: Conversation) -> Binding | None:
        """The binding, if it is to a rank that is there."""
        binding = self._bindings.get(conversation)
        if binding is None or (binding.homes[0].is_over and not binding.slots):
            return None
        return binding

    def _bind(self, conversation: Conversation, slot: int, *, used_at: float, now: float) -> Binding:
        """A fresh binding, in the place of one to ranks that are gone."""
        self._bindings.pop(conversation, None)
        self._make_room(now)
        binding = self._bindings[conversation] = Binding((self._tenure(slot),), used_at)
        return binding

    def _make_room(self, now: float) -> None:
        """Let the idle go, and beyond ``max_sessions`` the least recently used; never one with a running request."""
        for _ in range(len(self._bindings)):
            full = len(self._bindings) >= self.max_sessions
            key, binding = next(iter(self._bindings.items()))
            if binding.inflight and full:
                self._bindings.move_to_end(key)  # in use at this moment
            elif not binding.inflight and (full or now - binding.used_at > self.idle_seconds):
                del self._bindings[key]
                self._count(key[1], binding, -1)
            else:
                return
