"""A rank whose steps are launched by hand, one ahead of another, over a memory of fingerprints."""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import Any

from kv_memory import EOS, KvMemory

from engine_shim.runner.shadow import ShadowRunner
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import (
    Batch,
    CacheGroup,
    CacheLayout,
    GroupKind,
    Request,
    WindowTails,
)

PAGE = 4
FULL = CacheLayout(PAGE, (CacheGroup(0, GroupKind.FULL, (1,)),), (60,))
WINDOWED = CacheLayout(PAGE, (CacheGroup(0, GroupKind.FULL, (1,)), CacheGroup(1, GroupKind.WINDOW, (0,), 10)), (60, 30))
RECURRENT = CacheLayout(
    PAGE, (CacheGroup(0, GroupKind.FULL, (1,)), CacheGroup(1, GroupKind.STATE, (0,))), (60, 14), checkpoint_tokens=16
)
RINGS = replace(WINDOWED, window_tails=WindowTails.RING, ring_pages=5)
LAYOUTS = {"full": FULL, "windowed": WINDOWED, "recurrent": RECURRENT, "rings": RINGS}


class Rank:
    """A scheduler over a memory of fingerprints, two steps deep, recounted and shadowed."""

    def __init__(self, layout: CacheLayout, **options: Any) -> None:
        settings = {"max_running": 4, "chunk_tokens": 24, "max_context_tokens": 120, "eos_token_ids": {EOS}}
        self.scheduler = Scheduler(layout, **{**settings, **options})
        self.memory = KvMemory(layout)
        self.runner = ShadowRunner(self.memory, layout, generations=self.scheduler.generations)
        self.flights: collections.deque[tuple[Batch, Any]] = collections.deque()
        self.ended: list[Request] = []
        self.in_vain = 0

    def launch(self, *, ahead: bool) -> Batch | None:
        batch = self.scheduler.schedule_ahead() if ahead else self.scheduler.schedule()
        if batch is not None:
            self.flights.append((batch, self.runner.launch(batch)))
        return batch

    def land(self) -> list[tuple[str, tuple[int, ...]]]:
        batch, landing = self.flights.popleft()
        self.in_vain += sum(chunk.request.finish is not None for chunk in batch.chunks)
        outputs = self.scheduler.commit(batch, landing())
        self.scheduler.check_integrity()
        self.ended += [output.request for output in outputs if output.finish is not None]
        return [(output.request.id, output.tokens) for output in outputs]

    def turn(self) -> None:
        """What an engine does: one step, and as many behind it as can be launched ahead."""
        self.launch(ahead=False)
        while self.flights:
            if len(self.flights) == 1:
                self.launch(ahead=True)
            self.land()
