"""A part of ``homing bench index``: lookups where every rank's pool is full and requests are on their way to it.

A sliding window of 128 tokens and full attention share each pool. The prompt's chain of 100 blocks lies on every rank
to another depth; four requests of as many blocks are unheard of, one runs and fills a block between any two lookups.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections.abc import Sequence

from router.core.forecast import Pool
from router.core.index import PrefixIndex
from router.core.shared_pool import SharedPool
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored

_BLOCK_TOKENS = 16
_WINDOW_TOKENS = 129
_CHAIN_BLOCKS = 100
_POOL_BLOCKS = 600
_FILLERS = 8
_UNHEARD_OF = 4
_TIMES = 25


def lookup_seconds(ranks: int, *, rng: random.Random) -> float:
    """The median of lookups, each after a block was filled on every rank."""
    index = PrefixIndex(block_tokens=_BLOCK_TOKENS)
    prompt = _draw(rng, _CHAIN_BLOCKS)
    running: list[array[int]] = []
    for rank in range(ranks):
        index.add_rank(rank, domain="engine", pool=Pool(None, all_blocks=_POOL_BLOCKS))
        for _ in range(_FILLERS):
            _store(index, rank, _draw(rng, _CHAIN_BLOCKS // 2))
        _store(index, rank, prompt[: _BLOCK_TOKENS * rng.randrange(_CHAIN_BLOCKS // 2, _CHAIN_BLOCKS + 1)])
        pool = index.pool(rank)
        assert isinstance(pool, SharedPool), "two groups share it"
        running.append(_draw(rng, _CHAIN_BLOCKS // 2))
        pool.sent(_keys(running[-1]), blocks=_CHAIN_BLOCKS // 2 + 1)
        _store(index, rank, running[-1])
        for _ in range(_UNHEARD_OF):
            pool.sent(_keys(_draw(rng, _CHAIN_BLOCKS)), blocks=_CHAIN_BLOCKS + 1)
    keys = _keys(prompt)
    taken: list[float] = []
    gc.collect()
    for _ in range(_TIMES):
        for rank in range(ranks):
            running[rank] += _draw(rng, 1)
            _store(index, rank, running[rank], start=len(running[rank]) // _BLOCK_TOKENS - 1)
        begin = time.process_time()
        index.reusable_tokens(keys, prompt_tokens=len(prompt) + 1)
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def _draw(rng: random.Random, blocks: int) -> array[int]:
    return array("I", rng.choices(range(150_000), k=blocks * _BLOCK_TOKENS))


def _keys(tokens: Sequence[int]) -> list[int]:
    return block_keys(tokens, block_tokens=_BLOCK_TOKENS, parent=namespace_seed("", ""))


def _store(index: PrefixIndex, rank: int, tokens: array[int], *, start: int = 0) -> None:
    """A prompt is stored, of which the window keeps its end, or a block of an answer, of which it keeps nothing."""
    names = tuple(key ^ 1 for key in _keys(tokens))  # the engine has names of its own
    parent = names[start - 1] if start else None
    kept = () if start else names[-(_WINDOW_TOKENS - 1) // _BLOCK_TOKENS :]
    rest = tokens[start * _BLOCK_TOKENS :]
    window = BlockStored(
        kept, parent, rest, _BLOCK_TOKENS, group=0, kind="sliding_window", window_tokens=_WINDOW_TOKENS
    )
    index.apply(rank, window)
    index.apply(rank, BlockStored(names[start:], parent, rest, _BLOCK_TOKENS, group=1, kind="full_attention"))
