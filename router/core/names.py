"""Engines' names for blocks, and what they stand for.

Ranks of one kind of engine are taken to name equal blocks equally, and share a table: a further holder of a block costs
no further name. That holds where names are hashes of content under one seed. A rank whose names turn out to be others
(an unseeded hash), or to stand for what they do not elsewhere, gets a table of its own until it is cleared: none of its
events changes what other ranks' names mean, and its names go with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from router.core.runs import Runs
from router.wire.kv_events import EngineHash

#: So many names are looked at in one step of a sweep.
_AT_ONCE = 16


@dataclass(slots=True)
class NameTable:
    """What names stand for. ``places`` are of the chains.

    ``strays`` are keys of blocks without a place, which sparse groups alone hold. ``others`` are further places of
    names that stand for several blocks of one text (``core/namespaces``).
    """

    places: dict[EngineHash, int] = field(default_factory=dict)
    strays: dict[EngineHash, int] = field(default_factory=dict)
    others: dict[EngineHash, list[int]] = field(default_factory=dict)

    def learn(self, names: Sequence[EngineHash], places: Iterable[int], *, keeps_others: bool = False) -> None:
        """Blocks were stored under these names."""
        if keeps_others:
            places = list(places)
            for name, place in zip(names, places, strict=True):
                if (known := self.places.get(name, place)) != place:
                    others = self.others.setdefault(name, [])
                    others[:] = [*(each for each in others if each not in (known, place)), known]
        self.places.update(zip(names, places, strict=True))
        if self.strays:
            for name in names:
                self.strays.pop(name, None)

    def all_places(self, name: EngineHash) -> Sequence[int]:
        """The places a name stands for."""
        place = self.places.get(name)
        return () if place is None else (*self.others.get(name, ()), place)

    def forget(self, name: EngineHash, place: int) -> None:
        """Nobody holds the block at a place any more."""
        self._set_places(name, [each for each in self.all_places(name) if each != place])

    def sweep(
        self, *, unheld: Callable[[Sequence[int]], Collection[int]], is_sparse: Callable[[int], bool]
    ) -> Iterator[None]:
        """Let go of names whose block nobody holds, a few at a time. ``unheld`` says of which places that is so, and
        ``is_sparse`` of a key whether it is not.
        """
        names, place = list(self.places), self.places.get
        for start in range(0, len(names), _AT_ONCE):
            known = [(name, at) for name in names[start : start + _AT_ONCE] if (at := place(name)) is not None]
            gone = unheld([at for _, at in known])
            for name, at in known:
                if name in self.others:
                    places = self.all_places(name)
                    lost = unheld(places)
                    self._set_places(name, [each for each in places if each not in lost])
                elif at in gone:
                    del self.places[name]
            yield
        strays = list(self.strays)
        for start in range(0, len(strays), _AT_ONCE):
            for name in strays[start : start + _AT_ONCE]:
                if (stray := self.strays.get(name)) is not None and not is_sparse(stray):
                    del self.strays[name]
            yield

    def _set_places(self, name: EngineHash, places: Sequence[int]) -> None:
        self.others.pop(name, None)
        if not places:
            del self.places[name]
            return
        self.places[name] = places[-1]
        if len(places) > 1:
            self.others[name] = list(places[:-1])

    def drain(self) -> Iterator[None]:
        """Forget all, a few at a time."""
        for names in (self.places, self.strays, self.others):
            while names:
                for _ in range(min(_AT_ONCE, len(names))):
                    names.popitem()
                yield

    def __len__(self) -> int:
        return len(self.places) + len(self.strays) + len(self.others)


@dataclass(slots=True)
class Names:
    """The names of one rank: ``common`` ones, and before them its ``own``, if it has any.

    Beside its own, common names stand for what the rank learned by them before, which it must still hold: ``has_place``
    and ``has_key`` say whether it does.
    """

    common: NameTable
    has_place: Callable[[int], bool]
    has_key: Callable[[int], bool]
    own: NameTable | None = None

    @property
    def learns(self) -> NameTable:
        """The table that what is told next goes into."""
        return self.common if self.own is None else self.own

    def part(self) -> None:
        """The rank's names are not those of others: from now on they are its own."""
        if self.own is None:
            self.own = NameTable()

    def rejoin(self) -> Iterator[None]:
        """The rank holds nothing, so that none of its own names stands for anything. They go by and by."""
        own, self.own = self.own, None
        return iter(()) if own is None else own.drain()

    def place(self, name: EngineHash) -> int | None:
        """The place that a name stands for, that learned last if there are several."""
        return self._stands_in(name).places.get(name)

    def places(self, names: Sequence[EngineHash]) -> list[int]:
        """The places of those names that have one."""
        place = self.common.places.get if self.own is None else self.place
        return [each for name in names if (each := place(name)) is not None]

    def all_places(self, name: EngineHash) -> Sequence[int]:
        """The places a name stands for."""
        return self._stands_in(name).all_places(name)

    def stray(self, name: EngineHash) -> int | None:
        """The key that a name without a place stands for."""
        return self._stands_in(name).strays.get(name)

    def strays(self) -> Mapping[EngineHash, int]:
        """All names that stand for keys."""
        return self.common.strays if self.own is None else {**self.common.strays, **self.own.strays}

    def drop_stray(self, name: EngineHash, key: int) -> None:
        """No sparse group holds the block of a key any more."""
        table = self._of(name)
        if table.strays.get(name) == key:
            del table.strays[name]

    def forget(self, name: EngineHash, place: int) -> None:
        """Nobody holds the block at a place any more."""
        self._of(name).forget(name, place)

    def _of(self, name: EngineHash) -> NameTable:
        own = self.own
        return own if own is not None and (name in own.places or name in own.strays) else self.common

    def _stands_in(self, name: EngineHash) -> NameTable:
        """The table that a name stands for something in: its own, if it does in none."""
        table, own = self._of(name), self.own
        if own is None or table is own:
            return table
        place, stray = table.places.get(name), table.strays.get(name)
        is_its = self.has_place(place) if place is not None else stray is not None and self.has_key(stray)
        return table if is_its else own

    def in_chain_order(self, names: Sequence[EngineHash], runs: Runs) -> Sequence[EngineHash]:
        """What SGLang removes at once, each block after the one it is behind. It names whole nodes, each from its
        start, and those that are behind first.
        """
        last = [-2 if (place := self.place(name)) is None else place for name in names]
        if last == list(range(last[0], last[0] + len(last)) if last else ()):  # one node, as nearly always
            return names
        nodes: list[list[EngineHash]] = []
        before: Sequence[int] = ()
        for name in names:
            places = self.all_places(name)
            if nodes and any(runs.follows(each, other) for each in places for other in before):
                nodes[-1].append(name)
            else:
                nodes.append([name])
            before = places
        return [name for node in reversed(nodes) for name in node] if len(nodes) > 1 else names
