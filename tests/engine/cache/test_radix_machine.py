"""The radix cache against a brute-force oracle that knows pages as (namespace, prefix) and nothing of trees.

One machine, driven twice: by hypothesis, which shrinks what it finds, and by long random walks, which get deeper.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from event_replay import Replay
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import check_integrity
from engine_shim.cache.pool import PageError
from engine_shim.cache.radix import RadixCache, Receipt
from engine_shim.types import NULL_PAGE, CacheGroup, CacheLayout, GroupKind
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared

POOL_PAGES = 40
NAMESPACES = ("", "", "", "tenant")
Index = st.integers(0, 5)
PathDraw = tuple[int, int, list[int]]
Name = tuple[str, tuple[int, ...]]  # a page: its namespace and all tokens up to its end

# A path is a list of kinds of page: the first ``cut`` steps of an earlier path, then some more.
Paths = st.tuples(st.integers(0, 3), st.integers(0, 9), st.lists(st.integers(0, 2), max_size=4))


def layout_of(page: int, window: int | None, *, state: bool) -> CacheLayout:
    """One full group, a window group if ``window`` (tokens) is given, and perhaps a state group."""
    full = CacheGroup(0, GroupKind.FULL, (1,))
    groups = [full]
    if window is not None:
        groups.append(CacheGroup(1, GroupKind.WINDOW, (0,), window))
    if state:
        groups.append(CacheGroup(len(groups), GroupKind.STATE, (2,)))
    return CacheLayout(page, tuple(groups), (POOL_PAGES,) * len(groups))


@dataclass
class Reader:
    """A lock with the tables it was given."""

    receipt: Receipt
    namespace: str
    tokens: tuple[int, ...]
    extents: list[int]
    tables: tuple[list[int], ...]


class RadixMachine(RuleBasedStateMachine):
    """Every rule does the same to the tree and to ``stamps``: {page: time of last use} for each group."""

    @initialize(
        page=st.integers(1, 4),
        kind=st.sampled_from(["none", "one", "short", "one and a half", "long"]),
        state=st.booleans(),
    )
    def start(self, page: int, kind: str, state: bool) -> None:
        windows = {"none": None, "one": 1, "short": page, "one and a half": page + -(-page // 2), "long": 3 * page}
        window = windows[kind]
        self.page = page
        self.layout = layout_of(page, window, state=state)
        self.window = self.layout.window.index if self.layout.window else None
        self.state = self.layout.state.index if self.layout.state else None
        self.groups = len(self.layout.groups)
        self.window_pages = 0 if window is None else -(-(window - 1) // page)
        self.recorder = EventRecorder(self.layout)
        self.cache = RadixCache(self.layout, self.recorder)
        self.replay = Replay(self.groups)
        self.stamps: list[dict[Name, int]] = [{} for _ in self.layout.groups]
        self.content: list[dict[int, Name]] = [{} for _ in self.layout.groups]
        self.readers: list[Reader] = []
        self.paths: list[list[int]] = []
        self.now = 0

    # --- the oracle ---------------------------------------------------------------------------------

    def path(self, base: int, cut: int, more: list[int]) -> list[int]:
        """Paths that share long heads with recent ones, so that nodes are met, split and forked."""
        head = self.paths[base][:cut] if base < len(self.paths) else []
        path = [*head, *more][:9]
        self.paths.insert(0, path)
        return path

    def tokens(self, path: list[int]) -> tuple[int, ...]:
        """Pages that differ in the last token, in the first one, or not at all."""
        kinds = ((7,) * self.page, (*(7,) * (self.page - 1), 8), (9, *(7,) * (self.page - 1)))
        return tuple(token for step in path for token in kinds[step])

    def names(self, namespace: str, tokens: tuple[int, ...]) -> list[Name]:
        return [(namespace, tokens[:end]) for end in range(self.page, len(tokens) + 1, self.page)]

    def depth(self, name: Name) -> int:
        return len(name[1]) // self.page

    def hash(self, name: Name) -> int:
        return block_keys(name[1], block_tokens=self.page, parent=namespace_seed(name[0]))[-1]

    def locked(self, group: int) -> set[Name]:
        pages: set[Name] = set()
        for reader in self.readers:
            pages.update(self.read_by(reader, group))
        return pages

    def read_by(self, reader: Reader, group: int) -> list[Name]:
        names = self.names(reader.namespace, reader.tokens)
        return names[len(names) - reader.extents[group] :]

    def order(self, group: int) -> list[Name]:
        """Unlocked pages, the next one to go first: oldest use, then full from the leaf and window from the root."""
        free = self.stamps[group].keys() - self.locked(group)
        sign = -1 if group == 0 else 1
        return sorted(free, key=lambda name: (self.stamps[group][name], sign * self.depth(name)))

    def usable(self, names: list[Name]) -> tuple[int, int]:
        """(usable pages, pages of the full component) by trying every boundary."""
        full = 0
        while full < len(names) and names[full] in self.stamps[0]:
            full += 1
        for boundary in range(full, -1, -1):
            needed = names[max(0, boundary - self.window_pages) : boundary]
            windowed = not self.window or all(name in self.stamps[self.window] for name in needed)
            stated = not self.state or boundary == 0 or names[boundary - 1] in self.stamps[self.state]
            if windowed and stated:
                return boundary, full
        raise AssertionError("boundary 0 is always usable")

    # --- rules --------------------------------------------------------------------------------------

    @rule(namespace=st.sampled_from(NAMESPACES), path=Paths, tail=st.integers(0, 3))
    def match(self, namespace: str, path: PathDraw, tail: int) -> None:
        self._match(namespace, self.tokens(self.path(*path)) + (7,) * min(tail, self.page - 1))

    def _match(self, namespace: str, tokens: tuple[int, ...]):
        found = self.cache.match(namespace, tokens)
        names = self.names(namespace, tokens)
        assert (found.pages, found.full_pages) == self.usable(names)
        held_from = max(0, found.pages - self.window_pages)
        assert len(found.tables) == self.groups
        assert [self.content[0][page] for page in found.tables[0]] == names[: found.pages]
        if window := self.window:
            table = found.tables[window]
            assert table[:held_from] == [NULL_PAGE] * held_from
            assert [self.content[window][page] for page in table[held_from:]] == names[held_from : found.pages]
        if self.state:
            source, target = found.tables[self.state]
            assert target == NULL_PAGE
            assert (source != NULL_PAGE) == (found.pages > 0)
            assert source == NULL_PAGE or self.content[self.state][source] == names[found.pages - 1]
        return found

    @rule(namespace=st.sampled_from(NAMESPACES), path=Paths)
    def lock(self, namespace: str, path: PathDraw) -> None:
        tokens = self.tokens(self.path(*path))
        found = self._match(namespace, tokens)
        extents = [found.pages]
        if self.window:
            extents.append(min(self.window_pages, found.pages))
        if self.state:
            extents.append(min(1, found.pages))
        self.readers.append(
            Reader(self.cache.lock(found), namespace, tokens[: found.pages * self.page], extents, found.tables)
        )

    @precondition(lambda self: self.readers)
    @rule(index=Index)
    def release(self, index: int) -> None:
        reader = self.readers.pop(index % len(self.readers))
        self.cache.release(reader.receipt)
        for group in range(self.groups):
            self.use(group, self.read_by(reader, group))
        self.prune()

    @precondition(lambda self: self.readers)
    @rule(index=Index, keep=st.integers(0, 3), group=st.integers(1, 2))
    def trim(self, index: int, keep: int, group: int) -> None:
        reader = self.readers[index % len(self.readers)]
        if group >= self.groups:
            return
        before = self.read_by(reader, group)
        reader.receipt = self.cache.trim(reader.receipt, group, keep=keep)
        reader.extents[group] = min(keep, reader.extents[group])
        self.use(group, before[: len(before) - reader.extents[group]])

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        path=Paths,
        held=st.integers(0, 9),
        tail=st.integers(0, 3),
        state=st.booleans(),
    )
    def insert(self, namespace: str, path: PathDraw, held: int, tail: int, state: bool) -> None:
        """A stranger's pages, none of them the tree's."""
        tokens = self.tokens(self.path(*path))
        held_from = max(0, len(tokens) // self.page - held)
        tables = self.fresh(self.names(namespace, tokens), 0, held_from, state=state)
        if tables is not None:
            self._insert(namespace, tokens, tables, own_from=0, held_from=held_from, tail=tail)

    @precondition(lambda self: self.readers)
    @rule(
        index=Index,
        path=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        held=st.integers(0, 4),
        state=st.booleans(),
    )
    def continue_reader(self, index: int, path: list[int], held: int, state: bool) -> None:
        """A request stores what it computed behind the prefix it reads."""
        reader = self.readers[index % len(self.readers)]
        tokens = reader.tokens + self.tokens(path)
        pages = len(reader.tokens) // self.page
        held_from = max(pages, pages + len(path) - held)
        window = self.window
        if window and held >= len(path):  # it still holds the tail of the prefix, too
            held_from = pages - reader.extents[window]
        tables = self.fresh(self.names(reader.namespace, tokens), pages, max(held_from, pages), state=state)
        if tables is None:
            return
        tables[0][:pages] = reader.tables[0]
        if window:
            tables[window][held_from:pages] = reader.tables[window][held_from:]
        self._insert(reader.namespace, tokens, tables, own_from=pages, held_from=held_from, tail=0)

    def starts(self, names: list[Name], own_from: int, held_from: int, *, state: bool) -> list[int]:
        """For each group from which of the names on a request has pages of its own to give."""
        starts = [own_from]
        if self.window:
            starts.append(max(held_from, own_from))
        if self.state:
            starts.append(len(names) - (state and bool(names)))
        return starts

    def fresh(self, names: list[Name], own_from: int, held_from: int, *, state: bool) -> tuple[list[int], ...] | None:
        """Tables with newly allocated pages from ``own_from`` (window: ``held_from``) on, null before that."""
        starts = self.starts(names, own_from, held_from, state=state)
        if any(pool.free_pages < len(names) - at for pool, at in zip(self.cache.pools, starts, strict=True)):
            return None
        tables = []
        for group, at in enumerate(starts):
            pages = self.cache.pools[group].allocate(len(names) - at)
            self.content[group].update(zip(pages, names[at:], strict=True))
            tables.append((pages or [NULL_PAGE]) if group == self.state else [NULL_PAGE] * at + pages)
        return tuple(tables)

    def _insert(
        self,
        namespace: str,
        tokens: tuple[int, ...],
        tables: tuple[list[int], ...],
        *,
        own_from: int,
        held_from: int,
        tail: int,
    ) -> None:
        names = self.names(namespace, tokens)
        partial = (7,) * min(tail, self.page - 1)
        duplicates = self.cache.insert(namespace, tokens + partial, tables)
        state = bool(self.state) and tables[-1] != [NULL_PAGE]
        for group, at in enumerate(self.starts(names, own_from, held_from, state=state)):
            own = tables[group] if group == self.state else tables[group][at:]
            twins = [page for page, name in zip(own, names[at:], strict=False) if name in self.stamps[group]]
            assert duplicates[group] == twins
            self.cache.pools[group].free(twins)
        self.use(0, names)
        if self.window:
            self.use(self.window, names[held_from:])
        if state:
            self.use(self.state, names[-1:])
        self.prune()

    def use(self, group: int, names: list[Name]) -> None:
        self.now += 1
        self.stamps[group].update(dict.fromkeys(names, self.now))

    def prune(self) -> None:
        """What nobody reads and no usable boundary lies behind is gone, from every group."""
        keep = self.locked(0)
        for name in self.stamps[0]:
            windowed = not self.window or self.window_pages == 0 or name in self.stamps[self.window]
            if windowed and (not self.state or name in self.stamps[self.state]):
                keep.update(self.names(*name))
        for stamps in self.stamps:
            for name in stamps.keys() - keep:
                del stamps[name]

    @rule(pages=st.integers(1, 12), group=st.integers(0, 2))
    def evict(self, pages: int, group: int) -> None:
        """In order, and no more than was asked but for runs that go as a whole and leaves that serve nobody."""
        if group >= self.groups:
            return
        before, order = len(self.stamps[group]), self.order(group)
        freed = self.cache.evict(group, pages)
        assert freed >= min(pages, len(order))
        if self.groups == 1:
            assert freed == min(pages, len(order))
        if freed > pages and group == self.window and not self.state:
            last, extra = order[pages - 1], order[pages:freed]
            assert {self.stamps[group][name] for name in extra} == {self.stamps[group][last]}
            assert all(name[0] == last[0] and name[1][: len(last[1])] == last[1] for name in extra)
        while before - len(self.stamps[group]) < freed:
            name = self.order(group)[0]
            for stamps in self.stamps if group == 0 else [self.stamps[group]]:
                stamps.pop(name, None)
            self.prune()
        assert before - len(self.stamps[group]) == freed

    @rule()
    def reset(self) -> None:
        if self.readers:
            with pytest.raises(PageError):
                self.cache.reset()
            return
        self.cache.reset()
        self.stamps = [{} for _ in self.stamps]
        events = self.recorder.take()
        assert events[-1] == AllBlocksCleared()
        self.replay.apply(events)
        assert all(pool.used_pages == 0 for pool in self.cache.pools)

    # --- after every rule ---------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        nothing: list[set[int]] = [set() for _ in self.layout.groups]
        check_integrity(self.cache, held=nothing, receipts=[reader.receipt for reader in self.readers])
        expected = [{self.hash(name) for name in stamps} for stamps in self.stamps]
        self.replay.apply(self.recorder.take())
        assert self.replay.resident == expected
        snapshot = Replay(self.groups)
        snapshot.apply(self.cache.snapshot_events())
        assert snapshot.resident == expected


RadixMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRadixCache = RadixMachine.TestCase


@pytest.mark.parametrize("seed", range(10))
def test_long_random_walks(seed: int) -> None:
    """A thousand operations on one tree agree with the oracle, each of them."""
    walk(seed)


def walk(seed: int) -> None:
    rng = random.Random(seed)
    machine = RadixMachine()
    kind = ("short", "one and a half", "long", "long", "none")[seed % 5]
    machine.start(page=1 + seed % 4, kind=kind, state=seed % 2 == 1)
    for _ in range(1000):
        path = (rng.randrange(4), rng.randrange(10), [rng.randrange(3) for _ in range(rng.randrange(4))])
        namespace = rng.choice(NAMESPACES)
        match rng.choice(("insert", "continue", "lock", "match", "release", "trim", "full", "aux", "aux", "reset")):
            case "insert":
                machine.insert(namespace, path, held=rng.randrange(6), tail=rng.randrange(4), state=rng.random() < 0.8)
            case "continue" if machine.readers:
                steps = [rng.randrange(3)] * rng.randint(1, 3)
                machine.continue_reader(rng.randrange(6), steps, held=rng.randrange(5), state=rng.random() < 0.8)
            case "lock" if len(machine.readers) < 5:
                machine.lock(namespace, path)
            case "match":
                machine.match(namespace, path, tail=rng.randrange(4))
            case "release" if machine.readers:
                machine.release(rng.randrange(6))
            case "trim" if machine.readers:
                machine.trim(rng.randrange(6), keep=rng.randrange(4), group=rng.randint(1, 2))
            case "full":
                machine.evict(rng.randint(1, 3), 0)
            case "aux":
                machine.evict(rng.randint(1, 2), rng.randint(1, 2))
            case "reset" if rng.random() < 0.02:
                machine.reset()
        machine.agrees()
