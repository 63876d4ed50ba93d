"""Ranks that step as the engine does, one step ahead of the one that runs, or for comparison one by one."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from offload_rank import OffloadRank
from parity_rank import ParityRank

from engine_shim.cache.transfers import LoadError
from engine_shim.model.decoder import Decoder
from engine_shim.runner.shadow import ShadowRunner
from engine_shim.types import Batch, Request, StepLanding


class StepsAhead:
    """Beside a rank with a ``shadow``: ``overlaps`` False has it run the same steps one by one.

    ``ahead`` counts the steps that were launched before the one in front of them was known.
    """

    scheduler: Any
    shadow: ShadowRunner
    _poison: Any

    def start(self, *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.flights: deque[tuple[Batch, StepLanding]] = deque()
        self.ahead = 0
        self.told: dict[str, list[Any]] = {}

    def step(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            assert self.scheduler.awaits_transfers, "requests wait, nothing runs and nothing moves"
            time.sleep(0.001)
            return
        self.launch(batch)
        while self.flights:
            if self.overlaps and len(self.flights) == 1:
                ahead = self.scheduler.schedule_ahead()
                if ahead is not None:
                    self.ahead += 1
                    self.launch(ahead)
            batch, landing = self.flights.popleft()
            try:
                sampled = landing()
            except LoadError:
                self.scheduler.rewind(batch)
            else:
                for output in self.scheduler.commit(batch, sampled):
                    self.told.setdefault(output.request.id, []).extend(output.logprobs)
            self.scheduler.check_integrity()

    def launch(self, batch: Batch) -> None:
        self._poison()
        self.flights.append((batch, self.shadow.launch(batch)))

    def finish(self, requests: list[Request]) -> dict[str, list[int]]:
        """Run these together to their ends; what each has answered."""
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.step()
        return {request.id: request.output for request in requests}


class OverlappedRank(StepsAhead, ParityRank):
    """With a pool so small that pages are used again at once."""

    def __init__(self, decoder: Decoder, *, overlaps: bool, **options: Any) -> None:
        sizes = {"pool_tokens": 400, "max_running": 4, "chunk_tokens": 32}
        super().__init__(decoder, record=False, overlaps=overlaps, **{**sizes, **options})
        self.shadow = ShadowRunner(self.runner, self.layout, generations=self.scheduler.generations)
        self.start(overlaps=overlaps)


class OverlappedOffloadRank(StepsAhead, OffloadRank):
    """With a host below it."""

    def __init__(self, decoder: Decoder, *, overlaps: bool, **options: Any) -> None:
        super().__init__(decoder, record=False, overlaps=overlaps, **options)
        self.start(overlaps=overlaps)
