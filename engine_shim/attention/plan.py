"""Turns a batch into index arithmetic, once per step: which slots to write, which to read, what is masked.

A *slot* is one token's place in a pool: ``page * page_tokens + offset``. A plan is built on the host from the
request's page tables with numpy and moved to the device in one go; the layers then only index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_shim.attention.going_on import GoingOn, Succession
from engine_shim.placing import to_device
from engine_shim.types import NULL_PAGE, Batch, CacheGroup, CacheLayout, Chunk, GroupKind

Integers = npt.NDArray[np.int64]
#: Up to here decodes share a segment whatever their lengths: what is hidden costs less than another call.
_SHORT_TOKENS = 255


@dataclass(frozen=True, slots=True)
class Segment:
    """Sequences that one attention call serves: B sequences of C queries each, over at most L keys.

    ``rows`` ``[B * C]`` are the queries' rows in the batch, a slice where they lie side by side. ``pages`` ``[B, P]``
    hold the keys, which are the tokens ``keys`` of these pages, L of them; behind a shorter sequence one of its pages
    stands again. ``blank`` are the tokens of the pages, counted through, that are to be zeroed before they are read,
    since nobody may have written them; None: there are none. ``mask`` is added to the scores, ``[B, 1, C, L]`` of 0
    and -inf; None means that every query sees every key, or, with ``causal`` (C = L), the keys up to its own.
    ``going_on`` is set for decodes whose keys, all from the first on, may be kept from step to step.
    """

    rows: Tensor | slice
    pages: Tensor
    keys: slice
    blank: Tensor | None
    mask: Tensor | None
    causal: bool
    going_on: GoingOn | None = None


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
    drafts as positions like any other. ``tokens`` has a 0 where one is awaited.
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
    fills_awaited: bool = False,
    device: torch.device,
    dtype: torch.dtype,
    segments: bool = True,
    succession: Succession | None = None,
) -> Plan:
    """The plan of ``batch``, with the ``drafts`` of each chunk run behind it; masks are of ``dtype``.

    Tokens that are awaited are 0 if whoever asks ``fills_awaited`` in; else they raise ``ValueError``.
    Without ``segments`` there are no groups. ``succession`` is told of every batch of a rank in the order they run.
    """
    if succession is not None:
        succession.begin()
    if not fills_awaited and any(chunk.awaits_token for chunk in batch.chunks):
        raise ValueError("a chunk awaits a token that nobody fills in")
    drafts = drafts or ((),) * len(batch.chunks)
    tokens = [
        token for chunk, drafted in zip(batch.chunks, drafts, strict=True) for token in (*_own_tokens(chunk), *drafted)
    ]
    # From here on a draft is a position like any other.
    chunks = [
        replace(chunk, count=chunk.count + len(tried)) if tried else chunk
        for chunk, tried in zip(batch.chunks, drafts, strict=True)
    ]
    ends = list(accumulate(chunk.count for chunk in chunks))
    positions = [position for chunk in chunks for position in range(chunk.start, chunk.start + chunk.count)]
    sampling = [(end, len(tried)) for chunk, end, tried in zip(chunks, ends, drafts, strict=True) if chunk.samples]
    sampled = np.array([row for end, tried in sampling for row in range(end - tried - 1, end)], dtype=np.int64)

    def place(array: Integers) -> Tensor:
        return to_device(array, device)

    attention = (group for group in layout.groups if group.kind in (GroupKind.FULL, GroupKind.WINDOW))
    return Plan(
        chunks=tuple(chunks),
        tokens=place(np.array(tokens, dtype=np.int64)),
        positions=place(np.array(positions, dtype=np.int64)),
        sampled=place(sampled),
        groups=tuple(
            group_plan(chunks, group, page_tokens=layout.page_tokens, device=device, dtype=dtype, succession=succession)
            for group in attention
            if segments
        ),
        states=_states(chunks, layout.state, drafts=drafts, device=device) if layout.state else None,
    )


def _own_tokens(chunk: Chunk) -> Sequence[int]:
    """The chunk's tokens; 0 in the place of one that is awaited."""
    return (0,) if chunk.awaits_token else chunk.request.tokens[chunk.start : chunk.start + chunk.count]


def group_plan(
    chunks: Sequence[Chunk],
    group: CacheGroup,
    *,
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    succession: Succession | None = None,
) -> GroupPlan:
    """What chunks that run side by side write and read in one group of attention layers."""

    def place(array: Integers) -> Tensor:
        return to_device(array, device)

    ends = np.cumsum([chunk.count for chunk in chunks])
    segments = []
    for members in _together(chunks, group):
        rows: Tensor | slice
        if members[-1] - members[0] == len(members) - 1:
            rows = slice(int(ends[members[0]]) - chunks[members[0]].count, int(ends[members[-1]]))
        else:
            rows = place(np.concatenate([np.arange(ends[i] - chunks[i].count, ends[i]) for i in members]))
        served = [chunks[i] for i in members]
        keys = _keys(served, group, page_tokens=page_tokens)
        decodes = keys.count == 1 and group.kind is GroupKind.FULL
        causal = keys.offset == 0 and keys.count > 1 and not keys.windowed(group)
        segments.append(
            Segment(
                rows=rows,
                pages=place(keys.pages),
                keys=keys.tokens,
                blank=None if keys.blank is None else place(keys.blank),
                mask=None if causal else _mask(keys, group, device=device, dtype=dtype),
                causal=causal,
                going_on=succession.find(served, group, page_tokens=page_tokens, device=device)
                if succession is not None and decodes
                else None,
            )
        )
    writes = group_writes(chunks, group, page_tokens=page_tokens, device=device)
    return GroupPlan(writes=writes, segments=tuple(segments))


def group_writes(chunks: Sequence[Chunk], group: CacheGroup, *, page_tokens: int, device: torch.device) -> Tensor:
    """The slots of the chunks' own positions in one group, ``[tokens]``; null ones for those that have their place."""
    slots: list[int] = []
    for chunk in chunks:
        placed = 0 if group.kind is GroupKind.WINDOW else chunk.rebuilt_until
        position, end = chunk.start, chunk.start + chunk.count
        while position < end:
            number, offset = divmod(position, page_tokens)
            count = min(end - position, page_tokens - offset)
            page = chunk.tables[group.index][number]
            if position < placed:
                page, count = NULL_PAGE, min(count, placed - position)
            slots += range(page * page_tokens + offset, page * page_tokens + offset + count)
            position += count
    return to_device(slots, device, dtype=torch.int64)


def _states(
    chunks: Sequence[Chunk],
    group: CacheGroup,
    *,
    drafts: Sequence[tuple[int, ...]],
    device: torch.device,
) -> StatePlan:
    slots = np.array([chunk.tables[group.index] for chunk in chunks], dtype=np.int64)
    counts = np.array([chunk.count for chunk in chunks], dtype=np.int64)
    first_rows = np.cumsum(counts) - counts
    singles = [i for i, chunk in enumerate(chunks) if chunk.count == 1]
    parts = [(singles, first_rows[singles])] if singles else []
    for i, chunk in enumerate(chunks):
        if chunk.count > 1:
            parts.append(([i], np.arange(first_rows[i], first_rows[i] + chunk.count)))
    return StatePlan(
        sources=to_device(slots[:, 0].copy(), device),
        targets=to_device(slots[:, 1].copy(), device),
        fresh=to_device(slots[:, 0] == NULL_PAGE, device),
        parts=tuple((to_device(members, device), to_device(rows, device)) for members, rows in parts),
        firm=to_device([i for i, tried in enumerate(drafts) if not tried], device, dtype=torch.int64),
        drafted=tuple(
            (i, slice(first, first + chunk.count))
            for i, (chunk, first, tried) in enumerate(zip(chunks, first_rows.tolist(), drafts, strict=True))
            if tried
        ),
    )


def _together(chunks: Sequence[Chunk], group: CacheGroup) -> list[list[int]]:
    """Which chunks share a segment: each prefill alone, decodes with the short or with those within a factor of two."""

    def bucket(i: int) -> int:
        return max(_SHORT_TOKENS, min(chunks[i].start, group.window_tokens or chunks[i].start)).bit_length()

    prefills = [[i] for i, chunk in enumerate(chunks) if chunk.count > 1]
    decodes = sorted((i for i, chunk in enumerate(chunks) if chunk.count == 1), key=bucket)
    return prefills + [list(members) for _, members in groupby(decodes, key=bucket)]


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where a segment's keys are: ``tokens`` of the ``pages`` ``[B, P]``.

    ``hidden`` ``[B, L]`` are not a sequence's own, of which ``blank``, counted through all tokens of the pages, may be
    anything; both None where all are alike. ``offset`` is how many keys come before the first query; the queries are
    the last ``count`` keys.
    """

    pages: Integers
    tokens: slice
    hidden: npt.NDArray[np.bool_] | None
    blank: Integers | None
    count: int
    offset: int

    @property
    def length(self) -> int:
        """L."""
        return int(self.tokens.stop - self.tokens.start)

    def windowed(self, group: CacheGroup) -> bool:
        """Some query has a key out of its window."""
        return group.window_tokens is not None and self.length > group.window_tokens


def _keys(chunks: Sequence[Chunk], group: CacheGroup, *, page_tokens: int) -> _Keys:
    """The keys of decodes, or of one prefill chunk: all that lie in the window of one of the queries."""
    window = group.window_tokens
    held, lows, ends, reach = [], [], [], 0
    for chunk in chunks:
        reach = chunk.start if window is None else min(chunk.start - chunk.window_start, window - 1)
        # Counted from the first page on, the keys are those from low to end.
        first_page, low = divmod(chunk.start - reach, page_tokens)
        lows.append(low)
        ends.append(low + reach + chunk.count)
        held.append(chunk.tables[group.index][first_page : _pages(chunk, page_tokens)])
    width = max(map(len, held))
    # Behind its end a page that is neither its first nor its last: of that all is written.
    pages = np.array([[*own, *[own[min(1, len(own) - 1)]] * (width - len(own))] for own in held], dtype=np.int64)
    tokens, hidden, blank = slice(lows[0], ends[0]), None, None
    if len({*lows}) > 1 or len({*ends}) > 1:
        tokens = slice(0, max(ends))
        places = np.arange(tokens.stop)
        hidden = (places < np.array(lows)[:, None]) | (places >= np.array(ends)[:, None])
        unsure = np.array([len(own) if len(own) > 2 else width for own in held]) * page_tokens
        rows, places = (hidden & (places < unsure[:, None])).nonzero()
        blank = rows * (width * page_tokens) + places
    return _Keys(pages, tokens, hidden, blank, count=chunks[0].count, offset=reach)


def _mask(keys: _Keys, group: CacheGroup, *, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """What is added to a segment's scores, built on the device; None if nothing is to be hidden."""
    length = keys.length
    if keys.count == 1:
        # All real keys of a decode are visible.
        if keys.hidden is None:
            return None
        hidden = to_device(keys.hidden, device)
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
