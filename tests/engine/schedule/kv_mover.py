"""A mover over ``KvMemory`` whose transfers take as long as a test wants, and sometimes do not arrive.

Contents are copied at the moment of *landing*, and until then the targets hold what belongs nowhere. So a source that
is written or a target that is read too early is a wrong fingerprint, on the device or in a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from kv_memory import KvMemory

from engine_shim.cache.transfers import Landing, LoadError, Move, Place, Transfer
from engine_shim.types import Batch, GroupKind, Sampled

POISON = (-2, -2)
Lane = tuple[Place, Place]


class KvMover:
    """Implements ``Mover``; ``memories[place][group, slot, offset]`` is what stands there."""

    def __init__(self, device: KvMemory, *, overlaps: bool = True) -> None:
        self.overlaps = overlaps
        self.layout = device.layout
        self.memories = {Place.DEVICE: device.slots, Place.HOST: {}, Place.DISK: {}}
        self.lanes: dict[Lane, deque[Transfer]] = {}
        self.moved: list[Transfer] = []
        self.next_load_breaks = False
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
                for offset in range(self._size(move.group)):
                    self.memories[transfer.target][move.group, page, offset] = POISON

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
