"""Runs batches through a decoder over paged pools: the real forward pass of one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_shim.attention.paged import PagedAttention, Pools
from engine_shim.attention.plan import Plan, make_plan
from engine_shim.attention.recurrent import PagedRecurrence, States
from engine_shim.model.decoder import Decoder
from engine_shim.sampling import Draw, sample
from engine_shim.types import Batch, CacheLayout


class TorchRunner:
    """One rank's runner. The decoder may be shared with other ranks, the pools are its own.

    Device and dtype are the decoder's. Not thread-safe: the rank's thread alone calls it.
    """

    def __init__(self, decoder: Decoder, layout: CacheLayout) -> None:
        self.decoder = decoder
        self.layout = layout
        self.pools = Pools.allocate(
            layout,
            kv_heads=decoder.config.kv_heads,
            head_dim=decoder.config.head_dim,
            device=decoder.device,
            dtype=decoder.dtype,
        )
        net, group = decoder.config.delta_net, layout.state
        self.states = (
            States.allocate(group, layout.pages[group.index], net=net, device=decoder.device, dtype=decoder.dtype)
            if net is not None and group is not None
            else None
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[int]:
        """Run one step; the one wait for the device is for the sampled tokens."""
        plan = make_plan(batch, self.layout, device=self.decoder.device, dtype=self.decoder.dtype)
        hidden = self._hidden(plan)
        draws = [Draw.of(chunk) for chunk in batch.chunks if chunk.samples]
        if not draws:
            return []
        return sample(self.decoder.logits(hidden.index_select(0, plan.sampled)), draws)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Run one step and return the logits of every position of the batch, ``[tokens, vocab_size]``."""
        plan = make_plan(batch, self.layout, device=self.decoder.device, dtype=self.decoder.dtype)
        return self.decoder.logits(self._hidden(plan))

    def _hidden(self, plan: Plan) -> Tensor:
        attention = PagedAttention(self.pools, plan, scale=self.decoder.config.attention_scale)
        recurrence = None
        if self.states is not None and plan.states is not None and self.decoder.config.delta_net is not None:
            recurrence = PagedRecurrence(self.states, plan.states, net=self.decoder.config.delta_net)
        return self.decoder.hidden(plan.tokens, plan.positions, attention=attention, recurrence=recurrence)
