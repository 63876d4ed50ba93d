"""The prefix cache: one radix tree over pages, shared by full-attention, sliding-window and recurrent layers.

Each namespace has a root. An edge is a run of whole pages; it is split on page boundaries only. A node always
holds its full pages and may hold its window pages and the recurrent state at its end (else it is a tombstone in that
component). What is *stored* is not what can be *used*::

    pages     0   1   2 | 3   4 | 5   6   7     three nodes, all of them full; a window of two pages
    full      F   F   F | F   F | F   F   F
    window    W   W   W | .   . | W   W   W     the second node is a tombstone of the window component
    usable  0   1   2   3               7   8   a boundary needs the two window pages before it,
                                                or, nearer to the root, all there are
    state             S |     . |         S
    usable  0           3                   8   with recurrent layers too: a state exactly there

A prompt can be resumed where every component agrees. One that agrees on pages 0-5 can reuse three pages here, while
the full component alone reaches six: its *fork point*. Who runs that prompt stores window and state there, and the
next one with the same head reuses six.

**Ownership.** A page belongs to the free list, to the tree or to one request. ``insert`` moves pages from a
request to the tree. A request reads pages of the tree under a lock; the tree gives up unlocked pages only.

**Order of eviction**, least recently used first, where use is an insert or the release of a lock:

- full: page by page from the end of the oldest leaf; window pages and the state go with it. Every use counts for the
  whole path, so a parent is never older than its child and the oldest unlocked node is always a leaf.
- window: the run of the oldest node, wherever it stands. A use counts for the last window before the boundary only,
  nearest to the root first: older window pages are of no use to whoever continues there.
- state: the oldest one. A use counts for the state that was read or written.

An inner node that gives up its window or state stays, as a tombstone: what hangs below may be usable. A leaf in which
no boundary is usable any more serves nobody and goes as a whole, and so does its parent if that leaves another such.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine_shim.cache.component import Component, components_of
from engine_shim.cache.events import EventRecorder
from engine_shim.cache.node import Node, shared_pages
from engine_shim.cache.pool import PageError
from engine_shim.types import NULL_PAGE, CacheLayout, WindowTails
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import Event

FULL = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt can reuse. Valid until the tree changes: lock it at once or drop it.

    ``tables`` are ready to be a request's tables, one for each group: ``pages`` entries for paged groups, in the window
    group NULL_PAGE before the last window; for a state group ``[slot to read, NULL_PAGE]``.
    ``full_pages >= pages`` is how far the full component alone goes.
    """

    node: Node
    pages: int
    full_pages: int
    tables: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A lock: for each group how many pages (or states) up to the end of ``node`` it covers.

    Splits keep the end of a node in place, so the receipt stays true whatever happens above it.
    """

    node: Node
    extents: tuple[int, ...]

    @property
    def pages(self) -> int:
        """Length of the locked prefix."""
        return self.extents[FULL]


class RadixCache:
    """The tree and the pools. Every call is O(pages it touches)."""

    def __init__(self, layout: CacheLayout, events: EventRecorder) -> None:
        self.layout = layout
        self.components = components_of(layout, events)
        self.pools = tuple(component.pool for component in self.components)
        self.receipts = 0
        self.pinned = 0
        self._events = events
        self._page = layout.page_tokens
        has_windows = layout.window is not None and layout.window_tails is not WindowTails.RING
        self._window = self.components[layout.window.index] if layout.window and has_windows else None
        self._state = self.components[layout.state.index] if layout.state else None
        draft = self.components[layout.draft.index] if layout.draft else None
        #: What every node has: the full group, and the draft group with it.
        self._whole = [self.components[FULL], *([draft] if draft else [])]
        self._roots: dict[str, Node] = {}

    # --- look up ------------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: Sequence[int]) -> Match:
        """The longest usable prefix of ``tokens`` in whole pages.

        Splits a node where it ends, moves nothing in the order of use.
        """
        root = self._roots.get(namespace) or self._new_root(namespace)
        validators = [component.validator() for component in self.components]
        path: list[tuple[Node, int]] = []
        depth = usable = length = 0
        for node, pages in self._walk(root, tuple(tokens)):
            path.append((node, pages))
            depth += pages
            verdicts = [valid(node, pages) for valid in validators]  # each of them must see every node
            if all(verdicts):
                usable, length = depth, len(path)
        path = path[:length]
        tables = tuple(component.table(path, usable) for component in self.components)
        best = root
        if path:
            best, best_pages = path[-1]
            if best_pages < best.pages:
                best = self._split(best, best_pages)
        return Match(node=best, pages=usable, full_pages=depth, tables=tables)

    # --- locks --------------------------------------------------------------------------------------

    def lock(self, match: Match) -> Receipt:
        """Keep a match's pages from eviction until the receipt is released."""
        receipt = Receipt(match.node, tuple(component.extent(match.pages) for component in self.components))
        for component in self.components:
            for node in self._covered(receipt, component):
                component.lock(node)
        self.receipts += 1
        return receipt

    def trim(self, receipt: Receipt, group: int, *, keep: int) -> Receipt:
        """Unlock all but the last ``keep`` pages that a lock covers in a window or state group.

        The new receipt replaces the old one.
        """
        extents = list(receipt.extents)
        extents[group] = min(keep, extents[group])
        trimmed = replace(receipt, extents=tuple(extents))
        component = self.components[group]
        kept = self._covered(trimmed, component)
        locked = self._covered(receipt, component)
        for node in locked[: len(locked) - len(kept)]:
            component.unlock(node)
        return trimmed

    def release(self, receipt: Receipt) -> None:
        """Undo a lock exactly; what nobody else has locked becomes the most recently used.

        Raises ``PageError`` where a second release shows.
        """
        if receipt.node.locks[FULL] == 0 and not receipt.node.is_root:
            raise PageError("a receipt was released twice")
        for component in reversed(self.components):
            for node in self._covered(receipt, component):
                component.unlock(node)
        self.receipts -= 1
        self._prune(receipt.node)

    def lock_whole(self, namespace: str, tokens: Sequence[int]) -> tuple[Receipt, tuple[list[int], ...]]:
        """Lock what whole components have of ``tokens``, usable or not; their tables, those of others empty."""
        node = root = self._roots.get(namespace) or self._new_root(namespace)
        path = list(self._walk(root, tuple(tokens)))
        pages = sum(count for _, count in path)
        tables = tuple(each.table(path, pages) if each.is_whole else [] for each in self.components)
        if path:
            node, count = path[-1]
            node = self._split(node, count) if count < node.pages else node
        receipt = Receipt(node, tuple(pages if each.is_whole else 0 for each in self.components))
        for component in self.components:
            for above in self._covered(receipt, component):
                component.lock(above)
        self.receipts += 1
        return receipt, tables

    def pin(self, receipt: Receipt) -> None:
        """Keep what a receipt covers while it is copied out: no use, so nothing moves in the order of eviction."""
        for component in self.components:
            for node in self._covered(receipt, component):
                component.pin(node)
        self.pinned += 1

    def unpin(self, receipt: Receipt) -> None:
        """Undo a ``pin`` exactly. Raises ``PageError`` where a second one shows."""
        if receipt.node.pins[FULL] == 0:
            raise PageError("a copy ended twice")
        for component in self.components:
            for node in self._covered(receipt, component):
                component.unpin(node)
        self.pinned -= 1
        self._prune(receipt.node)

    def locked_pages(self, receipt: Receipt, group: int) -> list[int]:
        """The pages that a lock keeps, for checks."""
        component = self.components[group]
        return [page for node in self._covered(receipt, component) for page in component.held(node)]

    def _covered(self, receipt: Receipt, component: Component) -> list[Node]:
        return component.covered(receipt.node, receipt.extents[component.index], self._cut_end)

    # --- grow ---------------------------------------------------------------------------------------

    def insert(self, namespace: str, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        """Give computed pages to the tree: whole pages of ``tokens``, one entry a page in each paged group's table.

        The window table may begin with NULL_PAGE; what follows is taken, also over tombstones of nodes that
        exist. A state table is ``[slot]``, the state after these pages, or ``[NULL_PAGE]``. The tree takes what it
        does not have. Pages that it holds already, *as other pages*, stay the caller's: they are returned, for
        each group, to be freed. Entries that are the tree's own pages are left alone.
        """
        page = self._page
        total = len(tokens) // page
        tokens = tuple(tokens[: total * page])
        duplicates: tuple[list[int], ...] = tuple([] for _ in tables)
        if total == 0:
            return duplicates
        root = self._roots.setdefault(namespace, self._new_root(namespace))
        window, state = self._window, self._state
        held_from = tables[window.index][:total].count(NULL_PAGE) if window else 0
        assert window is None or NULL_PAGE not in tables[window.index][held_from:total]
        self._cut(root, tokens[: held_from * page])
        self._cut(root, tokens)

        def join(component: Component, node: Node, pages: Sequence[int]) -> None:
            if node.held[component.index] is None:
                component.hold(node, pages)
            else:
                pairs = zip(pages, component.held(node), strict=True)
                duplicates[component.index].extend(our for our, their in pairs if our != their)

        node, at = root, 0
        runs: list[tuple[Node, slice]] = []
        for node, pages in self._walk(root, tokens):
            runs.append((node, slice(at, at + pages)))
            at += pages
        for stop in (held_from, total):  # what is new: first a tombstone of the window, then the run that has one
            if at < stop:
                node = self._append(node, tokens[at * page : stop * page])
                runs.append((node, slice(at, stop)))
                at = stop
        for below, span in runs:
            for component in self._whole:
                join(component, below, tables[component.index][span])
            if window and span.start >= held_from:
                join(window, below, tables[window.index][span])
                window.touch(below)
        for above in node.path():
            for component in self._whole:
                component.touch(above)
        if state and tables[state.index][0] != NULL_PAGE:
            join(state, node, tables[state.index][:1])
            state.touch(node)
        self._prune(node)
        return duplicates

    def _append(self, parent: Node, tokens: tuple[int, ...]) -> Node:
        hashes = block_keys(tokens, block_tokens=self._page, parent=parent.hashes[-1])
        node = self._new_node(parent, tokens, hashes)
        parent.children[tokens[: self._page]] = node
        return node

    # --- shrink -------------------------------------------------------------------------------------

    def evict(self, group: int, pages: int) -> int:
        """Free at least ``pages`` pages of a group if so many are unlocked; returns how many it were.

        Of the full group no more than asked, but for leaves that serve nobody any more; others give whole runs.
        """
        component = self.components[group]
        wanted = component.pool.free_pages + pages
        while component.pool.free_pages < wanted and (node := component.victim()) is not None:
            if group == FULL:
                self._shorten(node, max(0, node.pages - wanted + component.pool.free_pages))
            else:
                component.give_up(node)
                self._prune(node)
        return component.pool.free_pages - (wanted - pages)

    def reset(self) -> None:
        """Forget everything. Raises ``PageError`` while a lock is held or a copy is under way."""
        if self.receipts or self.pinned:
            raise PageError(f"{self.receipts} locks are held, {self.pinned} copies under way")
        for component in self.components:
            for node in component.unlocked:
                component.pool.free(component.held(node))
            component.unlocked.clear()
        self._roots.clear()
        self._events.cleared()

    def _shorten(self, leaf: Node, keep: int) -> None:
        if keep == 0:
            self._prune(self._drop(leaf))
            return
        for component in reversed(self.components):
            if leaf.held[component.index] is not None:
                component.shorten(leaf, keep)
        leaf.tokens = leaf.tokens[: keep * self._page]
        del leaf.hashes[keep:]
        self._prune(leaf)

    def _drop(self, leaf: Node) -> Node:
        parent = leaf.parent
        assert parent is not None
        for component in reversed(self.components):
            if leaf.held[component.index] is not None:
                component.give_up(leaf)
        del parent.children[leaf.tokens[: self._page]]
        if parent.is_root and not parent.children:
            del self._roots[parent.namespace]
        return parent

    def _prune(self, node: Node) -> None:
        """Drop a leaf that nobody reads and in which nobody could resume, then its parent if that is one now."""
        while not (node.is_root or node.children or node.locks[FULL] or node.pins[FULL]):
            if all(component.serves(node) for component in self.components):
                return
            node = self._drop(node)

    # --- walk ---------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children and each chain in one go; roots are left out."""
        for root in self._roots.values():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                yield node
                stack.extend(node.children.values())

    def snapshot_events(self) -> tuple[Event, ...]:
        """Store events that rebuild the present state from nothing."""
        recorder = EventRecorder(self.layout)
        for node in self.nodes():
            for group, held in enumerate(node.held):
                if held is not None:
                    recorder.stored(group, node)
        return recorder.take()

    def _walk(self, node: Node, tokens: tuple[int, ...]) -> Iterator[tuple[Node, int]]:
        """Down the tree along ``tokens``: each node and how many of its pages agree, all but at the last one."""
        page, at = self._page, 0
        while (child := node.children.get(tokens[at : at + page])) is not None:
            end = at + len(child.tokens)
            pages = shared_pages(child.tokens, tokens[at:end], page_tokens=page)
            whole = pages == child.pages
            yield child, pages
            if not whole:
                return
            node, at = child, end

    def _cut(self, root: Node, tokens: tuple[int, ...]) -> None:
        """Make the tree have a node that ends where ``tokens`` leave it."""
        for node, pages in self._walk(root, tokens):
            if pages < node.pages:
                self._split(node, pages)

    def _cut_end(self, node: Node, pages: int) -> None:
        """Make the last ``pages`` pages of a node a node of their own, which it stays."""
        self._split(node, node.pages - pages)

    def _split(self, node: Node, pages: int) -> Node:
        """Cut the first ``pages`` pages off ``node``, which stays the lower half; returns the new upper half."""
        cut, parent = pages * self._page, node.parent
        assert parent is not None
        upper = self._new_node(parent, node.tokens[:cut], node.hashes[:pages])
        parent.children[upper.tokens[: self._page]] = upper
        node.parent = upper
        node.tokens = node.tokens[cut:]
        del node.hashes[:pages]
        upper.children[node.tokens[: self._page]] = node
        for component in self.components:
            component.split(upper, node, pages)
        return upper

    def _new_node(self, parent: Node, tokens: tuple[int, ...], hashes: list[int]) -> Node:
        groups = len(self.components)
        return Node(
            parent.namespace, parent, tokens, hashes, held=[None] * groups, locks=[0] * groups, pins=[0] * groups
        )

    def _new_root(self, namespace: str) -> Node:
        groups = len(self.components)
        return Node(
            *(namespace, None, (), [namespace_seed(namespace)]),
            held=[None] * groups,
            locks=[0] * groups,
            pins=[0] * groups,
        )
