"""A disk whose pages are gone: each load fails, and the log says so once."""

from __future__ import annotations

import time
from typing import cast

import torch
from structlog.testing import capture_logs

from engine_shim.cache.transfers import Landing, Place, Transfer, moves_of
from engine_shim.offload.barrier import LayerBarrier
from engine_shim.offload.disk import DiskPool
from engine_shim.offload.host import HostPool
from engine_shim.offload.mover import ThreadMover
from engine_shim.types import CacheGroup, CacheLayout, GroupKind

LAYOUT = CacheLayout(2, (CacheGroup(0, GroupKind.FULL, (0,)),), (9,))


class EmptyDisk:
    """Has lost everything."""

    def load(self, group: int, slot: int, name: int) -> None:
        return None

    def close(self) -> None:
        """Nothing is open."""


def test_lost_pages_are_told_once_a_minute() -> None:
    """Three fetches fail within a minute and one line is written, at the first of them."""
    buffers = ((torch.zeros(1, 9, 2, 1, 1), torch.zeros(1, 9, 2, 1, 1)),)
    mover = ThreadMover(
        LAYOUT,
        device=buffers,
        barrier=LayerBarrier(),
        host=HostPool.allocate(buffers, (9,)),
        disk=cast("DiskPool", EmptyDisk()),
    )
    landings: list[Landing] = []
    with capture_logs() as lines:
        for number in (1, 2, 3):
            mover.submit(Transfer(number, Place.DISK, Place.HOST, moves_of([(0, number, number, 7)])))
        deadline = time.monotonic() + 10
        while len(landings) < 3 and time.monotonic() < deadline:
            landings += mover.landed()
            time.sleep(0.001)
        mover.close()
    assert [(landing.id, landing.whole) for landing in landings] == [(1, False), (2, False), (3, False)]
    assert [(line["event"], line["count"]) for line in lines] == [("disk_page_lost", 1)]
