"""What one cache group contributes to the tree: where it is present, where it lets a prompt resume, what a lock covers.

The tree knows runs of pages and how they branch; a *component* knows one group's pages in them. Five kinds::

    component   is present      a prompt may resume where       a lock covers       gives up first
    full        in every run    (always)                        the whole path      the end of the oldest leaf
    window      run by run      the window before is present,   the window before   the oldest run, at the
                                or all there is, if shorter                         root's end of a window
    ring        never           (always)                        nothing             has nothing
    state       at a run's end  a state stands exactly there    that one state      the oldest state
    draft       where full is   (always)                        the whole path      with full, never by itself

The tree asks nothing else of any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.node import Node, Recency
from engine_shim.cache.pool import PagePool
from engine_shim.types import NULL_PAGE, CacheGroup, CacheLayout, GroupKind, WindowTails

#: Told each node of a walk from the root and how many of its pages agree: may a prompt resume behind them?
Validator = Callable[[Node, int], bool]
#: Cuts a node so that its last pages, as many as given, are a node of their own, which it stays.
Cut = Callable[[Node, int], None]
Path = Sequence[tuple[Node, int]]


class Component:
    """Presence, locks and order of eviction of one group. This class is the full-attention component."""

    #: When a listed node is cut, whether its upper half goes before the lower one.
    upper_first: ClassVar[bool] = False
    #: Every node has it, all pages of it.
    is_whole: ClassVar[bool] = True
    #: What is missing of it can be computed from what others have.
    is_rebuilt = False

    def __init__(self, group: CacheGroup, pages: int, events: EventRecorder) -> None:
        self.index = group.index
        self.pool = PagePool(pages)
        self.unlocked = Recency()
        self.evicted_pages = 0
        self._events = events

    # --- where a prompt may resume --------------------------------------------------------------------

    def validator(self) -> Validator:
        """A fresh judge of boundaries, for one walk."""
        return lambda node, pages: True

    def serves(self, node: Node) -> bool:
        """Whether some boundary in this run can be resumed at, as far as this group goes."""
        return True

    def table(self, path: Path, pages: int) -> list[int]:
        """A request's table for the prefix of ``pages`` pages that ``path`` makes up."""
        return [page for node, count in path for page in self.held(node)[:count]]

    # --- presence -------------------------------------------------------------------------------------

    def held(self, node: Node) -> list[int]:
        """The group's pages of a node that has some."""
        pages = node.held[self.index]
        assert pages is not None, "a tombstone has no pages"
        return pages

    def hold(self, node: Node, pages: Sequence[int]) -> None:
        """The tree takes these pages, for a node that has none of this group."""
        node.held[self.index] = list(pages)
        node.is_saved = False
        self.unlocked.add(node, len(pages))
        self._events.stored(self.index, node)

    def give_up(self, node: Node) -> None:
        """Free what the node has; it is a tombstone then."""
        pages = self.held(node)
        self.unlocked.remove(node, len(pages))
        self._free(pages, self._names(node))
        node.held[self.index] = None

    def victim(self) -> Node | None:
        """Whose pages go next. A pin covers what a lock would, so in the full group this is a leaf as well."""
        return next((node for node in self.unlocked if not node.pins[self.index]), None)

    def shorten(self, node: Node, keep: int) -> None:
        """Free what lies behind the first ``keep`` pages of a leaf; the tree cuts the leaf itself afterwards."""
        pages = self.held(node)
        self._free(pages[keep:], node.hashes[: keep - 1 : -1])
        self.unlocked.pages -= len(pages) - keep
        del pages[keep:]

    def split(self, upper: Node, lower: Node, pages: int) -> None:
        """Share out what ``lower`` has: its first pages go to ``upper``, and its readers read both."""
        held = lower.held[self.index]
        if held is not None:
            upper.held[self.index], lower.held[self.index] = held[:pages], held[pages:]
        upper.locks[self.index] = lower.locks[self.index]
        upper.pins[self.index] = lower.pins[self.index]
        if lower in self.unlocked:
            self.unlocked.split(upper, lower, upper_first=self.upper_first)

    # --- locks ----------------------------------------------------------------------------------------

    def extent(self, pages: int) -> int:
        """How many pages, or states, before a boundary whoever resumes there has to keep."""
        return pages

    def copied_extent(self, pages: int) -> int:
        """How many of those are copied below the device: all that cannot be rebuilt."""
        return 0 if self.is_rebuilt else self.extent(pages)

    def covered(self, node: Node, extent: int, cut: Cut) -> list[Node]:
        """The nodes with the last ``extent`` pages up to the end of ``node``, the first to be evicted first."""
        return list(node.path())

    def lock(self, node: Node) -> None:
        """Keep the node's pages from eviction."""
        if node.locks[self.index] == 0:
            self.unlocked.remove(node, self._worth(node))
        node.locks[self.index] += 1

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``; with the last one the node becomes the most recently used."""
        node.locks[self.index] -= 1
        if node.locks[self.index] == 0:
            self.unlocked.add(node, self._worth(node))

    def pin(self, node: Node) -> None:
        """Keep the node's pages while they are copied, at their place in the order of eviction."""
        if node in self.unlocked:
            self.unlocked.pages -= self._worth(node)
        node.pins[self.index] += 1

    def unpin(self, node: Node) -> None:
        """Undo one ``pin``."""
        node.pins[self.index] -= 1
        if node in self.unlocked:
            self.unlocked.pages += self._worth(node)

    def _worth(self, node: Node) -> int:
        """What the node would give up if nobody had locked it."""
        return 0 if node.pins[self.index] else len(self.held(node))

    def touch(self, node: Node) -> None:
        """A use: the most recent, unless locked or not present."""
        if node in self.unlocked:
            self.unlocked.refresh(node)

    def _names(self, node: Node) -> list[int]:
        """Hashes of what the node has, in the order of eviction."""
        return node.hashes[::-1]

    def _free(self, pages: Sequence[int], hashes: Sequence[int]) -> None:
        self.pool.free(pages)
        self.evicted_pages += len(pages)
        self._events.removed(self.index, hashes)

    def tail(self, node: Node, extent: int) -> list[int]:
        """The last ``extent`` pages, or the state, that it has up to the end of a node; none if some is missing."""
        tail: list[int] = []
        for above in node.path():
            if len(tail) >= extent:
                break
            pages = above.held[self.index]
            if pages is None:
                return []
            tail[:0] = pages
        return tail[len(tail) - extent :]

    def to_copy(self, node: Node, pages: int) -> list[int]:
        """What is copied below the device of the path to a node's end, which is ``pages`` long; its last pages."""
        return self.tail(node, self.copied_extent(pages))


class WindowComponent(Component):
    """Sliding-window layers: only the last window before a boundary matters to whoever resumes there."""

    upper_first = True
    is_whole = False

    def __init__(self, layout: CacheLayout, group: CacheGroup, events: EventRecorder) -> None:
        super().__init__(group, layout.pages[group.index], events)
        self._reach = layout.window_pages()
        self.is_rebuilt = layout.window_tails is WindowTails.REBUILT

    def validator(self) -> Validator:
        depth = run = 0

        def valid(node: Node, pages: int) -> bool:
            nonlocal depth, run
            depth += pages
            run = 0 if node.held[self.index] is None else run + pages
            # Along a resident run both sides grow alike, so if its end is not usable, nothing inside it is.
            return run >= min(self._reach, depth)

        return valid

    def serves(self, node: Node) -> bool:
        return self.is_rebuilt or self._reach == 0 or node.held[self.index] is not None

    def table(self, path: Path, pages: int) -> list[int]:
        """NULL_PAGE up to the last window."""
        reach = self.extent(pages)
        tail: list[int] = []
        for node, count in reversed(path):
            if len(tail) >= reach:
                break
            tail[:0] = self.held(node)[:count]
        return [NULL_PAGE] * (pages - reach) + tail[len(tail) - reach :]

    def extent(self, pages: int) -> int:
        return min(self._reach, pages)

    def covered(self, node: Node, extent: int, cut: Cut) -> list[Node]:
        """Cuts the node in which the window begins, so that no more than the window is locked."""
        nodes = []
        while extent > 0:
            if extent < node.pages:
                cut(node, extent)
            nodes.append(node)
            extent -= node.pages
            assert node.parent is not None
            node = node.parent
        return nodes[::-1]

    def to_copy(self, node: Node, pages: int) -> list[int]:
        """One page more than the window, where the tree has it: then a prompt may resume a page earlier, too.

        So does whoever sends a prompt again that ends on this page boundary, as its last token is always computed.
        """
        extent = self.copied_extent(pages)
        longer = self.tail(node, extent + 1) if 0 < extent < pages else []
        return longer or self.tail(node, extent)


class RingComponent(Component):
    """Sliding-window layers whose pages are in rings: the tree has none of them, and any boundary can be rebuilt."""

    is_whole = False
    is_rebuilt = True

    def table(self, path: Path, pages: int) -> list[int]:
        return [NULL_PAGE] * pages

    def extent(self, pages: int) -> int:
        return 0

    def covered(self, node: Node, extent: int, cut: Cut) -> list[Node]:
        return []


class StateComponent(Component):
    """Recurrent layers: a state sums up all that came before it and serves at its own position, nowhere else."""

    is_whole = False

    def validator(self) -> Validator:
        return lambda node, pages: pages == node.pages and node.held[self.index] is not None

    def serves(self, node: Node) -> bool:
        return node.held[self.index] is not None

    def table(self, path: Path, pages: int) -> list[int]:
        """The slot to read and the slot to write, the latter yet to be found."""
        return [self.held(path[-1][0])[0] if path else NULL_PAGE, NULL_PAGE]

    def shorten(self, node: Node, keep: int) -> None:
        """The end is cut off, and the state stood there."""
        if node.held[self.index] is not None:
            self.give_up(node)

    def split(self, upper: Node, lower: Node, pages: int) -> None:
        """The state stays at the end it belongs to."""

    def extent(self, pages: int) -> int:
        return min(1, pages)

    def covered(self, node: Node, extent: int, cut: Cut) -> list[Node]:
        return [node] if extent else []

    def _names(self, node: Node) -> list[int]:
        return node.hashes[-1:]


class DraftComponent(Component):
    """Keys and values of a draft head: they come and go with those of the full layers, page by page.

    Its pool has as many pages as the full one, and its pages change hands together with the full ones, so it never is
    what is short. No event tells of it: what it holds decides how fast an answer comes, not what can be reused.
    """

    def __init__(self, layout: CacheLayout, group: CacheGroup, events: EventRecorder) -> None:
        if layout.pages[group.index] != layout.pages[0]:
            raise ValueError("a draft group has as many pages as the full one")
        super().__init__(group, layout.pages[group.index], events)


def components_of(layout: CacheLayout, events: EventRecorder) -> tuple[Component, ...]:
    """One component for each group, the full one first."""
    components: list[Component] = []
    for group, pages in zip(layout.groups, layout.pages, strict=True):
        match group.kind:
            case GroupKind.FULL:
                components.append(Component(group, pages, events))
            case GroupKind.WINDOW if layout.window_tails is WindowTails.RING:
                components.append(RingComponent(group, pages, events))
            case GroupKind.WINDOW:
                components.append(WindowComponent(layout, group, events))
            case GroupKind.STATE:
                components.append(StateComponent(group, pages, events))
            case GroupKind.DRAFT:
                components.append(DraftComponent(layout, group, events))
    return tuple(components)
