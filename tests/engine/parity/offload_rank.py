"""A parity rank with a host and a disk below it, whose slots hold NaN until they are written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from parity_rank import NAN_BYTE, ParityRank

from engine_shim.attention.buffers import TensorPages
from engine_shim.cache.transfers import LoadError, WritePolicy
from engine_shim.model.decoder import Decoder
from engine_shim.offload.disk import DiskPool
from engine_shim.offload.host import HostPool
from engine_shim.offload.identity import fingerprint
from engine_shim.offload.mover import ThreadMover
from engine_shim.runner.shadow import ShadowRunner
from engine_shim.runner.shadow_mover import ShadowMover
from engine_shim.schedule.transit import OffloadPlan
from engine_shim.types import Batch, Sampled


class OffloadRank(ParityRank):
    """``host_ratio`` and ``disk_ratio`` are the sizes below in multiples of the device's pools.

    With ``record`` every step's logits are kept, without it the shadow watches every step. ``read_below_tokens`` counts
    what steps have read on the host.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        host_ratio: float,
        disk_ratio: float | None = None,
        folder: Path | None = None,
        policy: WritePolicy = WritePolicy.THROUGH,
        piece_pages: int = 256,
        **options: Any,
    ) -> None:
        self._below = (host_ratio, disk_ratio, folder, policy, piece_pages)
        self._watches = not options.get("record", True)
        self.read_below_tokens = 0
        super().__init__(decoder, **options)
        if self._watches:
            self.shadow = ShadowRunner(self.runner, self.layout, generations=self.scheduler.generations)
            self.watched.attach(self.shadow, self.scheduler.copy_generations)

    def _offload(self) -> dict[str, Any]:
        host_ratio, disk_ratio, folder, policy, piece_pages = self._below
        host_pages = tuple(1 + round(pages * host_ratio) for pages in self.layout.pages)
        disk_pages = None if disk_ratio is None else tuple(1 + round(pages * disk_ratio) for pages in self.layout.pages)
        self.host = HostPool.allocate(self.runner.buffers, host_pages)
        for tensors in self.host.buffers:
            for tensor in tensors:
                tensor.fill_(torch.nan if tensor.is_floating_point() else NAN_BYTE)
        self.runner.read_below(self.host.buffers)
        self.disk = None
        if disk_pages is not None:
            sizes = [self.host.page_bytes(group.index) for group in self.layout.groups]
            self.disk = DiskPool(
                folder,
                fingerprint=fingerprint(
                    self.runner.decoder, self.layout, contents=TensorPages(self.runner.buffers).contents
                ),
                page_tokens=self.layout.page_tokens,
                page_bytes=sizes,
                pages=disk_pages,
            )
        self.mover = ThreadMover(
            self.layout, device=self.runner.buffers, barrier=self.runner.barrier, host=self.host, disk=self.disk
        )
        self.watched = ShadowMover(self.mover, self.layout) if self._watches else self.mover
        plan = OffloadPlan(host_pages, disk_pages, policy=policy, piece_pages=piece_pages)
        return {"offload": plan, "mover": self.watched}

    @property
    def moved(self):
        """What the offload has counted."""
        return self.scheduler._memory.offload.counters

    def step(self) -> None:
        """As a rank without loads, but nothing may be there to run while pages are on their way."""
        batch = self.scheduler.schedule()
        if batch is None:
            assert self.scheduler.awaits_transfers, "requests wait, nothing runs and nothing moves"
            time.sleep(0.001)
            return
        self._poison()
        try:
            sampled = self._run(batch)
        except LoadError:
            self.scheduler.rewind(batch)
        else:
            self.scheduler.commit(batch, sampled)
        self.scheduler.check_integrity()

    def _run(self, batch: Batch) -> list[Sampled]:
        page = self.layout.page_tokens
        self.read_below_tokens += sum(page * len(chunk.sunk.slots) for chunk in batch.chunks if chunk.sunk)
        return self.shadow.run(batch) if self._watches else super()._run(batch)

    def settle(self) -> None:
        """Until nothing moves any more."""
        while self.scheduler.awaits_transfers:
            time.sleep(0.001)
            self.scheduler.poll()
        self.scheduler.check_integrity()

    def close(self) -> None:
        """End the threads."""
        self.mover.close()
