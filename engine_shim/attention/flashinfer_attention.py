"""Paged attention by FlashInfer, in place of ``paged.PagedAttention``: planned once a step, run by each layer.

FlashInfer reads pages where they lie, as ``[pages, page_tokens, kv_heads, head_dim]`` (its "NHD"). Queries are the last
tokens of their sequences. Positions count from the end of a sequence alone, so of a window group the pages that nobody
looks back to, which may hold anything, are left out of the tables. What stands behind a sequence's end is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any, Protocol

import torch
from torch import Tensor

from engine_shim.attention.paged import Pools
from engine_shim.attention.plan import group_writes
from engine_shim.attention.tables import attention_groups
from engine_shim.placing import to_device
from engine_shim.types import CacheGroup, Chunk

#: What FlashInfer recommends for intermediate results; its wrappers share it, as they run one after the other.
_WORKSPACE_BYTES = 128 << 20


class Wrapper(Protocol):
    """``flashinfer.BatchPrefillWithPagedKVCacheWrapper`` or the one for decodes, as far as both are alike."""

    plan: Callable[..., None]
    run: Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class GroupPages:
    """One group's pages as FlashInfer has them, int32: sequence i reads ``pages[starts[i] : starts[i + 1]]``.

    ``starts`` ``[sequences + 1]`` and ``last_tokens`` ``[sequences]``, how many tokens of the last page count, are on
    the host, where they are planned with; ``pages`` are on the device.
    """

    starts: Tensor
    pages: Tensor
    last_tokens: Tensor

    @classmethod
    def of(cls, chunks: Sequence[Chunk], group: CacheGroup, *, page_tokens: int, device: torch.device) -> GroupPages:
        """The pages from the first that one of a chunk's queries looks back to."""
        held: list[Sequence[int]] = []
        for chunk in chunks:
            first = 0
            if group.window_tokens is not None:
                first = max(chunk.window_start, chunk.start + 1 - group.window_tokens, 0) // page_tokens
            held.append(chunk.tables[group.index][first : -(-(chunk.start + chunk.count) // page_tokens)])
        ends = [chunk.start + chunk.count for chunk in chunks]
        return cls(
            starts=_host([0, *accumulate(map(len, held))]),
            pages=to_device([page for pages in held for page in pages], device, dtype=torch.int32),
            last_tokens=_host([(end - 1) % page_tokens + 1 for end in ends]),
        )


class FlashInfer:
    """One rank's wrappers. Not thread-safe.

    A group has two of each kind, used in turn: FlashInfer copies a plan to the device while the host goes on, and the
    step behind, of which one at most is launched ahead, must not overwrite what is still to be copied.
    """

    def __init__(self, pools: Pools, *, heads: int, scale: float) -> None:
        """``heads`` are the query heads. Raises ``ImportError`` where FlashInfer is not usable."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        self._pools = pools
        self._heads = heads
        self._scale = scale
        device = pools.keys[0].device
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

        def wrappers() -> list[tuple[Wrapper, Wrapper]]:
            return [
                (
                    BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"),
                    BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True),
                )
                for _ in attention_groups(pools.layout)
            ]

        self._turns = cycle((wrappers(), wrappers()))

    def plan(self, chunks: Sequence[Chunk]) -> FlashInferAttention:
        """The attention of chunks that run side by side; good until the next but one is planned."""
        layout, device = self._pools.layout, self._pools.keys[0].device
        page_tokens, kv_heads, head_dim = self._pools.keys[0].shape[2:]
        dtype = self._pools.keys[0].dtype
        shape = {"num_qo_heads": self._heads, "num_kv_heads": kv_heads, "page_size": page_tokens}
        types = {"q_data_type": dtype, "kv_data_type": dtype}
        decodes = all(chunk.count == 1 for chunk in chunks)
        planned: list[_PlannedGroup] = []
        for group, (prefill, decode) in zip(attention_groups(layout), next(self._turns), strict=True):
            pages = GroupPages.of(chunks, group, page_tokens=page_tokens, device=device)
            held = (pages.starts, pages.pages, pages.last_tokens)
            # The query itself is not counted here.
            window = -1 if group.window_tokens is None else group.window_tokens - 1
            options: dict[str, Any] = {**shape, **types, "sm_scale": self._scale, "window_left": window}
            if decodes:
                decode.plan(*held, head_dim=head_dim, **options)
            else:
                query_starts = _host([0, *accumulate(chunk.count for chunk in chunks)])
                prefill.plan(query_starts, *held, head_dim_qk=head_dim, causal=True, **options)
            writes = group_writes(chunks, group, page_tokens=page_tokens, device=device)
            planned.append(_PlannedGroup(decode if decodes else prefill, writes))
        return FlashInferAttention(self._pools, planned)


@dataclass(frozen=True, slots=True)
class _PlannedGroup:
    wrapper: Wrapper
    writes: Tensor


class FlashInferAttention:
    """Attention of one batch, as the decoder asks for it."""

    def __init__(self, pools: Pools, groups: Sequence[_PlannedGroup]) -> None:
        self._pools = pools
        self._groups = groups

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cached, row = self._pools.places[layer]
        keys, values = self._pools.of_layer(layer, cached.index, row)
        group = self._groups[cached.index]
        keys.flatten(0, 1).index_copy_(0, group.writes, key)
        values.flatten(0, 1).index_copy_(0, group.writes, value)
        return group.wrapper.run(query.contiguous(), (keys, values))


def _host(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
