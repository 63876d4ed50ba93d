"""What the tree tells the world: pages stored and removed, as the events that routers read.

Every page is named by its block key (``router.wire.block_keys``), chained from the namespace's seed. Events are
*dense*: one hash for each page and exactly that page's tokens, also where a window group is resident only
at the end of a chain. A recurrent state is told as the one page that ends where it stands. Copies below the device are
told alike, under their medium. Events come in the order in which the cache changed, so replaying them gives what is
resident, for each medium and group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine_shim.cache.node import Node
from engine_shim.cache.transfers import Place
from engine_shim.types import CacheLayout, GroupKind
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event


@dataclass(slots=True)
class _Stored:
    """A store event that may still grow: the next page of the chain is appended to it."""

    parent: int | None
    namespace: str
    hashes: list[int]
    tokens: list[int]


@dataclass(slots=True)
class _Removed:
    """A removal that may still grow."""

    hashes: list[int]


class CopiedPage(Protocol):
    """A page as its copies below the device know it."""

    @property
    def namespace(self) -> str: ...
    @property
    def parent_hash(self) -> int | None: ...
    @property
    def hash(self) -> int: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...


_Where = tuple[Place, int]


@dataclass(slots=True)
class EventRecorder:
    """Collects one step's events. The tree writes, the publisher takes.

    Changes of *different* media and groups do not depend on each other, so a change is merged into the latest event of
    its own when it continues it, whatever others did in between.
    """

    layout: CacheLayout
    _pending: list[tuple[_Where, _Stored | _Removed] | None] = field(default_factory=list)
    _latest: dict[_Where, _Stored | _Removed] = field(default_factory=dict)

    def stored(self, group: int, node: Node) -> None:
        """The pages of a node, or the state at its end, are resident in this group now."""
        if not self._is_told(group):
            return
        parent, hashes, tokens = node.parent_hash, node.hashes, node.tokens
        if self.layout.groups[group].kind is GroupKind.STATE:
            parent = hashes[-2] if len(hashes) > 1 else parent
            hashes, tokens = hashes[-1:], tokens[-self.layout.page_tokens :]
        self._store((Place.DEVICE, group), node.namespace, parent, hashes, tokens)

    def removed(self, group: int, hashes: Sequence[int]) -> None:
        """Pages with these hashes are gone from this group."""
        if not self._is_told(group):
            return
        self._remove((Place.DEVICE, group), hashes)

    def copied(self, place: Place, group: int, page: CopiedPage) -> None:
        """A page of this group has a copy in this place now."""
        if self._is_told(group):
            self._store((place, group), page.namespace, page.parent_hash, (page.hash,), page.tokens)

    def uncopied(self, place: Place, group: int, page: CopiedPage) -> None:
        """It has none any more."""
        if self._is_told(group):
            self._remove((place, group), (page.hash,))

    def _store(
        self, where: _Where, namespace: str, parent: int | None, hashes: Sequence[int], tokens: Sequence[int]
    ) -> None:
        latest = self._latest.get(where)
        if isinstance(latest, _Stored) and parent is not None and latest.hashes[-1] == parent:
            latest.hashes += hashes
            latest.tokens += tokens
        else:
            self._open(where, _Stored(parent, namespace, list(hashes), list(tokens)))

    def _remove(self, where: _Where, hashes: Sequence[int]) -> None:
        latest = self._latest.get(where)
        if isinstance(latest, _Removed):
            latest.hashes += hashes
        else:
            self._open(where, _Removed(list(hashes)))

    def _is_told(self, group: int) -> bool:
        """What a draft head keeps is nobody's matter."""
        return self.layout.groups[group].kind is not GroupKind.DRAFT

    def cleared(self) -> None:
        """Nothing is resident any more."""
        self._pending.append(None)
        self._latest.clear()

    def take(self) -> tuple[Event, ...]:
        """The events since the last call, in the order they happened."""
        events = tuple(
            AllBlocksCleared() if entry is None else self._event(*entry[0], entry[1]) for entry in self._pending
        )
        self._pending.clear()
        self._latest.clear()
        return events

    def _open(self, where: _Where, change: _Stored | _Removed) -> None:
        self._pending.append((where, change))
        self._latest[where] = change

    def _event(self, place: Place, index: int, change: _Stored | _Removed) -> Event:
        group = self.layout.groups[index]
        if isinstance(change, _Removed):
            return BlockRemoved(hashes=tuple(change.hashes), medium=place.value, group=index)
        extra_keys = None
        if change.parent is None and change.namespace:  # vLLM salts the first block of a chain only
            extra_keys = ((change.namespace,), *[None] * (len(change.hashes) - 1))
        return BlockStored(
            hashes=tuple(change.hashes),
            parent=change.parent,
            token_ids=tuple(change.tokens),
            block_tokens=self.layout.page_tokens,
            medium=place.value,
            group=index,
            kind=group.kind.value,
            window_tokens=group.window_tokens,
            extra_keys=extra_keys,
        )
