"""A rank that records every logit it computes, and whose free pages hold NaN at every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import layout_for
from engine_shim.runner.torch_runner import TorchRunner
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.speculative.drafter import Drafter
from engine_shim.types import Batch, CacheLayout, Request, Sampled, Sampling, WindowTails

#: Of a packed cache, code and scale: no number.
NAN_BYTE = 0x7F


class ParityRank:
    """Scheduler and torch runner, stepped by hand; the cache is checked after every step.

    ``logits[request id][position]`` is what the rank computed last for that position (with ``record``; without it
    the runner samples for itself). ``pages_filled[g]`` counts
    how often a page of group g was begun: more often than the pool has pages means that pages were used again.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        page_tokens: int = 8,
        pool_tokens: int = 2048,
        window_pool_tokens: int | None = None,
        state_slots: int | None = 48,
        chunk_tokens: int = 4096,
        max_running: int = 16,
        eos_token_ids: frozenset[int] = frozenset(),
        record: bool = True,
        drafter: Drafter | Callable[[CacheLayout], Drafter] | None = None,
        draft_tokens: int = 0,
        kernels: bool = False,
        flashinfer: bool = False,
        fp8: bool = False,
        graph_decodes: int = 0,
        window_tails: WindowTails = WindowTails.STORED,
        overlaps: bool = False,
    ) -> None:
        self.layout = layout_for(
            decoder.config,
            page_tokens=page_tokens,
            pool_tokens=pool_tokens,
            window_pool_tokens=window_pool_tokens,
            state_slots=state_slots,
            draft_head=callable(drafter),
            window_tails=window_tails,
            chunk_tokens=chunk_tokens,
        )
        self.drafter = drafter(self.layout) if callable(drafter) else drafter
        self.runner = TorchRunner(
            decoder,
            self.layout,
            drafter=self.drafter,
            kernels=kernels,
            flashinfer=flashinfer,
            fp8=fp8,
            graph_decodes=graph_decodes,
            overlaps=overlaps,
        )
        self.scheduler = Scheduler(
            self.layout,
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            max_context_tokens=decoder.config.max_positions,
            eos_token_ids=eos_token_ids,
            draft_tokens=draft_tokens,
            **self._offload(),
        )
        self._record = record
        self.logits: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.pages_filled = [0 for _ in self.layout.groups]
        self.largest_batch = 0
        self.rebuilt_positions = 0

    def _offload(self) -> dict[str, Any]:
        """What the scheduler needs to copy pages below the device: nothing here."""
        return {}

    def generate(
        self, prompts: dict[str, list[int]], *, max_tokens: int = 32, sampling: Sampling | None = None
    ) -> dict[str, Request]:
        """Run all prompts together to their ends, greedily unless told otherwise, and return the requests by name."""
        sampling = sampling or Sampling(max_tokens=max_tokens)
        requests = {name: Request(id=name, prompt=tuple(prompt), sampling=sampling) for name, prompt in prompts.items()}
        for request in requests.values():
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.step()
        return requests

    def step(self) -> None:
        """Schedule, poison what is free, run, commit, check."""
        batch = self.scheduler.schedule()
        assert batch is not None, "requests wait but nothing can run"
        self._poison()
        self.scheduler.commit(batch, self._run(batch))
        self.scheduler.check_integrity()
        self.largest_batch = max(self.largest_batch, len(batch.chunks))

    def _run(self, batch: Batch) -> list[Sampled]:
        page_tokens = self.layout.page_tokens
        for chunk in batch.chunks:
            begun = -(-(chunk.start + chunk.count) // page_tokens) - -(-chunk.start // page_tokens)
            self.pages_filled = [filled + begun for filled in self.pages_filled]
        if not self._record:
            return self.runner.run(batch)
        logits = self.runner.logits(batch)
        sampled, row = [], 0
        for chunk in batch.chunks:
            rows = logits[row : row + chunk.count]
            known = max(0, chunk.rebuilt_until - chunk.start)  # these are run for their windows alone
            self.rebuilt_positions += min(known, chunk.count)
            self.logits[chunk.request.id].update(enumerate(rows[known:], start=chunk.start + known))
            if chunk.samples:
                sampled.append(Sampled((int(rows[-1].argmax()),)))
            row += chunk.count
        return sampled

    def _poison(self) -> None:
        """NaN into the null page and every page that nobody holds: reading one shows in the logits."""
        for group, pool in enumerate(self.scheduler._memory.cache.pools):
            pages = torch.tensor(sorted({0, *pool.free_set()}))
            for tensor in self.runner.buffers[group]:
                tensor[:, pages] = torch.nan if tensor.is_floating_point() else NAN_BYTE
