"""Dynamo's Rust index at the work of ``homing bench index``: a script for a Python that has ``ai-dynamo-runtime``.

It imports nothing of this project and prints one JSON object. Arguments: ranks, chains, blocks a chain, seed; or
``--check``, to measure nothing. Dynamo's
events name their blocks by hashes made elsewhere, as JSON; making that JSON is not timed.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from dynamo._core import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found, unused-ignore]


def main() -> None:
    """Measure and print."""
    if sys.argv[1:] == ["--check"]:  # that what is imported above is there
        return
    ranks, chains, blocks, seed = map(int, sys.argv[1:])
    rng = random.Random(seed)
    tokens = [rng.randrange(150_000) for _ in range(100_000)]
    print(
        json.dumps(
            {
                "hash_100k_tokens_ms": round(_median_seconds(lambda: compute_block_hash_for_seq(tokens, 16)) * 1e3, 3),
                "apply_blocks_per_s": round(_apply(ranks, chains=chains, blocks=blocks, rng=rng)),
                "lookup_us": round(_lookup(ranks, blocks=blocks, rng=rng) * 1e6, 1),
            }
        )
    )


def _apply(ranks: int, *, chains: int, blocks: int, rng: random.Random) -> float:
    events = [_stored([rng.getrandbits(63) for _ in range(blocks)], number) for number in range(chains)]
    times = []
    for _ in range(3):
        tree = RadixTree()
        start = time.process_time()
        for number, event in enumerate(events):
            tree.apply_event(number % ranks, event)
        times.append(time.process_time() - start)
    return chains * blocks / statistics.median(times)


def _lookup(ranks: int, *, blocks: int, rng: random.Random) -> float:
    """Seconds for a chain that every rank holds to a depth of its own."""
    chain, tree = [rng.getrandbits(63) for _ in range(blocks)], RadixTree()
    for rank in range(ranks):
        tree.apply_event(rank, _stored(chain[: rng.randrange(1, blocks + 1)], rank))
    assert len(tree.find_matches(chain).scores) == ranks
    return _median_seconds(lambda: tree.find_matches(chain))


def _stored(chain: Sequence[int], number: int) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": name, "mm_extra_info": None} for name in chain]
    return json.dumps(
        {"event_id": number, "dp_rank": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
    ).encode()


def _median_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(15):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
