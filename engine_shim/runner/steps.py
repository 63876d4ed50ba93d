"""One launched step: what it waits for from the step in front of it, and what it comes to."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from engine_shim.attention.plan import Plan
from engine_shim.sampling import Choice
from engine_shim.types import Batch, Sampled


class Step:
    """``plan`` is None for one that runs as a graph. ``choice``: the chosen tokens, once they are on their way.

    A token that a chunk awaits goes from where the step ``behind`` which this one stands has put it to where this one
    reads it, on the device.
    """

    def __init__(self, batch: Batch, plan: Plan | None, *, behind: Step | None) -> None:
        self.batch = batch
        self.plan = plan
        self.choice: Choice | None = None
        self.running: Future[None] | None = None
        self._behind = behind if any(chunk.awaits_token for chunk in batch.chunks) else None
        if self._behind is not None:
            rows = self._rows(self._behind)
            device = None if plan is None else plan.tokens.device
            self._targets = torch.tensor([target for target, _ in rows], dtype=torch.int64, device=device)
            self._sources = torch.tensor([source for _, source in rows], dtype=torch.int64, device=device)

    def _rows(self, before: Step) -> list[tuple[int, int]]:
        """For each awaited token its row in this step, and among those that the step before has chosen."""
        chosen = {chunk.request: row for row, chunk in enumerate(c for c in before.batch.chunks if c.samples)}
        rows, first = [], 0
        for chunk in self.batch.chunks:
            if chunk.awaits_token:
                rows.append((first, chosen[chunk.request]))
            first += chunk.count
        return rows

    def put_awaited(self, tokens: Tensor) -> None:
        """Complete the token ids ``[rows]`` of this step; the step before has been run, or is in the stream."""
        if self._behind is None:
            return
        if self._behind.choice is None:
            raise RuntimeError("the step before this one has failed")
        known = self._behind.choice.tokens
        tokens.index_copy_(0, self._targets.to(tokens.device), known.index_select(0, self._sources.to(known.device)))
        self._behind = None

    def sampled(self) -> list[Sampled]:
        """Wait for it. Raises what the step has raised."""
        if self.running is not None:
            self.running.result()
        return [] if self.choice is None else self.choice.sampled()
