"""The prefix cache: a radix tree over pages, with a full-attention and a sliding-window component.

Each namespace has a root. An edge is a run of whole pages; it is split on page boundaries only. A node always
holds its full pages and may hold its window pages (else it is a tombstone there). What is *stored* is not
what can be *used*::

    pages     0   1   2 | 3   4 | 5   6   7     three nodes, all of them full; a window of two pages
    full      F   F   F | F   F | F   F   F
    window    W   W   W | .   . | W   W   W     the second node is a tombstone
    usable  0   1   2   3               7   8   a boundary needs the two window pages before it,
                                                or, nearer to the root, all there are

A prompt that agrees on pages 0-5 can reuse three pages, while the full component alone reaches six: its *fork
point*. Who runs that prompt stores the window's tail there, and the next one with the same head reuses six.

**Ownership.** A page belongs to the free list, to the tree or to one request. ``insert`` moves pages from a
request to the tree. A request reads pages of the tree under a lock; the tree gives up unlocked pages only.

**Order of eviction**, least recently used first, where use is an insert or the release of a lock:

- full: page by page from the end of the oldest leaf; its window pages go with it. Every use counts for the
  whole path, so a parent is never older than its child and the oldest unlocked node is always a leaf.
- window: the run of the oldest node, wherever it stands; the node stays as a tombstone. A use counts for the
  last window before the boundary only, nearest to the root first: older window pages are of no use to whoever
  continues there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.node import Node, Recency
from engine_shim.cache.pool import PageError, PagePool
from engine_shim.types import NULL_PAGE, CacheLayout
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import Event

FULL, WINDOW = 0, 1


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt can reuse. Valid until the tree changes: lock it at once or drop it.

    ``tables`` are ready to be a request's page tables: ``pages`` entries for each group, in the window group
    NULL_PAGE before the last window. ``full_pages >= pages`` is how far the full component alone goes.
    """

    node: Node
    pages: int
    full_pages: int
    tables: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A lock: the full pages from the root to ``node`` (``pages`` of them) and the last ``window_pages``
    window pages.

    Splits keep the end of a node in place, so the receipt stays true whatever happens above it.
    """

    node: Node
    pages: int
    window_pages: int


class RadixCache:
    """The tree and the pools. Every call is O(pages it touches)."""

    def __init__(self, layout: CacheLayout, events: EventRecorder) -> None:
        self.layout = layout
        self.pools = tuple(PagePool(pages) for pages in layout.pages)
        self.evicted_pages = [0 for _ in layout.groups]
        self.receipts = 0
        self.full_unlocked = Recency()
        self.window_unlocked = Recency()
        self._events = events
        self._page = layout.page_tokens
        self._has_window = layout.window is not None
        self._window_pages = layout.window_pages()
        self._roots: dict[str, Node] = {}

    # --- look up ------------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: Sequence[int]) -> Match:
        """The longest usable prefix of ``tokens`` in whole pages.

        Splits a node where it ends, moves nothing in the order of use.
        """
        root = self._roots.get(namespace) or _new_root(namespace)
        best, best_pages, usable = root, 0, 0
        depth = run = 0
        full: list[int] = []
        window: list[int] = []
        for node, pages in self._walk(root, tuple(tokens)):
            depth += pages
            full += node.full[:pages]
            if node.window is None:
                run = 0
                window += [NULL_PAGE] * pages
            else:
                run += pages
                window += node.window[:pages]
            # Along a resident run both sides grow alike, so if its end is not usable, nothing inside it is.
            if run >= min(self._window_pages, depth):
                best, best_pages, usable = node, pages, depth
        if best_pages < len(best.full):
            best = self._split(best, best_pages)
        passed = max(0, usable - self._window_pages)
        window[:passed] = [NULL_PAGE] * passed
        tables = (full[:usable], window[:usable]) if self._has_window else (full[:usable],)
        return Match(node=best, pages=usable, full_pages=depth, tables=tables)

    # --- locks --------------------------------------------------------------------------------------

    def lock(self, match: Match) -> Receipt:
        """Keep a match's pages from eviction until the receipt is released."""
        for node in match.node.path():
            if node.full_locks == 0:
                self.full_unlocked.remove(node, len(node.full))
            node.full_locks += 1
        window_pages = min(self._window_pages, match.pages)
        for node in self._segment(match.node, window_pages):
            if node.window_locks == 0:
                self.window_unlocked.remove(node, len(node.full))
            node.window_locks += 1
        self.receipts += 1
        return Receipt(node=match.node, pages=match.pages, window_pages=window_pages)

    def trim_window(self, receipt: Receipt, keep_pages: int) -> Receipt:
        """Unlock all window pages of a lock but the last ``keep_pages``; the new receipt replaces the old one."""
        keep_pages = min(keep_pages, receipt.window_pages)
        kept = list(self._segment(receipt.node, keep_pages))
        locked = list(self._segment(receipt.node, receipt.window_pages))
        for node in reversed(locked[len(kept) :]):
            node.window_locks -= 1
            if node.window_locks == 0:
                self.window_unlocked.add(node, len(node.full))
        return replace(receipt, window_pages=keep_pages)

    def release(self, receipt: Receipt) -> None:
        """Undo a lock exactly; what nobody else has locked becomes the most recently used.

        Raises ``PageError`` where a second release shows.
        """
        if receipt.node.full_locks == 0 and not receipt.node.is_root:
            raise PageError("a receipt was released twice")
        self.trim_window(receipt, 0)
        for node in receipt.node.path():
            node.full_locks -= 1
            if node.full_locks == 0:
                self.full_unlocked.add(node, len(node.full))
        self.receipts -= 1

    # --- grow ---------------------------------------------------------------------------------------

    def insert(self, namespace: str, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        """Give computed pages to the tree: whole pages of ``tokens``, one entry a page in each group's table.

        The window table may begin with NULL_PAGE; what follows is taken, also over tombstones of nodes that
        exist. The tree takes the pages it does not have. Pages that it holds already, *as other pages*, stay
        the caller's: they are returned, for each group, to be freed. Entries that are the tree's own pages
        are left alone.
        """
        page = self._page
        total = len(tokens) // page
        tokens = tuple(tokens[: total * page])
        duplicates: tuple[list[int], ...] = tuple([] for _ in tables)
        if total == 0:
            return duplicates
        root = self._roots.setdefault(namespace, _new_root(namespace))
        held_from = tables[WINDOW][:total].count(NULL_PAGE) if self._has_window else 0
        assert not self._has_window or NULL_PAGE not in tables[WINDOW][held_from:total]
        self._cut(root, tokens[: held_from * page])
        self._cut(root, tokens)
        node, at = root, 0
        touched: list[Node] = []
        for node, pages in self._walk(root, tokens):
            span = slice(at, at + pages)
            duplicates[FULL].extend(_others(tables[FULL][span], node.full))
            if self._has_window and at >= held_from:
                if node.window is None:
                    self._heal(node, tables[WINDOW][span])
                else:
                    duplicates[WINDOW].extend(_others(tables[WINDOW][span], node.window))
                touched.append(node)
            at += pages
        for stop in (held_from, total):  # what is new: first a tombstone, then the run with window pages
            if at < stop:
                span = slice(at, stop)
                node = self._append(node, tokens[at * page : stop * page], tables[FULL][span])
                if self._has_window and at >= held_from:
                    self._heal(node, tables[WINDOW][span])
                    touched.append(node)
                at = stop
        for above in node.path():
            if above.full_locks == 0:
                self.full_unlocked.refresh(above)
        for below in touched:
            if below.window_locks == 0:
                self.window_unlocked.refresh(below)
        return duplicates

    def _append(self, parent: Node, tokens: tuple[int, ...], full: Sequence[int]) -> Node:
        hashes = block_keys(tokens, block_tokens=self._page, parent=parent.hashes[-1])
        node = Node(parent.namespace, parent, tokens, hashes, full=list(full), window=None)
        parent.children[tokens[: self._page]] = node
        self.full_unlocked.add(node, len(node.full))
        self._events.stored(FULL, node)
        return node

    def _heal(self, node: Node, window: Sequence[int]) -> None:
        node.window = list(window)
        self.window_unlocked.add(node, len(node.window))
        self._events.stored(WINDOW, node)

    # --- shrink -------------------------------------------------------------------------------------

    def evict_full(self, pages: int) -> int:
        """Free up to ``pages`` full pages (and the window pages beside them); returns how many full pages it were."""
        freed = 0
        while freed < pages and (leaf := self.full_unlocked.oldest) is not None:
            count = min(pages - freed, len(leaf.full))
            self._shorten(leaf, count)
            freed += count
        return freed

    def evict_window(self, pages: int) -> int:
        """Free at least ``pages`` window pages if so many are unlocked, by whole nodes; returns how many it were."""
        freed = 0
        while freed < pages and (node := self.window_unlocked.oldest) is not None:
            freed += self._bury(node)
        return freed

    def reset(self) -> None:
        """Forget everything. Raises ``PageError`` while a lock is held."""
        if self.receipts:
            raise PageError(f"{self.receipts} locks are held")
        for node in self.nodes():
            self.pools[FULL].free(node.full)
            if node.window is not None:
                self.pools[WINDOW].free(node.window)
        self._roots.clear()
        self.full_unlocked = Recency()
        self.window_unlocked = Recency()
        self._events.cleared()

    def _shorten(self, leaf: Node, count: int) -> None:
        keep = len(leaf.full) - count
        gone = leaf.hashes[: keep - 1 if keep else None : -1]  # deepest first
        if leaf.window is not None:
            if keep == 0:
                self._bury(leaf)
            else:
                self._give_back(WINDOW, leaf.window[keep:], gone)
                self.window_unlocked.pages -= count
                del leaf.window[keep:]
        self._give_back(FULL, leaf.full[keep:], gone)
        self.full_unlocked.pages -= count
        if keep:
            leaf.tokens = leaf.tokens[: keep * self._page]
            del leaf.hashes[keep:], leaf.full[keep:]
        else:
            self._unhook(leaf)

    def _unhook(self, leaf: Node) -> None:
        self.full_unlocked.remove(leaf, 0)
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[: self._page]]
        if parent.is_root and not parent.children:
            del self._roots[parent.namespace]

    def _bury(self, node: Node) -> int:
        """Make a node a tombstone."""
        assert node.window is not None
        pages = len(node.window)
        self.window_unlocked.remove(node, pages)
        self._give_back(WINDOW, node.window, node.hashes[::-1])
        node.window = None
        return pages

    def _give_back(self, group: int, pages: Sequence[int], hashes: Sequence[int]) -> None:
        self.pools[group].free(pages)
        self.evicted_pages[group] += len(pages)
        self._events.removed(group, hashes)

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
            recorder.stored(FULL, node)
            if node.window is not None:
                recorder.stored(WINDOW, node)
        return recorder.take()

    def _walk(self, node: Node, tokens: tuple[int, ...]) -> Iterator[tuple[Node, int]]:
        """Down the tree along ``tokens``: each node and how many of its pages agree, all but at the last one."""
        page, at = self._page, 0
        while (child := node.children.get(tokens[at : at + page])) is not None:
            end = at + len(child.tokens)
            pages = shared_pages(child.tokens, tokens[at:end], page_tokens=page)
            whole = pages == len(child.full)
            yield child, pages
            if not whole:
                return
            node, at = child, end

    def _cut(self, root: Node, tokens: tuple[int, ...]) -> None:
        """Make the tree have a node that ends where ``tokens`` leave it."""
        for node, pages in self._walk(root, tokens):
            if pages < len(node.full):
                self._split(node, pages)

    def _segment(self, node: Node, pages: int) -> Iterator[Node]:
        """The nodes that hold the last ``pages`` pages up to the end of ``node``, deepest first; cut to fit."""
        while pages > 0:
            if pages < len(node.full):
                self._split(node, len(node.full) - pages)
            yield node
            pages -= len(node.full)
            assert node.parent is not None
            node = node.parent

    def _split(self, node: Node, pages: int) -> Node:
        """Cut the first ``pages`` pages off ``node``, which stays the lower half; returns the new upper half."""
        cut, parent = pages * self._page, node.parent
        assert parent is not None
        upper = Node(
            namespace=node.namespace,
            parent=parent,
            tokens=node.tokens[:cut],
            hashes=node.hashes[:pages],
            full=node.full[:pages],
            window=None if node.window is None else node.window[:pages],
            full_locks=node.full_locks,
            window_locks=node.window_locks,
        )
        parent.children[upper.tokens[: self._page]] = upper
        node.parent = upper
        node.tokens = node.tokens[cut:]
        del node.hashes[:pages], node.full[:pages]
        if node.window is not None:
            del node.window[:pages]
        upper.children[node.tokens[: self._page]] = node
        if node in self.full_unlocked:
            self.full_unlocked.split(upper, node, upper_first=False)
        if node in self.window_unlocked:
            self.window_unlocked.split(upper, node, upper_first=True)
        return upper


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


def _new_root(namespace: str) -> Node:
    return Node(namespace, None, (), [namespace_seed(namespace)], full=[], window=None)


def _others(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """Pages of ours that are not the tree's own."""
    return [our for our, their in zip(ours, theirs, strict=True) if our != their]
