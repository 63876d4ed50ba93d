"""One launched step: what it waits for from the step in front of it, and what it comes to."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from engine_shim.attention.plan import Plan
from engine_shim.placing import to_device, to_host
from engine_shim.sampling import Choice
from engine_shim.types import Batch, Sampled


class Step:
    """``plan`` is None for one that runs as a graph. ``choice``: the chosen tokens, once they are on their way.

    A token that a chunk awaits goes from where the step ``behind`` which this one stands has put it to where this one
    reads it, on the device; and back to the host beside the choice, so that a shadow can see what has been read.
    """

    def __init__(self, batch: Batch, plan: Plan | None, *, behind: Step | None, device: torch.device) -> None:
        self.batch = batch
        self.plan = plan
        self.choice: Choice | None = None
        self.running: Future[None] | None = None
        self._awaited: Tensor | None = None
        self._behind = behind if any(chunk.awaits_token for chunk in batch.chunks) else None
        if self._behind is not None:
            rows = self._rows(self._behind)
            self._targets = to_device([target for target, _ in rows], device, dtype=torch.int64)
            self._sources = to_device([source for _, source in rows], device, dtype=torch.int64)

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
        tokens.index_copy_(0, self._targets, known.index_select(0, self._sources))
        self._awaited = to_host(tokens.index_select(0, self._targets))
        self._behind = None

    def sampled(self) -> list[Sampled]:
        """Wait for it. Raises what the step has raised, and ``RuntimeError`` if it ran without an awaited token."""
        if self.running is not None:
            self.running.result()
        if self._behind is not None:
            raise RuntimeError("a step has run without the tokens that it awaits")
        if self.choice is None:
            return []
        sampled = self.choice.sampled()
        if self._awaited is None:
            return sampled
        read = iter(self._awaited.tolist())
        chunks = (chunk for chunk in self.batch.chunks if chunk.samples)
        return [
            replace(result, awaited=next(read)) if chunk.awaits_token else result
            for result, chunk in zip(sampled, chunks, strict=True)
        ]
