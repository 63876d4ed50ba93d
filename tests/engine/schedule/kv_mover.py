"""A mover over ``KvMemory`` whose transfers take as long as a test wants, and sometimes do not arrive.

Contents are copied at the moment of *landing*, and until then the targets hold what belongs nowhere. So a source that
is written or a target that is read too early is a wrong fingerprint, on the device or in a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from kv_memory import KvMemory

from engine_shim.cache.labels import Kept, KeptPage, Label, root_digest
from engine_shim.cache.transfers import Landing, LoadError, Move, Place, Transfer
from engine_shim.types import Batch, GroupKind, Sampled, StepLanding

POISON = (-2, -2)
Lane = tuple[Place, Place]


class KvMover:
    """Implements ``Mover``; ``memories[place][group, slot, offset]`` is what stands there."""

    def __init__(self, device: KvMemory, *, overlaps: bool = True, before: KvMover | None = None) -> None:
        """What ``before``, of a process that is gone, had on disk is there still."""
        self.overlaps = overlaps
        self.layout = device.layout
        self.memories = {Place.DEVICE: device.slots, Place.HOST: {}, Place.DISK: {}}
        device.host = self.memories[Place.HOST]
        self.lanes: dict[Lane, deque[Transfer]] = {}
        self.moved: list[Transfer] = []
        self.next_load_breaks = False
        self.on_disk: dict[tuple[int, int], Label] = {}
        if before is not None:
            self.memories[Place.DISK] = before.memories[Place.DISK]
            self.on_disk = before.on_disk
        self._landings: list[Landing] = []
        self._broken: set[int] = set()

    @property
    def under_way(self) -> int:
        """Transfers that have not landed."""
        return sum(map(len, self.lanes.values()))

    def submit(self, transfer: Transfer) -> None:
        self.lanes.setdefault((transfer.source, transfer.target), deque()).append(transfer)
        self.moved.append(transfer)
        for move in transfer.moves:
            for page in move.targets:
                if transfer.target is Place.DISK:
                    self.on_disk.pop((move.group, page), None)
                for offset in range(self._size(move.group)):
                    self.memories[transfer.target][move.group, page, offset] = POISON

    def kept(self) -> Kept:
        """Chains that are complete from their start; of two copies of a page one."""
        pages: dict[bytes, KeptPage] = {}
        for (group, slot), label in list(self.on_disk.items()):
            page = pages.setdefault(label.digest, KeptPage(label, None))
            if page.slots.setdefault(group, slot) != slot:
                del self.on_disk[group, slot]
        linked: dict[bytes, KeptPage | None] = {root_digest(page.label.namespace): None for page in pages.values()}
        while found := [d for d, page in pages.items() if d not in linked and page.label.parent in linked]:
            for digest in found:
                pages[digest].parent = linked[pages[digest].label.parent]
                linked[digest] = pages[digest]
        return Kept(tuple(page for page in linked.values() if page is not None))

    def wipe(self) -> None:
        assert not self.under_way
        self.memories[Place.DISK].clear()
        self.on_disk.clear()

    def landed(self) -> list[Landing]:
        landings, self._landings = self._landings, []
        return landings

    def land(self, turn: int, *, whole: bool = True) -> None:
        """The oldest transfer of one of the lanes ends."""
        lanes = [lane for lane in self.lanes.values() if lane]
        if lanes:
            self._end(lanes[turn % len(lanes)].popleft(), whole=whole)

    def land_all(self) -> None:
        """Everything that is under way ends well."""
        while self.under_way:
            self.land(0)

    def finish(self, loads: Collection[int]) -> None:
        """What a runner waits for before it reads. Raises ``LoadError`` if that does not arrive."""
        lane = self.lanes.get((Place.HOST, Place.DEVICE), deque())
        while any(transfer.id in loads for transfer in lane):
            last = lane.popleft()
            breaks = self.next_load_breaks and last.id in loads
            self.next_load_breaks &= not breaks
            self._end(last, whole=not breaks)
        if not self._broken.isdisjoint(loads):
            raise LoadError("a load has broken")

    def _end(self, transfer: Transfer, *, whole: bool) -> None:
        if whole:
            for move in transfer.moves:
                self._copy(transfer, move)
        else:
            self._broken.add(transfer.id)
        self._landings.append(Landing(transfer.id, whole))

    def _copy(self, transfer: Transfer, move: Move) -> None:
        source, target = self.memories[transfer.source], self.memories[transfer.target]
        self.on_disk.update(
            ((move.group, there), label) for there, label in zip(move.targets, move.labels, strict=False)
        )
        for here, there in zip(move.sources, move.targets, strict=True):
            for offset in range(self._size(move.group)):
                target[move.group, there, offset] = source[move.group, here, offset]

    def _size(self, group: int) -> int:
        return 1 if self.layout.groups[group].kind is GroupKind.STATE else self.layout.page_tokens


class LoadingMemory:
    """A runner that waits for a batch's loads, as ``TorchRunner`` does, and then is a ``KvMemory``."""

    def __init__(self, memory: KvMemory, mover: KvMover) -> None:
        self._memory = memory
        self._mover = mover

    def run(self, batch: Batch) -> list[Sampled]:
        self._mover.finish(batch.loads)
        return self._memory.run(batch)

    def launch(self, batch: Batch) -> StepLanding:
        landing = self._memory.launch(batch)

        def land() -> list[Sampled]:
            self._mover.finish(batch.loads)
            return landing()

        return land
