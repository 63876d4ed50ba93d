"""Where each session is at home: the ranks that served it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from router.core.returns import Conversation, Returns
from router.core.session import CHILD
from router.core.types import SessionKey

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
        #: Conversations that say who their parent is, by what their own children call them.
        self._parents: dict[Conversation, Conversation] = {}
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
        """The home of the one whose subagent it is, if it is one. That may be a subagent itself."""
        if not key.agent:
            return None
        name = key.agent.removeprefix(CHILD) if key.agent.startswith(CHILD) else key.session
        called = (model, SessionKey(key.tenant, name))
        known = [parent for parent in (called, self._parents.get(called, called)) if self._bound(parent) is not None]
        _, parent = max(known, key=lambda parent: self._bindings[parent].used_at, default=called)
        return self.home(model, parent, now=now)

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
        self._forget(conversation)
        self._make_room(now)
        binding = self._bindings[conversation] = Binding((self._tenure(slot),), used_at)
        if (called := _called(conversation)) is not None:
            self._parents[called] = conversation
        return binding

    def _forget(self, conversation: Conversation) -> None:
        self._bindings.pop(conversation, None)
        called = _called(conversation)
        if called is not None and self._parents.get(called) == conversation:
            del self._parents[called]

    def _make_room(self, now: float) -> None:
        """Let the idle go, and beyond ``max_sessions`` the least recently used; never one with a running request."""
        for _ in range(len(self._bindings)):
            full = len(self._bindings) >= self.max_sessions
            key, binding = next(iter(self._bindings.items()))
            if binding.inflight and full:
                self._bindings.move_to_end(key)  # in use at this moment
            elif not binding.inflight and (full or now - binding.used_at > self.idle_seconds):
                self._forget(key)
                self._count(key[1], binding, -1)
            else:
                return


def _called(conversation: Conversation) -> Conversation | None:
    """What the children of a conversation that is a child itself call it."""
    model, key = conversation
    return (model, SessionKey(key.tenant, key.session)) if key.agent.startswith(CHILD) else None
