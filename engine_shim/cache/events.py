"""What the tree tells the world: pages stored and removed, as the events that routers read.

Every page is named by its block key (``router.wire.block_keys``), chained from the namespace's seed. Events are
*dense*: one hash for each page and exactly that page's tokens, also where a window group is resident only
at the end of a chain. A recurrent state is told as the one page that ends where it stands. They come in the order in
which the tree changed, so replaying them gives what is resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_shim.cache.node import Node
from engine_shim.types import CacheGroup, CacheLayout, GroupKind
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


@dataclass(slots=True)
class EventRecorder:
    """Collects one step's events. The tree writes, the publisher takes.

    Changes of *different* groups do not depend on each other, so a change is merged into the latest event of its own
    group when it continues it, whatever other groups did in between.
    """

    layout: CacheLayout
    _pending: list[tuple[int, _Stored | _Removed] | None] = field(default_factory=list)
    _latest: dict[int, _Stored | _Removed] = field(default_factory=dict)

    def stored(self, group: int, node: Node) -> None:
        """The pages of a node, or the state at its end, are resident in this group now."""
        latest, parent = self._latest.get(group), node.parent_hash
        hashes, tokens = node.hashes, node.tokens
        if self.layout.groups[group].kind is GroupKind.STATE:
            parent = hashes[-2] if len(hashes) > 1 else parent
            hashes, tokens = hashes[-1:], tokens[-self.layout.page_tokens :]
        if isinstance(latest, _Stored) and parent is not None and latest.hashes[-1] == parent:
            latest.hashes += hashes
            latest.tokens += tokens
        else:
            self._open(group, _Stored(parent, node.namespace, list(hashes), list(tokens)))

    def removed(self, group: int, hashes: Sequence[int]) -> None:
        """Pages with these hashes are gone from this group."""
        latest = self._latest.get(group)
        if isinstance(latest, _Removed):
            latest.hashes += hashes
        else:
            self._open(group, _Removed(list(hashes)))

    def cleared(self) -> None:
        """Nothing is resident any more."""
        self._pending.append(None)
        self._latest.clear()

    def take(self) -> tuple[Event, ...]:
        """The events since the last call, in the order they happened."""
        events = tuple(
            AllBlocksCleared() if entry is None else self._event(self.layout.groups[entry[0]], entry[1])
            for entry in self._pending
        )
        self._pending.clear()
        self._latest.clear()
        return events

    def _open(self, group: int, change: _Stored | _Removed) -> None:
        self._pending.append((group, change))
        self._latest[group] = change

    def _event(self, group: CacheGroup, change: _Stored | _Removed) -> Event:
        if isinstance(change, _Removed):
            return BlockRemoved(hashes=tuple(change.hashes), group=group.index)
        extra_keys = None
        if change.parent is None and change.namespace:  # vLLM salts the first block of a chain only
            extra_keys = ((change.namespace,), *[None] * (len(change.hashes) - 1))
        return BlockStored(
            hashes=tuple(change.hashes),
            parent=change.parent,
            token_ids=tuple(change.tokens),
            block_tokens=self.layout.page_tokens,
            group=group.index,
            kind=group.kind.value,
            window_tokens=group.window_tokens,
            extra_keys=extra_keys,
        )
