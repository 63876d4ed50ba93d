"""A prefill chunk attends block by block of its queries, each over the keys that one of them sees.

Torch's kernel works out every score that it is asked for, the hidden ones too: of a causal chunk half of them, and
beside a short window nearly all. A block leaves most of those out, and one small mask serves all blocks of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Queries of a block on the CPU; elsewhere a chunk is one block, since a kernel's launch costs more than hidden scores.
_BLOCK_QUERIES = 64


@dataclass(frozen=True, slots=True)
class Block:
    """Side by side: queries of a chunk, and those of its keys that one of them sees.

    ``mask`` ``[queries, keys]`` of 0 and -inf is added to the scores; None: the n-th query sees the first n keys.
    """

    queries: slice
    keys: slice
    mask: Tensor | None


def query_blocks(
    count: int, *, offset: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> tuple[Block, ...]:
    """The blocks of ``count`` queries, which are the last of the chunk's keys; ``offset`` keys come before them.

    Each query sees itself and what is before it, ``window`` keys in all, or everything.
    """
    size = min(count, _BLOCK_QUERIES) if device.type == "cpu" else count
    if window is not None and offset + count <= window:
        window = None
    # What the queries of any block see, up to the last one: a block whose keys begin later has the last columns.
    before = offset + (count - 1) // size * size if window is None else window - 1
    hidden = torch.full((size, before + size), float("-inf"), device=device, dtype=dtype)
    mask = hidden.triu(before + 1)
    if window is not None:
        mask += hidden.tril(before - window)
    blocks = []
    for first in range(0, count, size):
        queries = slice(first, min(first + size, count))
        keys = slice(0 if window is None else max(0, offset + first + 1 - window), offset + queries.stop)
        rows, columns = queries.stop - first, keys.stop - keys.start
        last = before + rows
        causal = window is None and rows == columns
        blocks.append(Block(queries, keys, None if causal else mask[:rows, last - columns : last]))
    return tuple(blocks)
