"""Turns a batch into index arithmetic, once per step: which slots to write, which to read, what is masked.

A *slot* is one token's place in a pool: ``page * page_tokens + offset``. A plan is built on the host from the
request's page tables with numpy and moved to the device in one go; the layers then only index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_shim.types import NULL_PAGE, Batch, CacheGroup, CacheLayout, Chunk, GroupKind

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Sequences that one attention call serves: B sequences of C queries each, over at most L keys.

    ``rows`` ``[B * C]`` are the queries' rows in the batch. ``slots`` ``[B, L]`` are the keys' slots; a shorter
    sequence repeats its own last slot, so that no slot which nobody wrote is ever read. ``mask`` is added to the
    scores, ``[B, 1, C, L]`` of 0 and -inf; None means that every query sees every key, or, with ``causal``
    (C = L), the keys up to its own.
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The part of a plan that depends on the page table: slots to write, ``[tokens]``, and the segments."""

    writes: Tensor
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class StatePlan:
    """States of the chunks: slots to read and to write, which are ``fresh`` (start from zero), all ``[chunks]``.

    ``parts`` are the chunks that run side by side, with as many rows each: their numbers, and their rows in the batch.
    ``firm`` are the chunks without drafts, whose state is known when their rows have run; ``drafted`` are the others,
    each with its rows, of which only the first may count.
    """

    sources: Tensor
    targets: Tensor
    fresh: Tensor
    parts: tuple[tuple[Tensor, Tensor], ...]
    firm: Tensor
    drafted: tuple[tuple[int, slice], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One batch on the device. ``sampled`` holds the rows whose logits choose a token, in chunk order.

    Of a chunk with drafts these are the rows of its last own token and of each draft. ``chunks`` are as they ran, with
    drafts as positions like any other.
    ``groups`` are those of attention, none where kernels go by page tables (``tables``). ``states`` is None for a model
    without recurrent layers.
    """

    chunks: tuple[Chunk, ...]
    tokens: Tensor
    positions: Tensor
    sampled: Tensor
    groups: tuple[GroupPlan, ...]
    states: StatePlan | None


def make_plan(
    batch: Batch,
    layout: CacheLayout,
    *,
    drafts: Sequence[tuple[int, ...]] | None = None,
    device: torch.device,
    dtype: torch.dtype,
    segments: bool = True,
) -> Plan:
    """The plan of ``batch``, with the ``drafts`` of each chunk run behind it; masks are of ``dtype``.

    Without ``segments`` there are no groups.
    """
    drafts = drafts or ((),) * len(batch.chunks)
    tokens = [
        token
        for chunk, drafted in zip(batch.chunks, drafts, strict=True)
        for token in (*chunk.request.tokens[chunk.start : chunk.start + chunk.count], *drafted)
    ]
    # From here on a draft is a position like any other.
    chunks = [replace(chunk, count=chunk.count + len(tried)) for chunk, tried in zip(batch.chunks, drafts, strict=True)]
    counts = np.array([chunk.count for chunk in chunks], dtype=np.int64)
    ends = np.cumsum(counts)
    first_rows = ends - counts
    positions = np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks])
    sampling = [(end, len(tried)) for c, end, tried in zip(chunks, ends.tolist(), drafts, strict=True) if c.samples]
    sampled = np.array([row for end, tried in sampling for row in range(end - tried - 1, end)], dtype=np.int64)

    def place(array: Integers) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    attention = (group for group in layout.groups if group.kind in (GroupKind.FULL, GroupKind.WINDOW))
    return Plan(
        chunks=tuple(chunks),
        tokens=place(np.array(tokens, dtype=np.int64)),
        positions=place(positions),
        sampled=place(sampled),
        groups=tuple(
            group_plan(chunks, group, page_tokens=layout.page_tokens, device=device, dtype=dtype)
            for group in attention
            if segments
        ),
        states=_states(chunks, layout.state, first_rows, drafts=drafts, device=device) if layout.state else None,
    )


def group_plan(
    chunks: Sequence[Chunk], group: CacheGroup, *, page_tokens: int, device: torch.device, dtype: torch.dtype
) -> GroupPlan:
    """What chunks that run side by side write and read in one group of attention layers."""

    def place(array: Integers) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    ends = np.cumsum([chunk.count for chunk in chunks])
    segments = []
    for members in _together(chunks, group):
        rows = np.concatenate([np.arange(ends[i] - chunks[i].count, ends[i]) for i in members])
        keys = _keys([chunks[i] for i in members], group, page_tokens=page_tokens)
        causal = keys.offset == 0 and keys.count > 1 and not keys.windowed(group)
        mask = None if causal else _mask(keys, group, device=device, dtype=dtype)
        segments.append(Segment(rows=place(rows), slots=place(keys.slots), mask=mask, causal=causal))
    writes = group_writes(chunks, group, page_tokens=page_tokens, device=device)
    return GroupPlan(writes=writes, segments=tuple(segments))


def group_writes(chunks: Sequence[Chunk], group: CacheGroup, *, page_tokens: int, device: torch.device) -> Tensor:
    """The slots of the chunks' own positions in one group, ``[tokens]``."""
    slots = np.concatenate([_written_slots(chunk, group, page_tokens=page_tokens) for chunk in chunks])
    return torch.from_numpy(slots).to(device, non_blocking=True)


def _states(
    chunks: Sequence[Chunk],
    group: CacheGroup,
    first_rows: Integers,
    *,
    drafts: Sequence[tuple[int, ...]],
    device: torch.device,
) -> StatePlan:
    slots = np.array([chunk.tables[group.index] for chunk in chunks], dtype=np.int64)
    singles = [i for i, chunk in enumerate(chunks) if chunk.count == 1]
    parts = [(singles, first_rows[singles])] if singles else []
    for i, chunk in enumerate(chunks):
        if chunk.count > 1:
            parts.append(([i], np.arange(first_rows[i], first_rows[i] + chunk.count)))
    return StatePlan(
        sources=torch.from_numpy(slots[:, 0].copy()).to(device),
        targets=torch.from_numpy(slots[:, 1].copy()).to(device),
        fresh=torch.from_numpy(slots[:, 0] == NULL_PAGE).to(device),
        parts=tuple(
            (torch.tensor(members, device=device), torch.from_numpy(rows).to(device)) for members, rows in parts
        ),
        firm=torch.tensor([i for i, tried in enumerate(drafts) if not tried], dtype=torch.int64, device=device),
        drafted=tuple(
            (i, slice(first, first + chunk.count))
            for i, (chunk, first, tried) in enumerate(zip(chunks, first_rows.tolist(), drafts, strict=True))
            if tried
        ),
    )


def _together(chunks: Sequence[Chunk], group: CacheGroup) -> list[list[int]]:
    """Which chunks share a segment: each prefill alone, decodes with those of a length within a factor of two."""

    def bucket(i: int) -> int:
        return min(chunks[i].start, group.window_tokens or chunks[i].start).bit_length()

    prefills = [[i] for i, chunk in enumerate(chunks) if chunk.count > 1]
    decodes = sorted((i for i, chunk in enumerate(chunks) if chunk.count == 1), key=bucket)
    return prefills + [list(members) for _, members in groupby(decodes, key=bucket)]


def _written_slots(chunk: Chunk, group: CacheGroup, *, page_tokens: int) -> Integers:
    """Slots of the chunk's own positions, of the null page for those that have their place already."""
    first_page = chunk.start // page_tokens
    table = np.array(chunk.tables[group.index][first_page : _pages(chunk, page_tokens)], dtype=np.int64)
    positions = np.arange(chunk.start, chunk.start + chunk.count)
    pages = table[positions // page_tokens - first_page]
    if group.kind is not GroupKind.WINDOW:
        pages = np.where(positions < chunk.rebuilt_until, NULL_PAGE, pages)
    return pages * page_tokens + positions % page_tokens


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where a segment's keys are, ``slots`` ``[B, L]``, of which the first ``lengths`` are real.

    ``offset`` is how many keys come before the first query; the queries are the last ``count`` keys.
    """

    slots: Integers
    lengths: Integers
    count: int
    offset: int

    def windowed(self, group: CacheGroup) -> bool:
        """Some query has a key out of its window."""
        return group.window_tokens is not None and self.slots.shape[1] > group.window_tokens


def _keys(chunks: Sequence[Chunk], group: CacheGroup, *, page_tokens: int) -> _Keys:
    """The keys of decodes, or of one prefill chunk: all that lie in the window of one of the queries."""
    starts = np.array([chunk.start for chunk in chunks])
    reach = starts
    if group.window_tokens is not None:
        reach = np.minimum(starts - [chunk.window_start for chunk in chunks], group.window_tokens - 1)
    lows = starts - reach
    lengths = reach + chunks[0].count
    positions = lows[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)

    first_pages = lows // page_tokens
    held = [
        chunk.tables[group.index][first : _pages(chunk, page_tokens)]
        for chunk, first in zip(chunks, first_pages.tolist(), strict=True)
    ]
    tables = np.zeros((len(chunks), max(len(pages) for pages in held)), dtype=np.int64)
    for row, pages in enumerate(held):
        tables[row, : len(pages)] = pages
    found = np.take_along_axis(tables, positions // page_tokens - first_pages[:, None], axis=1)
    slots = found * page_tokens + positions % page_tokens
    return _Keys(slots=slots, lengths=lengths, count=chunks[0].count, offset=int(reach[0]))


def _mask(keys: _Keys, group: CacheGroup, *, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """What is added to a segment's scores, built on the device; None if nothing is to be hidden."""
    length = keys.slots.shape[1]
    if keys.count == 1:
        # All real keys of a decode are visible; only repeated ones are not.
        if keys.lengths.min() == length:
            return None
        lengths = torch.from_numpy(keys.lengths).to(device, non_blocking=True)
        hidden = torch.arange(length, device=device) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return mask[:, None, None, :]
    mask = torch.zeros(keys.count, length, device=device, dtype=dtype)
    # Query i is key offset + i: later keys are hidden, and so are those a window or more before.
    square = mask[:, keys.offset :]
    square.masked_fill_(torch.ones_like(square, dtype=torch.bool).triu(1), float("-inf"))
    if group.window_tokens is not None and keys.windowed(group):
        passed = torch.ones_like(mask, dtype=torch.bool).tril(keys.offset - group.window_tokens)
        mask.masked_fill_(passed, float("-inf"))
    return mask[None, None]


def _pages(chunk: Chunk, page_tokens: int) -> int:
    """Pages that hold the chunk's sequence up to and including the chunk."""
    return -(-(chunk.start + chunk.count) // page_tokens)
