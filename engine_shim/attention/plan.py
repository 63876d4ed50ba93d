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

from engine_shim.attention.blocks import Block, query_blocks
from engine_shim.attention.going_on import GoingOn, Succession
from engine_shim.placing import to_device
from engine_shim.types import NULL_PAGE, Batch, CacheGroup, CacheLayout, Chunk, GroupKind, Sunk

Integers = npt.NDArray[np.int64]
#: Up to here decodes share a segment whatever their lengths: what is hidden costs less than another call.
_SHORT_TOKENS = 255


@dataclass(slots=True)
class KeyPages:
    """The pages of a segment's B sequences; as tensors when they are first asked for, which kept keys are not.

    ``hidden`` ``[B, L]``: which of the pages' first L tokens are not a sequence's own; None: all are alike.
    ``sunk`` pages, of a sequence that is alone, are read on the host.
    """

    tables: list[list[int]]
    hidden: npt.NDArray[np.bool_] | None
    page_tokens: int
    device: torch.device
    sunk: Sunk | None = None
    _placed: tuple[Tensor, Tensor | None] | None = None
    _sunk_slots: Tensor | None = None

    @property
    def sunk_slots(self) -> Tensor:
        """Where the ``sunk`` pages are, on the host."""
        if self._sunk_slots is None:
            self._sunk_slots = torch.tensor(self.sunk.slots if self.sunk is not None else (), dtype=torch.int64)
        return self._sunk_slots

    @property
    def count(self) -> int:
        """How many there are, those included that stand behind a shorter sequence."""
        return len(self.tables) * max(map(len, self.tables))

    def placed(self) -> tuple[Tensor, Tensor | None]:
        """``[B, P]``, where behind a shorter sequence one of its pages stands again, and what is blank.

        That are tokens of the pages, counted through, which are to be zeroed before they are read, since nobody may
        have written them; None: there are none.
        """
        if self._placed is None:
            width = max(map(len, self.tables))
            # Behind its end a page that is neither its first nor its last: of that all is written.
            pages = [[*own, *[own[min(1, len(own) - 1)]] * (width - len(own))] for own in self.tables]
            blank = None
            if self.hidden is not None:
                unsure = np.array([len(own) if len(own) > 2 else width for own in self.tables]) * self.page_tokens
                rows, places = (self.hidden & (np.arange(self.hidden.shape[1]) < unsure[:, None])).nonzero()
                blank = to_device(rows * (width * self.page_tokens) + places, self.device)
            self._placed = to_device(np.array(pages, dtype=np.int64), self.device), blank
        return self._placed


@dataclass(frozen=True, slots=True)
class Segment:
    """Sequences that one attention call serves: B sequences of C queries each, over at most L keys.

    ``rows`` ``[B * C]`` are the queries' rows in the batch, a slice where they lie side by side. ``pages`` hold the
    keys, which are the tokens ``keys`` of these pages, L of them.

    Of a prefill chunk, which is alone (B = 1), ``blocks`` say what its queries see. Of decodes (C = 1) there are none:
    ``mask``, ``[B, 1, 1, L]`` of 0 and -inf, is added to the scores, and None means that all keys are seen.
    ``going_on`` is set for decodes whose keys, all from the first on, may be kept from step to step.
    """

    rows: Tensor | slice
    pages: KeyPages
    keys: slice
    mask: Tensor | None = None
    blocks: tuple[Block, ...] = ()
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

    ends = [*accumulate(chunk.count for chunk in chunks)]
    segments = []
    for members in _together(chunks, group):
        rows: Tensor | slice
        if members[-1] - members[0] == len(members) - 1:
            rows = slice(ends[members[0]] - chunks[members[0]].count, ends[members[-1]])
        else:
            rows = to_device([row for i in members for row in range(ends[i] - chunks[i].count, ends[i])], device)
        served = [chunks[i] for i in members]
        keys = _keys(served, group, page_tokens=page_tokens)
        sunk = served[0].sunk if group.kind is GroupKind.FULL else None
        if sunk is not None:  # what is rebuilt ends earlier
            sunk = sunk.up_to(len(keys.tables[0]))
        decodes = keys.count == 1
        segments.append(
            Segment(
                rows=rows,
                pages=KeyPages(keys.tables, keys.hidden, page_tokens, device, sunk),
                keys=keys.tokens,
                mask=_mask(keys.hidden, device=device, dtype=dtype) if decodes else None,
                blocks=()
                if decodes
                else query_blocks(
                    keys.count, offset=keys.offset, window=group.window_tokens, device=device, dtype=dtype
                ),
                going_on=succession.find(served, group, keys.tables, page_tokens=page_tokens, device=device)
                if succession is not None and decodes and group.kind is GroupKind.FULL
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
    """Which chunks share a segment: decodes with the short or with those within a factor of two.

    A prefill is alone, and so is whatever reads on the host.
    """

    def bucket(i: int) -> int:
        return max(_SHORT_TOKENS, min(chunks[i].start, group.window_tokens or chunks[i].start)).bit_length()

    alone = [[i] for i, chunk in enumerate(chunks) if chunk.count > 1 or chunk.sunk is not None]
    decodes = sorted((i for i, chunk in enumerate(chunks) if chunk.count == 1 and chunk.sunk is None), key=bucket)
    return alone + [list(members) for _, members in groupby(decodes, key=bucket)]


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where a segment's keys are: ``tokens`` of the pages in ``tables``, ``hidden`` as in ``KeyPages``.

    ``offset`` is how many keys come before the first query; the queries are the last ``count`` keys.
    """

    tables: list[list[int]]
    tokens: slice
    hidden: npt.NDArray[np.bool_] | None
    count: int
    offset: int


def _keys(chunks: Sequence[Chunk], group: CacheGroup, *, page_tokens: int) -> _Keys:
    """The keys of decodes, or of one prefill chunk: all that lie in the window of one of the queries."""
    window = group.window_tokens
    tables, lows, ends, reach = [], [], [], 0
    for chunk in chunks:
        reach = chunk.start if window is None else min(chunk.start - chunk.window_start, window - 1)
        # Counted from the first page on, the keys are those from low to end.
        first_page, low = divmod(chunk.start - reach, page_tokens)
        lows.append(low)
        ends.append(low + reach + chunk.count)
        tables.append([*chunk.tables[group.index][first_page : _pages(chunk, page_tokens)]])
    tokens, hidden = slice(lows[0], ends[0]), None
    if len({*lows}) > 1 or len({*ends}) > 1:
        tokens = slice(0, max(ends))
        places = np.arange(tokens.stop)
        hidden = places >= np.array(ends)[:, None]
        if any(lows):
            hidden |= places < np.array(lows)[:, None]
    return _Keys(tables, tokens, hidden, count=chunks[0].count, offset=reach)


def _mask(hidden: npt.NDArray[np.bool_] | None, *, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores of decodes, ``[B, 1, 1, L]``; None if nothing is hidden."""
    if hidden is None:
        return None
    mask = to_device(np.where(hidden, np.float32(-np.inf), np.float32(0.0)), device)
    return mask.to(dtype)[:, None, None, :]


def _pages(chunk: Chunk, page_tokens: int) -> int:
    """Pages that hold the chunk's sequence up to and including the chunk."""
    return -(-(chunk.start + chunk.count) // page_tokens)
