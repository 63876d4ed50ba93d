"""A node of the radix tree, and the order in which nodes give up their pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of whole pages that hang below ``parent``: the edge and its end in one.

    ``hashes`` has one entry a page, ``tokens`` is ``page_tokens`` times as long. ``held[g]`` is what cache group g
    has of this run, or None: a *tombstone* in that group. The full group always has all pages, a window group all
    or none, a state group the one slot with the state at the run's *end*. ``locks[g]`` counts who reads that,
    ``pins[g]`` how many transfers copy it out: a lock is a use, a pin is none, and neither lets it go.
    ``is_saved``: what it has was handed on to be copied out, so nobody need see to that before it goes.
    A child is keyed by the tokens of its first page. A root has no pages; its one hash is the seed of its
    namespace's chain.
    """

    namespace: str
    parent: Node | None
    tokens: tuple[int, ...]
    hashes: list[int]
    held: list[list[int] | None]
    locks: list[int]
    pins: list[int]
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    is_saved: bool = False

    @property
    def is_root(self) -> bool:
        """The start of a namespace."""
        return self.parent is None

    @property
    def pages(self) -> int:
        """Length of the run; 0 for a root."""
        return 0 if self.parent is None else len(self.hashes)

    @property
    def parent_hash(self) -> int | None:
        """The hash before this run as events name it: None at the start of a chain."""
        return None if self.parent is None or self.parent.is_root else self.parent.hashes[-1]

    def path(self) -> Iterator[Node]:
        """This node and those above it, deepest first, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Recency:
    """Nodes of one component that nobody has locked, least recently used first, and the pages they can give up.

    A doubly linked ring through ``None``, so that a node which is split keeps its place for both halves.
    ``pages`` is kept by the tree, which knows what each change is worth; a pinned node is listed, but worth nothing.
    """

    __slots__ = ("_newer", "_older", "pages")

    def __init__(self) -> None:
        self.pages = 0
        self._newer: dict[Node | None, Node | None] = {None: None}
        self._older: dict[Node | None, Node | None] = {None: None}

    def __contains__(self, node: Node) -> bool:
        return node in self._newer

    def __iter__(self) -> Iterator[Node]:
        """From the oldest to the newest."""
        node = self._newer[None]
        while node is not None:
            yield node
            node = self._newer[node]

    def add(self, node: Node, pages: int) -> None:
        """Enter as the most recent."""
        self._link(node, older=self._older[None])
        self.pages += pages

    def remove(self, node: Node, pages: int) -> None:
        """Leave, because of a lock or for good."""
        self._unlink(node)
        self.pages -= pages

    def refresh(self, node: Node) -> None:
        """Become the most recent."""
        self._unlink(node)
        self._link(node, older=self._older[None])

    def clear(self) -> None:
        """Forget all nodes."""
        self.pages = 0
        self._newer = {None: None}
        self._older = {None: None}

    def split(self, upper: Node, lower: Node, *, upper_first: bool) -> None:
        """``upper`` was cut off ``lower``, which is listed: put it directly before or after that."""
        self._link(upper, older=self._older[lower] if upper_first else lower)

    def _link(self, node: Node, *, older: Node | None) -> None:
        newer = self._newer[older]
        self._older[node], self._newer[node] = older, newer
        self._newer[older] = self._older[newer] = node

    def _unlink(self, node: Node) -> None:
        older, newer = self._older.pop(node), self._newer.pop(node)
        self._newer[older], self._older[newer] = newer, older


def shared_pages(left: Sequence[int], right: Sequence[int], *, page_tokens: int) -> int:
    """How many whole pages two runs (of one type) have in common, by halving: slices compare at C speed."""
    if left == right:
        return len(left) // page_tokens
    low, high = 0, min(len(left), len(right)) // page_tokens
    while low < high:
        middle = (low + high + 1) // 2
        span = slice(low * page_tokens, middle * page_tokens)
        if left[span] == right[span]:
            low = middle
        else:
            high = middle - 1
    return low
