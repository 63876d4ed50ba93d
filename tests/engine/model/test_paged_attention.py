"""Paged attention of random batches against attention written out position by position."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_shim.attention import blocks
from engine_shim.attention.paged import PagedAttention, Pools
from engine_shim.attention.plan import make_plan
from engine_shim.types import Batch, CacheGroup, CacheLayout, Chunk, GroupKind, Request, Sampling

PAGE = 4
WINDOW = 6
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = 0.5
LAYERS = {0: None, 1: WINDOW}


@dataclass(frozen=True)
class Sequence:
    """A sequence's keys, values and queries at every position, ``[length, heads, head_dim]``."""

    start: int
    query: Tensor
    key: Tensor
    value: Tensor


def expected(sequence: Sequence, window: int | None) -> Tensor:
    """One query, one head and one sum at a time."""
    rows = []
    for position in range(sequence.start, len(sequence.key)):
        low = 0 if window is None else max(0, position - window + 1)
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            keys = sequence.key[low : position + 1, shared]
            scores = (keys @ sequence.query[position, head]) * SCALE
            heads.append(scores.softmax(0) @ sequence.value[low : position + 1, shared])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6),
    block=st.sampled_from((3, 8, 64)),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_any_batch(shapes: list[tuple[int, int]], block: int, seed: int) -> None:
    """Prefills and decodes of any lengths, scattered over pages, with NaN in every slot that is not theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BLOCK_QUERIES", block)
        attend_as_expected(shapes, seed)


def attend_as_expected(shapes: list[tuple[int, int]], seed: int) -> None:
    """A batch with a chunk of each shape (start, count)."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    pages = 1 + sum(-(-(start + count) // PAGE) for start, count in shapes)
    layout = CacheLayout(
        page_tokens=PAGE,
        groups=(
            CacheGroup(index=0, kind=GroupKind.FULL, layers=(0,)),
            CacheGroup(index=1, kind=GroupKind.WINDOW, layers=(1,), window_tokens=WINDOW),
        ),
        pages=(pages, pages),
    )
    cpu = torch.device("cpu")
    pools = Pools.allocate(layout, kv_heads=KV_HEADS, head_dim=HEAD_DIM, device=cpu, dtype=torch.float64)
    for pool in (*pools.keys, *pools.values):
        pool.fill_(torch.nan)

    free = [rng.sample(range(1, pages), pages - 1) for _ in layout.groups]
    chunks, sequences = [], []
    for number, (start, count) in enumerate(shapes):
        length = start + count
        shape = (length, HEADS, HEAD_DIM)
        query = torch.randn(shape, dtype=torch.float64)
        key, value = torch.randn(2, length, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        tables = tuple([pool.pop() for _ in range(-(-length // PAGE))] for pool in free)
        # Pages that the window has passed are given back: the null page stands in their place.
        passed = max(0, start - WINDOW + 1) // PAGE
        tables[1][:passed] = [0] * passed
        for group in range(2):
            for position in range(start):
                page, offset = tables[group][position // PAGE], position % PAGE
                if page:
                    pools.keys[group][0, page, offset] = key[position]
                    pools.values[group][0, page, offset] = value[position]
        request = Request(id=str(number), prompt=(0,) * length, sampling=Sampling(max_tokens=1))
        chunks.append(Chunk(request, start, count, tables, samples=True, draws=0))
        sequences.append(Sequence(start, query, key, value))

    plan = make_plan(Batch(tuple(chunks)), layout, device=cpu, dtype=torch.float64)
    attention = PagedAttention(pools, plan, scale=SCALE)
    query, key, value = (
        torch.cat([getattr(sequence, part)[sequence.start :] for sequence in sequences])
        for part in ("query", "key", "value")
    )
    for layer, window in LAYERS.items():
        wanted = torch.cat([expected(sequence, window) for sequence in sequences])
        torch.testing.assert_close(attention(layer, query, key, value), wanted)
    assert plan.sampled.tolist() == [sum(c for _, c in shapes[: i + 1]) - 1 for i in range(len(shapes))]
