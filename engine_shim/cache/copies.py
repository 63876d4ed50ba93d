"""Which pages have copies below the device: in host memory, on disk. Knows slots and names, moves no bytes.

Pages are found by their tokens, page by page from the start of a namespace, so a copy can never be taken for that of
another prefix. A page may have a copy in any place and group::

    page          0    1    2    3    4    5
    host, full    h    h    h    h    .    .      page 4 of the host gave way to others, and nothing behind it is
    disk, full    d    d    d    d    d    .      of use there; the disk has one more
    host, window  .    .    h    h    .    .      one window before a boundary, here of two pages
    host, state   .    .    .    h    .    .      the state at the end of page 3

A copy is *ready* once its transfer has landed; before that it has a slot and nobody may read it. **Order of eviction**:
least recently used first in each place and group. A use counts for the whole path, from its end to its
start, so the end of a path goes first. What a transfer reads or writes is pinned and stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.labels import KeptPage, Label, chain_digest, root_digest
from engine_shim.cache.pool import PagePool
from engine_shim.cache.transfers import Place
from router.wire.block_keys import block_keys, namespace_seed


@dataclass(slots=True, eq=False, repr=False)
class Page:
    """One page of a chain: ``tokens`` behind ``parent``, of which ``hash`` is the block key. A root has no tokens.

    ``digest`` names the chain up to here for other processes.
    ``is_in_use``: it is about to get copies and must not be forgotten for having none.
    """

    namespace: str
    parent: Page | None
    tokens: tuple[int, ...]
    hash: int
    digest: bytes
    children: dict[tuple[int, ...], Page] = field(default_factory=dict)
    copies: dict[tuple[Place, int], Copy] = field(default_factory=dict)
    is_in_use: bool = False

    @property
    def parent_hash(self) -> int | None:
        """The hash before this page as events name it: None at the start of a chain."""
        return None if self.parent is None or self.parent.parent is None else self.parent.hash

    @property
    def label(self) -> Label:
        """By which another process finds this page."""
        assert self.parent is not None, "a root is no page"
        return Label(self.namespace, self.parent.digest, self.tokens)

    def ready(self, place: Place, group: int) -> Copy | None:
        """The copy in a place that can be read, if there is one."""
        copy = self.copies.get((place, group))
        return copy if copy is not None and copy.is_ready and not copy.is_damaged else None


@dataclass(slots=True, eq=False, repr=False)
class Copy:
    """A page's slot in one place and group.

    ``pins`` counts the transfers that read or write it, ``bringer`` is the one that writes it.
    """

    page: Page
    place: Place
    group: int
    slot: int
    pins: int = 0
    bringer: int = 0
    is_ready: bool = False
    is_damaged: bool = False


class Shelf:
    """The slots of one place, a pool for each group, and who goes first. Slot 0 is never used."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.pools = [PagePool(count) for count in slots]
        self.order: list[OrderedDict[Copy, None]] = [OrderedDict() for _ in slots]
        self.evicted_pages = [0 for _ in slots]


class Copies:
    """All copies of one rank. ``slots[place][group]`` counts the null slot."""

    def __init__(self, slots: dict[Place, tuple[int, ...]], *, page_tokens: int, events: EventRecorder) -> None:
        self.shelves = {place: Shelf(counts) for place, counts in slots.items()}
        self._size = page_tokens
        self._events = events
        self._roots: dict[str, Page] = {}

    # --- pages by their tokens ----------------------------------------------------------------------

    def walk(self, namespace: str, tokens: tuple[int, ...]) -> list[Page]:
        """The pages of a prompt that are known, from its start on. Known does not mean that a copy exists."""
        size, found = self._size, []
        page = self._roots.get(namespace)
        for at in range(0, len(tokens) - size + 1, size):
            page = page.children.get(tokens[at : at + size]) if page else None
            if page is None:
                break
            found.append(page)
        return found

    def grow(self, namespace: str, tokens: tuple[int, ...], hashes: Sequence[int]) -> list[Page]:
        """All whole pages of ``tokens``, whose keys are ``hashes``; those not known yet are made."""
        pages = self.walk(namespace, tokens)
        page = pages[-1] if pages else self._root(namespace)
        for index in range(len(pages), len(hashes)):
            run = tokens[index * self._size : (index + 1) * self._size]
            page = self._child(page, run, hashes[index])
            pages.append(page)
        return pages

    def adopt(self, kept: Sequence[KeptPage]) -> None:
        """Take over what the disk has from earlier processes, parents before children; tells it like any copy.

        What was written last goes last, and the end of a path before its start.
        """
        pages: dict[KeptPage, Page] = {}
        latest: dict[KeptPage, tuple[float, int]] = {}
        for each in kept:
            parent = self._root(each.label.namespace) if each.parent is None else pages[each.parent]
            (key,) = block_keys(each.label.tokens, block_tokens=self._size, parent=parent.hash)
            pages[each] = self._child(parent, each.label.tokens, key)
            latest[each] = (each.written_seconds, 0)
        for each in reversed(kept):
            if each.parent is not None:
                seconds, height = latest[each]
                known, above = latest[each.parent]
                latest[each.parent] = (max(seconds, known), max(height + 1, above))
        shelf = self.shelves[Place.DISK]
        for group, pool in enumerate(shelf.pools):
            pool.claim([each.slots[group] for each in kept if group in each.slots])
        for each in sorted(kept, key=latest.__getitem__):
            for group, slot in each.slots.items():
                copy = Copy(pages[each], Place.DISK, group, slot, is_ready=True)
                pages[each].copies[Place.DISK, group] = copy
                shelf.order[group][copy] = None
        for each, page in pages.items():
            for group in each.slots:
                self._events.copied(Place.DISK, group, page)

    def _root(self, namespace: str) -> Page:
        root = self._roots.get(namespace)
        if root is None:
            seed, digest = namespace_seed(namespace), root_digest(namespace)
            root = self._roots[namespace] = Page(namespace, None, (), seed, digest)
        return root

    def _child(self, parent: Page, tokens: tuple[int, ...], key: int) -> Page:
        page = Page(parent.namespace, parent, tokens, key, chain_digest(parent.digest, tokens))
        parent.children[tokens] = page
        return page

    def prune(self, page: Page) -> None:
        """Forget a page without copies that leads to none, then its parent if that is one now."""
        while not (page.copies or page.children or page.is_in_use):
            if page.parent is None:
                self._roots.pop(page.namespace, None)
                return
            page.parent.children.pop(page.tokens, None)
            page = page.parent

    # --- copies ---------------------------------------------------------------------------------------

    def reserve(self, page: Page, place: Place, group: int) -> Copy | None:
        """A slot for a page that has none there, pinned once; None if all that could give way is pinned."""
        shelf = self.shelves[place]
        pool, order = shelf.pools[group], shelf.order[group]
        if pool.free_pages == 0:
            victim = next((copy for copy in order if not copy.pins), None)
            if victim is None:
                return None
            self._drop(victim)
            shelf.evicted_pages[group] += 1
        copy = Copy(page, place, group, pool.allocate(1)[0], pins=1)
        page.copies[place, group] = copy
        order[copy] = None
        return copy

    def arrived(self, copy: Copy, *, whole: bool) -> None:
        """The transfer into a reserved slot has landed: the copy can be read from now on, or is gone."""
        copy.pins -= 1
        if not whole:
            self._drop(copy)
            return
        copy.is_ready = True
        self._events.copied(copy.place, copy.group, copy.page)

    def pin(self, copy: Copy) -> None:
        """Keep a copy while it is read."""
        copy.pins += 1

    def unpin(self, copy: Copy) -> None:
        """Undo one ``pin``; a damaged copy goes with the last one."""
        copy.pins -= 1
        if copy.is_damaged and not copy.pins:
            self._drop(copy)

    def damaged(self, copy: Copy) -> None:
        """What a pinned copy holds is not what was stored: nobody reads it again."""
        copy.is_damaged = True

    def touch(self, pages: Sequence[Page]) -> None:
        """A use of a path, given from its start."""
        for page in reversed(pages):
            for copy in page.copies.values():
                self.shelves[copy.place].order[copy.group].move_to_end(copy)

    def _drop(self, copy: Copy) -> None:
        shelf = self.shelves[copy.place]
        del shelf.order[copy.group][copy]
        del copy.page.copies[copy.place, copy.group]
        shelf.pools[copy.group].free((copy.slot,))
        if copy.is_ready:
            self._events.uncopied(copy.place, copy.group, copy.page)
        self.prune(copy.page)

    def clear(self) -> None:
        """Forget all copies, none of which may be pinned. Tells nothing: the cache that this belongs to does."""
        for shelf in self.shelves.values():
            for pool, order in zip(shelf.pools, shelf.order, strict=True):
                assert not any(copy.pins for copy in order), "a transfer is under way"
                pool.free([copy.slot for copy in order])
                order.clear()
        self._roots.clear()

    # --- for snapshots and checks -----------------------------------------------------------------------

    def pages(self) -> Iterator[Page]:
        """Every page, parents before children."""
        for root in self._roots.values():
            stack = list(root.children.values())
            while stack:
                page = stack.pop()
                yield page
                stack.extend(page.children.values())

    def record(self, events: EventRecorder) -> None:
        """Tell all copies that can be read."""
        for place in self.shelves:
            for page in self.pages():
                for copy in page.copies.values():
                    if copy.place is place and copy.is_ready:
                        events.copied(place, copy.group, page)

    def check(self, pinned: Iterable[Copy]) -> None:
        """Raise ``IntegrityError`` unless every slot has one owner and pins are those of ``pinned``."""
        pins: dict[Copy, int] = {}
        for copy in pinned:
            pins[copy] = pins.get(copy, 0) + 1
        known = [copy for page in self.pages() for copy in page.copies.values()]
        for place, shelf in self.shelves.items():
            for group, (pool, order) in enumerate(zip(shelf.pools, shelf.order, strict=True)):
                here = {copy for copy in known if copy.place is place and copy.group == group}
                slots = [copy.slot for copy in here]
                if here != order.keys():
                    raise IntegrityError(f"{place} group {group}: {len(here)} copies, {len(order)} in order of use")
                if sorted([*slots, *pool.free_set()]) != list(range(1, pool.total + 1)):
                    raise IntegrityError(f"{place} group {group}: a slot is free and used, or neither")
        for copy in known:
            if copy.pins != pins.get(copy, 0):
                raise IntegrityError(f"a copy in {copy.place} has {copy.pins} pins, {pins.get(copy, 0)} transfers")
            if not copy.is_ready and not copy.pins:
                raise IntegrityError(f"a copy in {copy.place} is not there, and nothing brings it")
        if not pins.keys() <= set(known):
            raise IntegrityError("a transfer uses a copy that is gone")
        if any(not page.copies and not page.children for page in self.pages()):
            raise IntegrityError("a page is known that has no copy and leads to none")
