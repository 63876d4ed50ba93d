"""Paged attention by the Triton kernels, in place of ``paged.PagedAttention``: launches, tiles and splits."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from engine_shim.attention.kernels import decode_kernel, extend_kernel, join_kernel
from engine_shim.attention.paged import Pools
from engine_shim.attention.tables import PageTables

#: Further than any context: layers without a window take the same path as those with one.
_NO_WINDOW = 2**31 - 1
#: A matrix unit's least side; single queries leave most of their tile empty.
_LEAST_ROWS = 16
_MOST_SPLITS = 64
#: Without a GPU (the interpreter): enough that contexts are split.
_INTERPRETED_PROGRAMS = 8


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program holds at a time: rows (queries times the heads of a key head), and keys. Powers of two."""

    rows: int
    keys: int


class KernelAttention:
    """Attention of one batch, as the decoder asks for it. float32, bfloat16 or float16; sums are float32."""

    def __init__(self, pools: Pools, tables: PageTables, *, scale: float, tiles: Tiles | None = None) -> None:
        self._pools = pools
        self._tables = tables
        self._scale = scale
        self._tiles = tiles

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group, row = self._pools.places[layer]
        keys, values = self._pools.of_layer(layer, group.index, row)
        writes = self._tables.groups[group.index].writes
        stored = self._pools.gathered.stored
        keys.flatten(0, 1).index_copy_(0, writes, stored(key))
        values.flatten(0, 1).index_copy_(0, writes, stored(value))
        return attend_pages(
            query,
            keys,
            values,
            tables=self._tables,
            group=group.index,
            window_tokens=group.window_tokens,
            scale=self._scale,
            tiles=self._tiles,
        )


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    tables: PageTables,
    group: int,
    window_tokens: int | None,
    scale: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """Queries ``[tokens, heads, head_dim]`` over a layer's pages ``[pages, page_tokens, kv_heads, head_dim]``.

    Pages of bytes are packed (``fp8``). The result is contiguous and has the query's shape.
    """
    page_tokens, kv_heads, head_stride = keys.shape[1:]
    heads, head_dim = query.shape[1:]
    repeats = heads // kv_heads
    if query.stride()[1:] != (head_dim, 1):
        query = query.contiguous()
    tiles = tiles or _tiles(head_dim, repeats)
    table = tables.groups[group]
    out = torch.empty(query.shape, device=query.device, dtype=query.dtype)
    sizes: dict[str, Any] = {
        "REPEATS": repeats,
        "HEAD_DIM": head_dim,
        "HEAD_STRIDE": head_stride,
        "DIM": max(_LEAST_ROWS, triton.next_power_of_2(head_dim)),
        "PAGE_TOKENS": page_tokens,
        "KEYS": tiles.keys,
    }
    scalars = (query.stride(0), table.pages.stride(0), keys.stride(1), scale, window_tokens or _NO_WINDOW)
    held = (query, keys, values, table.pages, table.starts, tables.query_starts, tables.lengths)
    if extends := tables.extends.shape[0]:
        blocks = triton.cdiv(tables.longest, tiles.rows // repeats)
        extend_kernel[blocks, extends, kv_heads](out, *held, tables.extends, *scalars, ROWS=tiles.rows, **sizes)
    if decodes := tables.decodes.shape[0]:
        splits = splits_for(decodes * kv_heads, programs=_programs(query.device))
        parts = (decodes, heads, splits)
        peaks, totals, mixes = (
            torch.empty(shape, device=query.device, dtype=torch.float32) for shape in (parts, parts, (*parts, head_dim))
        )
        rows = max(_LEAST_ROWS, triton.next_power_of_2(repeats))
        decode_kernel[decodes, kv_heads, splits](
            peaks, totals, mixes, *held, tables.decodes, *scalars, SPLITS=splits, ROWS=rows, **sizes
        )
        join_kernel[decodes, heads](
            out,
            peaks,
            totals,
            mixes,
            tables.query_starts,
            tables.decodes,
            SPLITS=splits,
            HEAD_DIM=head_dim,
            DIM=sizes["DIM"],
        )
    return out


def splits_for(programs_without: int, *, programs: int) -> int:
    """Among how many programs a decode's keys are split, a power of two: enough to fill the device, no more.

    It depends on shapes alone, not on any length, so that one captured launch serves every length.
    """
    wanted = max(1, programs // max(1, programs_without))
    return min(_MOST_SPLITS, 1 << (wanted.bit_length() - 1))


def _tiles(head_dim: int, repeats: int) -> Tiles:
    """Rows for a few queries of all heads of a key head; fewer keys of wide heads, for the sake of shared memory."""
    return Tiles(rows=max(64, triton.next_power_of_2(repeats)), keys=64 if head_dim <= 128 else 32)


@functools.cache
def _programs(device: torch.device) -> int:
    """How many programs fill the device: two for each multiprocessor."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
