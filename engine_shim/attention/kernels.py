"""Triton kernels of paged attention: keys and values are read where they lie, page by page, nothing is gathered.

``extend_kernel`` serves chunks of several queries, ``decode_kernel`` single ones: it splits a long context among
programs, whose parts ``join_kernel`` puts together. Both run ``_softmax_over``, the one loop over keys.

What changes from step to step is read from tensors (lengths, page tables) or is a scalar that Triton does not
specialise on (window, strides): no length compiles anew, and a captured launch serves every later length.
A slot's number is 64 bits wide before it is multiplied: a pool may hold more than 2^31 elements.
Sources: Dao, FlashAttention-2 (2023) and Flash-Decoding (2023); packing the heads of a key head into one tile, and the
null page, are as in vLLM's kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fetch(cache, first, dims, held, query, HEAD_DIM: tl.constexpr, HEAD_STRIDE: tl.constexpr):
    """Keys or values ``[KEYS, DIM]`` of one head, in the query's type; ``first`` ``[KEYS]`` is where each begins.

    Where heads lie further apart than they are long the cache is packed (``fp8``): e4m3fn codes, the scale behind them.
    """
    present = held[:, None] & (dims < HEAD_DIM)[None, :]
    fetched = tl.load(cache + first[:, None] + dims[None, :], mask=present, other=0)
    if HEAD_STRIDE != HEAD_DIM:
        scale = tl.load((cache + first + HEAD_DIM).to(tl.pointer_type(tl.float32)), mask=held, other=0.0)
        # A half has one bit of exponent more, whose bias is greater by 8, and seven bits of mantissa more.
        bits = fetched.to(tl.uint16)
        half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * 256.0 * scale[:, None]
        fetched = tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(query.dtype)
    return fetched


@triton.jit
def _softmax_over(
    query,
    positions,
    low,
    high,
    keys,
    values,
    pages,
    head,
    slot_stride,
    scale,
    window,
    HEAD_DIM: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Queries ``[ROWS, DIM]`` over the keys [low, high) of one sequence and key head.

    Returns the largest score and the sum of weights of each row, ``[ROWS]``, and the weighted values
    ``[ROWS, DIM]``, not yet divided; a row that sees no key has -inf, 0 and zeros. No other slot is read: what stands
    there may be NaN.
    """
    dims = tl.arange(0, DIM)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(low, high, KEYS):
        at = start + tl.arange(0, KEYS)
        held = at < high
        page = tl.load(pages + at // PAGE_TOKENS, mask=held, other=0)
        slot = page.to(tl.int64) * PAGE_TOKENS + at % PAGE_TOKENS
        first = slot * slot_stride + head * HEAD_STRIDE
        key = _fetch(keys, first, dims, held, query, HEAD_DIM, HEAD_STRIDE)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = (at[None, :] <= positions[:, None]) & (at[None, :] > positions[:, None] - window) & held[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Where nothing has been seen yet, -inf - -inf would be NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp(scores - base[:, None])
        fade = tl.exp(peak - base)
        value = _fetch(values, first, dims, held, query, HEAD_DIM, HEAD_STRIDE)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        peak = new_peak
    return peak, total, mixed


@triton.jit(do_not_specialize=["query_stride", "pages_stride", "slot_stride", "window"])
def extend_kernel(
    out,
    query,
    keys,
    values,
    pages,
    starts,
    query_starts,
    lengths,
    extends,
    query_stride,
    pages_stride,
    slot_stride,
    scale,
    window,
    REPEATS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid (blocks of ROWS // REPEATS queries, sequences of ``extends``, key heads). ``out`` is contiguous."""
    head = tl.program_id(2)
    sequence = tl.load(extends + tl.program_id(1))
    first_row = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first_row
    length = tl.load(lengths + sequence)
    QUERIES: tl.constexpr = ROWS // REPEATS
    first = tl.program_id(0) * QUERIES
    if first < count:
        # A row is one query and one of the heads that share the key head.
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM)
        number = first + rows // REPEATS
        real = (rows < QUERIES * REPEATS) & (number < count)
        present = real[:, None] & (dims < HEAD_DIM)[None, :]
        row = (first_row + number).to(tl.int64)
        inner = ((head * REPEATS + rows % REPEATS) * HEAD_DIM)[:, None] + dims[None, :]
        loaded = tl.load(query + (row * query_stride)[:, None] + inner, mask=present, other=0.0)
        before = length - count
        low = tl.maximum(before + first - window + 1, tl.load(starts + sequence))
        high = before + tl.minimum(first + QUERIES, count)
        _, total, mixed = _softmax_over(
            loaded,
            before + number,
            low,
            high,
            keys,
            values,
            pages + sequence.to(tl.int64) * pages_stride,
            head,
            slot_stride,
            scale,
            window,
            HEAD_DIM,
            HEAD_STRIDE,
            DIM,
            PAGE_TOKENS,
            ROWS,
            KEYS,
        )
        attended = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        out_stride = tl.num_programs(2) * REPEATS * HEAD_DIM
        tl.store(out + (row * out_stride)[:, None] + inner, attended.to(out.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["query_stride", "pages_stride", "slot_stride", "window"])
def decode_kernel(
    peaks,
    totals,
    mixes,
    query,
    keys,
    values,
    pages,
    starts,
    query_starts,
    lengths,
    decodes,
    query_stride,
    pages_stride,
    slot_stride,
    scale,
    window,
    SPLITS: tl.constexpr,
    REPEATS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid (sequences of ``decodes``, key heads, SPLITS): each program takes an equal share of the visible keys.

    ``peaks`` and ``totals`` ``[decodes, heads, SPLITS]`` and ``mixes`` ``[decodes, heads, SPLITS, HEAD_DIM]`` are
    float32 and contiguous. A length of 0 is a place that nobody fills.
    """
    number = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(decodes + number)
    row = tl.load(query_starts + sequence).to(tl.int64)
    length = tl.load(lengths + sequence)
    low = tl.maximum(length - window, tl.load(starts + sequence))
    share = tl.cdiv(tl.cdiv(length - low, SPLITS), KEYS) * KEYS
    start = low + split * share
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    real = rows < REPEATS
    present = real[:, None] & (dims < HEAD_DIM)[None, :]
    heads = head * REPEATS + rows
    inner = (heads * HEAD_DIM)[:, None] + dims[None, :]
    loaded = tl.load(query + row * query_stride + inner, mask=present, other=0.0)
    peak, total, mixed = _softmax_over(
        loaded,
        tl.full([ROWS], 0, tl.int32) + length - 1,
        start,
        tl.minimum(start + share, length),
        keys,
        values,
        pages + sequence.to(tl.int64) * pages_stride,
        head,
        slot_stride,
        scale,
        window,
        HEAD_DIM,
        HEAD_STRIDE,
        DIM,
        PAGE_TOKENS,
        ROWS,
        KEYS,
    )
    part = (number.to(tl.int64) * tl.num_programs(1) * REPEATS + heads) * SPLITS + split
    tl.store(peaks + part, peak, mask=real)
    tl.store(totals + part, total, mask=real)
    tl.store(mixes + (part * HEAD_DIM)[:, None] + dims[None, :], mixed, mask=present)


@triton.jit
def join_kernel(
    out,
    peaks,
    totals,
    mixes,
    query_starts,
    decodes,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid (sequences of ``decodes``, heads): one softmax out of the parts of ``decode_kernel``."""
    number = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    dims = tl.arange(0, DIM)
    parts = (number * heads + head) * SPLITS + tl.arange(0, SPLITS)
    peak = tl.load(peaks + parts)
    top = tl.max(peak, 0)
    fade = tl.exp(peak - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(tl.load(totals + parts) * fade, 0)
    present = dims < HEAD_DIM
    mixed = tl.load(mixes + (parts * HEAD_DIM)[:, None] + dims[None, :], mask=present[None, :], other=0.0)
    attended = tl.sum(mixed * fade[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    row = tl.load(query_starts + tl.load(decodes + number)).to(tl.int64)
    place = out + (row * heads + head) * HEAD_DIM + dims
    tl.store(place, attended.to(out.dtype.element_ty), mask=present)
