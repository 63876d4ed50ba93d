"""Moves pages between device, host and disk in threads of its own, so that no step waits for a copy it does not need.

A thread each for what goes out, what comes back, and the disk; each does its transfers in the order of submission.
A load goes layer by layer in the model's order, so that a step can start on its first layers while the last ones are
still coming (``LayerBarrier``). On CUDA the copies run on streams of their own, behind all that was launched when the
transfer was submitted: the forward pass that wrote what is saved, and those that read what will be written over.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import structlog
import torch

from engine_shim.attention.buffers import Buffers
from engine_shim.cache.labels import Kept
from engine_shim.cache.transfers import Landing, Move, Place, Transfer
from engine_shim.offload.barrier import LayerBarrier
from engine_shim.offload.disk import DiskPool
from engine_shim.offload.host import HostPool, rows_of_layers
from engine_shim.offload.lane import Lane
from engine_shim.offload.quiet import Quiet
from engine_shim.types import CacheLayout

log = structlog.get_logger(__name__)


class ThreadMover:
    """Implements ``Mover`` for a torch runner. ``notify`` is called, from any thread, whenever something has landed."""

    overlaps = True

    def __init__(
        self,
        layout: CacheLayout,
        *,
        device: Buffers,
        barrier: LayerBarrier,
        host: HostPool,
        disk: DiskPool | None = None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self.notify = notify
        self._device = device
        self._barrier = barrier
        self._host = host
        self._disk = disk
        self._lost = Quiet()
        self._rows = rows_of_layers(layout)
        self._is_cuda = device[0][0].is_cuda
        self._fences: dict[int, torch.cuda.Event] = {}
        self._landings: queue.SimpleQueue[Landing] = queue.SimpleQueue()
        self._lanes = {
            (Place.DEVICE, Place.HOST): Lane("save", self._save, broke=self._broke, around=self._on_stream()),
            (Place.HOST, Place.DEVICE): Lane("load", self._load, broke=self._broke, around=self._on_stream()),
        }
        if disk is not None:
            lane = Lane("disk", self._move_on_disk, broke=self._broke)
            self._lanes |= {(Place.HOST, Place.DISK): lane, (Place.DISK, Place.HOST): lane}

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer behind those of its lane."""
        if transfer.target is Place.DEVICE:
            self._barrier.begin(transfer.id)
        if self._is_cuda and Place.DEVICE in (transfer.source, transfer.target):
            self._fences[transfer.id] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._fences[transfer.id].record(torch.cuda.current_stream(self._device[0][0].device))
        self._lanes[transfer.source, transfer.target].put(transfer)

    def landed(self) -> list[Landing]:
        """What has ended since the last call."""
        landings = []
        while not self._landings.empty():
            landings.append(self._landings.get())
            self._barrier.forget(landings[-1].id)
        return landings

    def kept(self) -> Kept:
        """What earlier processes have left on disk."""
        return Kept() if self._disk is None else self._disk.kept()

    def wipe(self) -> None:
        """Delete what is on disk."""
        if self._disk is not None:
            self._disk.wipe()

    def close(self) -> None:
        """End the threads after what they are at, then leave the disk."""
        for lane in {id(lane): lane for lane in self._lanes.values()}.values():
            lane.close()
        if self._disk is not None:
            self._disk.close()

    def _on_stream(self) -> Callable[[Transfer], AbstractContextManager[object]]:
        """A lane's transfers run on a CUDA stream of its own, each behind its fence."""
        if not self._is_cuda:
            return lambda transfer: torch.inference_mode()
        stream = torch.cuda.Stream(self._device[0][0].device)  # type: ignore[no-untyped-call]

        @contextmanager
        def on_stream(transfer: Transfer) -> Iterator[None]:
            with torch.inference_mode(), torch.cuda.stream(stream):
                stream.wait_event(self._fences.pop(transfer.id))
                yield

        return on_stream

    # --- in the threads --------------------------------------------------------------------------------

    def _land(self, transfer: Transfer, *, whole: bool) -> None:
        self._landings.put(Landing(transfer.id, whole))
        self.notify()

    def _broke(self, transfer: Transfer) -> None:
        self._land(transfer, whole=False)
        if transfer.target is Place.DEVICE:
            self._barrier.fail(transfer.id)

    def _save(self, transfer: Transfer) -> None:
        for move in transfer.moves:
            sources, targets = torch.tensor(move.sources), torch.tensor(move.targets)
            for ours, theirs in zip(self._device[move.group], self._host.buffers[move.group], strict=True):
                theirs.index_copy_(1, targets, ours.index_select(1, sources.to(ours.device)).to("cpu"))
            self._rename(move)
        self._land(transfer, whole=True)

    def _load(self, transfer: Transfer) -> None:
        if not all(self._host.holds(move.group, move.sources, move.names) for move in transfer.moves):
            raise ValueError("a host slot holds something else than it is asked for")
        moves = {move.group: (torch.tensor(move.sources), torch.tensor(move.targets)) for move in transfer.moves}
        for done, (group, row) in enumerate(self._rows, start=1):
            if group in moves:
                sources, targets = moves[group]
                for ours, theirs in zip(self._device[group], self._host.buffers[group], strict=True):
                    arrived = theirs[row].index_select(0, sources).to(ours.device, non_blocking=True)
                    ours[row].index_copy_(0, targets.to(ours.device), arrived)
            if done == len(self._rows):
                # Told first, so that a step which waited for the last layer finds the load landed.
                self._synchronize()
                self._land(transfer, whole=True)
            self._barrier.advance(transfer.id, then=self._fence())

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()

    def _fence(self) -> Callable[[], None]:
        """What whoever waits for the present layer has to do: have its stream wait for this one."""
        if not self._is_cuda:
            return _nothing
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def _move_on_disk(self, transfer: Transfer) -> None:
        step = self._spill if transfer.target is Place.DISK else self._fetch
        self._land(transfer, whole=all(step(move) for move in transfer.moves))

    def _spill(self, move: Move) -> bool:
        assert self._disk is not None
        if not self._host.holds(move.group, move.sources, move.names):
            return False
        pages = zip(move.sources, move.targets, move.names, move.labels, strict=True)
        for source, target, name, label in pages:
            self._disk.store(move.group, target, name, self._host.pages.read(move.group, source), label=label)
        return True

    def _fetch(self, move: Move) -> bool:
        assert self._disk is not None
        for source, target, name in zip(move.sources, move.targets, move.names, strict=True):
            contents = self._disk.load(move.group, source, name)
            if contents is None:
                count = self._lost.failed()
                if count:
                    log.warning("disk_page_lost", group=move.group, slot=source, count=count)
                return False
            self._host.pages.write(move.group, target, contents)
        self._rename(move)
        return True

    def _rename(self, move: Move) -> None:
        for target, name in zip(move.targets, move.names, strict=True):
            self._host.names[move.group][target] = name


def _nothing() -> None:
    """The CPU has no streams."""
