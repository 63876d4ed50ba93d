"""The shadow below the device: what each copy should hold, and that nobody touches a page while it moves.

A transfer carries the shadow of its pages along, so a page that comes back is checked like one that was computed. While
it is under way its sources must not be written and its targets neither read nor written, and none of them may have
been freed when it lands.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from engine_shim.cache.labels import Kept, KeptPage
from engine_shim.cache.transfers import BackgroundMover, Landing, Place, Transfer
from engine_shim.runner.shadow import Integers, ShadowError, ShadowRunner, Slots, chains, seed_of
from engine_shim.types import Batch, CacheLayout, Chunk, GroupKind
from router.wire.block_keys import block_keys, namespace_seed

_UNWRITTEN = -1
_Page = tuple[Place, int, int]


class ShadowMover:
    """A mover around another one; it watches from ``attach`` on. Raises ``ShadowError``."""

    def __init__(self, inner: BackgroundMover, layout: CacheLayout) -> None:
        self.overlaps = inner.overlaps
        self._inner = inner
        self._layout = layout
        self._generations: dict[Place, list[Integers]] = {}
        self._slots: dict[Place, Sequence[Slots]] = {}
        self._names: dict[tuple[Place, int, int], tuple[int, int]] = {}
        self._flights: dict[int, tuple[Transfer, list[Integers]]] = {}
        self._reads: Counter[_Page] = Counter()
        self._writes: dict[_Page, int] = {}
        self._kept = Kept()

    @property
    def notify(self) -> Callable[[], None]:
        """See ``BackgroundMover``."""
        return self._inner.notify

    @notify.setter
    def notify(self, call: Callable[[], None]) -> None:
        self._inner.notify = call

    def close(self) -> None:
        """See ``BackgroundMover``."""
        self._inner.close()

    def kept(self) -> Kept:
        """See ``Mover``; what was kept is watched like what is copied."""
        self._kept = self._inner.kept()
        return self._kept

    def wipe(self) -> None:
        """See ``Mover``."""
        self._inner.wipe()

    def attach(self, shadow: ShadowRunner, generations: Mapping[Place, Sequence[array[int]]]) -> None:
        """Watch from now on: ``generations`` of the slots of every place, the device's among them."""
        for place, arrays in generations.items():
            self._generations[place] = [np.frombuffer(each, dtype=np.int64) for each in arrays]
            if place is not Place.DEVICE:
                sizes = zip(self._layout.groups, arrays, strict=True)
                self._slots[place] = [Slots(len(each) * self._page_slots(group.index)) for group, each in sizes]
        self._slots[Place.DEVICE] = shadow.slots
        shadow.below = (self._slots[Place.HOST][0], self._generations[Place.HOST][0])
        shadow.guards.append(self._check_step)
        self._note_kept()

    def _note_kept(self) -> None:
        """Book what earlier processes have left on disk as if it had just been copied there."""
        ends: dict[KeptPage | None, tuple[int, int, int]] = {}
        for page in self._kept.pages:
            namespace, tokens = page.label.namespace, page.label.tokens
            start, name, value = ends.get(page.parent) or (0, namespace_seed(namespace), seed_of(namespace))
            names = chains(value, tokens)
            (name,) = block_keys(tokens, block_tokens=len(tokens), parent=name)
            ends[page] = (start + len(tokens), name, int(names[-1]))
            rows = (np.array(tokens), np.arange(start, start + len(tokens)), names)
            for group, slot in page.slots.items():
                size, slots = self._page_slots(group), self._slots[Place.DISK][group]
                here = self._places(group, (slot,))
                for row, contents in zip(slots.rows(), rows, strict=True):
                    row[here] = contents[-size:]
                generation = int(self._generations[Place.DISK][group][slot])
                slots.generations[here] = generation
                self._names[Place.DISK, group, name] = (slot, generation)

    def submit(self, transfer: Transfer) -> None:
        """Check that nobody uses what will be written, carry the shadow over, begin."""
        for source, target in _pages(transfer):
            if source in self._writes:
                raise ShadowError(f"{source} is copied before it was written")
            if target in self._writes or self._reads[target]:
                raise ShadowError(f"{target} is written by two transfers, or while one reads it")
            self._reads[source] += 1
            self._writes[target] = transfer.id
        self._check_names(transfer)
        self._flights[transfer.id] = (transfer, self._used(transfer))
        self._carry(transfer)
        self._inner.submit(transfer)

    def landed(self) -> list[Landing]:
        """What has ended: none of its pages may have changed hands since it began."""
        landings = self._inner.landed()
        for landing in landings:
            transfer, before = self._flights.pop(landing.id)
            for then, now in zip(before, self._used(transfer), strict=True):
                if (then != now).any():
                    raise ShadowError(f"a page was freed while it moved from {transfer.source} to {transfer.target}")
            for source, target in _pages(transfer):
                self._reads[source] -= 1
                del self._writes[target]
            if not landing.whole:
                for move in transfer.moves:
                    slots = self._slots[transfer.target][move.group]
                    slots.positions[self._places(move.group, move.targets)] = _UNWRITTEN
        return landings

    def _check_step(self, batch: Batch) -> None:
        """No chunk writes what is being copied, or reads what is still to come, its own loads aside."""
        if not self._writes and not +self._reads:
            return
        for chunk in batch.chunks:
            if chunk.sunk is not None and any((Place.HOST, 0, slot) in self._writes for slot in chunk.sunk.slots):
                raise ShadowError(f"request {chunk.request.id!r} reads a page on the host that is still to come")
            for group, tables in enumerate(chunk.tables):
                for page in tables:
                    coming = self._writes.get((Place.DEVICE, group, page))
                    if coming is not None and coming not in batch.loads:
                        raise ShadowError(f"request {chunk.request.id!r} runs on a page that is still to come")
                for page in self._written(chunk, group):
                    if self._reads[Place.DEVICE, group, page]:
                        raise ShadowError(f"request {chunk.request.id!r} writes a page while it is copied")

    def _written(self, chunk: Chunk, group: int) -> Sequence[int]:
        table = chunk.tables[group]
        if self._layout.groups[group].kind is GroupKind.STATE:
            return table[1:]
        page, start = self._layout.page_tokens, chunk.start
        if self._layout.groups[group].kind is not GroupKind.WINDOW:
            start = max(start, chunk.rebuilt_until)
        return table[start // page : -(-(chunk.start + chunk.count + chunk.room) // page)]

    def _check_names(self, transfer: Transfer) -> None:
        """A copy is what its name says, and nothing is brought to a place that has it already."""
        for move in transfer.moves:
            target = self._generations[transfer.target][move.group]
            for source, to, name in zip(move.sources, move.targets, move.names, strict=True):
                if transfer.source is not Place.DEVICE:
                    known = self._names.get((transfer.source, move.group, name), (None, 0))
                    if known != (source, self._generations[transfer.source][move.group][source]):
                        raise ShadowError(f"slot {source} of {transfer.source} holds something else by now")
                if transfer.target is not Place.DEVICE:
                    there, generation = self._names.get((transfer.target, move.group, name), (0, -1))
                    if generation == target[there]:
                        raise ShadowError(f"a page is copied twice to {transfer.target}")
                    self._names[transfer.target, move.group, name] = (to, int(target[to]))

    def _used(self, transfer: Transfer) -> list[Integers]:
        """The generations of all pages that a transfer uses."""
        used = []
        for move in transfer.moves:
            for place, pages in ((transfer.source, move.sources), (transfer.target, move.targets)):
                used.append(self._generations[place][move.group][list(pages)])
        return used

    def _carry(self, transfer: Transfer) -> None:
        for move in transfer.moves:
            source, target = self._slots[transfer.source][move.group], self._slots[transfer.target][move.group]
            here, there = self._places(move.group, move.sources), self._places(move.group, move.targets)
            size = self._page_slots(move.group)
            if transfer.source is Place.DEVICE:
                now = self._generations[Place.DEVICE][move.group][here // size]
                if (source.generations[here] != now).any() or (source.positions[here] == _UNWRITTEN).any():
                    raise ShadowError(f"a page of group {move.group} is copied that nobody has written")
            for theirs, ours in zip(target.rows(), source.rows(), strict=True):
                theirs[there] = ours[here]
            target.generations[there] = self._generations[transfer.target][move.group][there // size]

    def _places(self, group: int, pages: Sequence[int]) -> Integers:
        size = self._page_slots(group)
        return (np.array(pages, dtype=np.int64)[:, None] * size + np.arange(size)).ravel()

    def _page_slots(self, group: int) -> int:
        return 1 if self._layout.groups[group].kind is GroupKind.STATE else self._layout.page_tokens


def _pages(transfer: Transfer) -> Iterator[tuple[_Page, _Page]]:
    for move in transfer.moves:
        for source, target in zip(move.sources, move.targets, strict=True):
            yield (transfer.source, move.group, source), (transfer.target, move.group, target)
