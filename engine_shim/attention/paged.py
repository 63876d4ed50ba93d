"""Paged attention on torch: the pools, and one batch's attention over them. The reference for every other kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine_shim.attention.plan import Plan, Segment
from engine_shim.offload.barrier import LayerBarrier
from engine_shim.types import CacheLayout, GroupKind


@dataclass(frozen=True, slots=True)
class Pools:
    """Keys and values of one rank, a tensor per attention group: ``[layers, pages, page_tokens, kv_heads, head_dim]``.

    The tensors' contents belong to the runner: a step writes the slots of its own tokens and nothing else, through
    ``of_layer`` alone, which waits for what is being loaded.
    """

    layout: CacheLayout
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    barrier: LayerBarrier

    @classmethod
    def allocate(
        cls,
        layout: CacheLayout,
        *,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        barrier: LayerBarrier | None = None,
    ) -> Pools:
        """Zeroed pools for ``layout``; the only allocation of cache memory in the life of a rank."""
        shapes = [
            (len(group.layers), pages, layout.page_tokens, kv_heads, head_dim)
            for group, pages in zip(layout.groups, layout.pages, strict=True)
            if group.kind in (GroupKind.FULL, GroupKind.WINDOW)
        ]
        keys, values = (tuple(torch.zeros(s, device=device, dtype=dtype) for s in shapes) for _ in range(2))
        return cls(layout=layout, keys=keys, values=values, barrier=barrier or LayerBarrier())

    def of_layer(self, layer: int, group: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, ``[pages, page_tokens, kv_heads, head_dim]``, when its loads have landed."""
        self.barrier.wait(layer)
        return self.keys[group][row], self.values[group][row]


class PagedAttention:
    """Attention of one batch: writes the batch's keys and values into the pools, then reads by the plan."""

    def __init__(self, pools: Pools, plan: Plan, *, scale: float) -> None:
        self._pools = pools
        self._plan = plan
        self._scale = scale
        self._places = {
            layer: (group.index, row) for group in pools.layout.groups for row, layer in enumerate(group.layers)
        }

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group, row = self._places[layer]
        plan = self._plan.groups[group]
        # Slots are rows: [pages * page_tokens, kv_heads, head_dim].
        keys, values = (pool.flatten(0, 1) for pool in self._pools.of_layer(layer, group, row))
        keys.index_copy_(0, plan.writes, key)
        values.index_copy_(0, plan.writes, value)
        out = torch.empty_like(query)
        for segment in plan.segments:
            attended = attend(query[segment.rows], keys, values, segment=segment, scale=self._scale)
            out.index_copy_(0, segment.rows, attended)
        return out


def attend(query: Tensor, keys: Tensor, values: Tensor, *, segment: Segment, scale: float) -> Tensor:
    """Attention of one segment: ``query`` ``[B * C, heads, head_dim]`` in, the same shape out.

    Heads that share a key head (GQA) are laid along the batch or the query axis, so that keys and values are
    never repeated in memory: for decodes they are queries of one sequence, for a prefill they are sequences
    that share one storage.
    """
    batch, length = segment.slots.shape
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[1]
    repeats = heads // kv_heads
    flat = segment.slots.flatten()
    # [B, kv_heads, L, head_dim]
    k = keys.index_select(0, flat).view(batch, length, kv_heads, head_dim).transpose(1, 2)
    v = values.index_select(0, flat).view(batch, length, kv_heads, head_dim).transpose(1, 2)
    if query.shape[0] == batch:
        q = query.view(batch, kv_heads, repeats, head_dim)
        out = scaled_dot_product_attention(q, k, v, attn_mask=segment.mask, scale=scale)
        return out.reshape(batch, heads, head_dim)
    count = query.shape[0] // batch
    q = query.view(count, kv_heads, repeats, head_dim).permute(2, 1, 0, 3)
    k = k.expand(repeats, -1, -1, -1)
    v = v.expand(repeats, -1, -1, -1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=segment.mask, is_causal=segment.causal, scale=scale)
    return out.permute(2, 1, 0, 3).reshape(count, heads, head_dim)
