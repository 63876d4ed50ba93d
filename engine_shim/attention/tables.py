"""Where kernels find one batch: page tables and lengths as tensors; nothing is gathered or masked beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_shim.attention.plan import group_writes
from engine_shim.placing import to_device
from engine_shim.types import CacheGroup, CacheLayout, Chunk, GroupKind


@dataclass(frozen=True, slots=True)
class GroupTable:
    """One group's part: slots to write, int64 ``[tokens]``, and page tables, int32 ``[sequences, width]``.

    ``starts`` ``[sequences]``: no query looks back further than that position. A row is read from there, or from the
    first query's window on, as far as its sequence's length.
    """

    writes: Tensor
    pages: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True)
class PageTables:
    """One batch on the device; all int32 but the writes.

    ``query_starts`` ``[sequences + 1]``: the sequences' first rows in the batch (FlashAttention's cu_seqlens_q);
    ``lengths`` ``[sequences]``: their keys, those of the batch included. ``decodes`` and ``extends`` are the numbers of
    the sequences with one query and with more, of which the longest has ``longest``.
    """

    query_starts: Tensor
    lengths: Tensor
    decodes: Tensor
    extends: Tensor
    longest: int
    groups: tuple[GroupTable, ...]


def page_tables(chunks: Sequence[Chunk], layout: CacheLayout, *, device: torch.device) -> PageTables:
    """The tables of chunks that run side by side."""
    counts = [chunk.count for chunk in chunks]

    def place(numbers: Sequence[int]) -> Tensor:
        return to_device(numbers, device, dtype=torch.int32)

    return PageTables(
        query_starts=place(np.cumsum([0, *counts]).tolist()),
        lengths=place([chunk.start + chunk.count for chunk in chunks]),
        decodes=place([i for i, count in enumerate(counts) if count == 1]),
        extends=place([i for i, count in enumerate(counts) if count > 1]),
        longest=max(counts),
        groups=tuple(
            GroupTable(
                writes=group_writes(chunks, group, page_tokens=layout.page_tokens, device=device),
                pages=to_device(_pages(chunks, group, page_tokens=layout.page_tokens), device),
                starts=place([0 if group.window_tokens is None else chunk.window_start for chunk in chunks]),
            )
            for group in attention_groups(layout)
        ),
    )


def attention_groups(layout: CacheLayout) -> tuple[CacheGroup, ...]:
    """The groups of the model's own attention layers."""
    return tuple(group for group in layout.groups if group.kind in (GroupKind.FULL, GroupKind.WINDOW))


def _pages(chunks: Sequence[Chunk], group: CacheGroup, *, page_tokens: int) -> Tensor:
    held = [-(-(chunk.start + chunk.count) // page_tokens) for chunk in chunks]
    pages = np.zeros((len(chunks), max(held)), dtype=np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, held, strict=True)):
        pages[row, :count] = chunk.tables[group.index][:count]
    return torch.from_numpy(pages)
