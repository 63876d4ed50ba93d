"""A timing model of transfers, for ranks whose forward pass is one, too. Imports no torch."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from engine_shim.cache.labels import Kept
from engine_shim.cache.transfers import Landing, Place, Transfer
from engine_shim.offload.lane import Lane


class SimMover:
    """Implements ``BackgroundMover``: transfers take their modelled time, each way by itself, and always arrive."""

    overlaps = False

    def __init__(
        self, tokens_per_second: float, *, page_tokens: int, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.notify: Callable[[], None] = _nothing
        self._seconds_per_page = page_tokens / tokens_per_second
        self._sleep = sleep
        self._landings: queue.SimpleQueue[Landing] = queue.SimpleQueue()
        self._lanes = {
            Place.DEVICE: Lane("in", self._move, broke=self._broke),
            Place.HOST: Lane("out", self._move, broke=self._broke),
            Place.DISK: Lane("disk", self._move, broke=self._broke),
        }

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer behind those to the same place."""
        self._lanes[transfer.target].put(transfer)

    def landed(self) -> list[Landing]:
        """What has ended since the last call."""
        landings = []
        while not self._landings.empty():
            landings.append(self._landings.get())
        return landings

    def kept(self) -> Kept:
        """Nothing is written, so nothing is left."""
        return Kept()

    def wipe(self) -> None:
        """There is nothing to forget."""

    def close(self) -> None:
        """End the threads."""
        for lane in self._lanes.values():
            lane.close()

    def _move(self, transfer: Transfer) -> None:
        full = sum(len(move.sources) for move in transfer.moves if move.group == 0)
        self._sleep(full * self._seconds_per_page)
        self._land(transfer, whole=True)

    def _broke(self, transfer: Transfer) -> None:
        self._land(transfer, whole=False)

    def _land(self, transfer: Transfer, *, whole: bool) -> None:
        self._landings.put(Landing(transfer.id, whole))
        self.notify()


def _nothing() -> None:
    """Nobody has asked to be told."""
