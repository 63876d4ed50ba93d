"""``homing bench index``: hashing, events, lookups and memory of the cache index.

100,000 tokens in blocks of 16; chains of 2,000 blocks, each stored by one event on the next rank; lookups of a whole
chain that ranks hold to mixed depths. ``--beside`` gives the same work to Dynamo's Rust index, in turn with this one.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from router.bench.full_pools import lookup_seconds
from router.bench.running import CannotRun
from router.core.forecast import Pool
from router.core.index import PrefixIndex
from router.core.rank_state import keys_of_event
from router.option_values import whole
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored

_BLOCK_TOKENS = 16
_CHAIN_BLOCKS = 2_000
_HASH_TOKENS = 100_000
_VOCABULARY = 150_000
_RANKS = (64, 1_000)
_LOOKUP_CHAINS = 2
_FURTHER_HOLDERS = 63
_POOL_BLOCKS = 1 << 20
_PEER = Path(__file__).with_name("index_peer.py")
_TURNS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians. ``hash`` is of a cold prompt from ids to keys; ``apply`` begins with decoded events, without and with
    the hashing of their tokens; ``full_pool_lookup`` is what ``bench/full_pools`` measures."""

    hash_100k_tokens_ms: float
    apply_blocks_per_s: int
    hash_and_apply_blocks_per_s: int
    lookup_us: float
    full_pool_lookup_us: float
    bytes_per_block: int
    bytes_per_further_holder: float


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="homing bench index", description="How fast the cache index is here, and how large."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--sequences", type=whole(1), default=128, help="chains of 2,000 blocks (default: 128)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--beside",
        metavar="PYTHON",
        help="an interpreter that has ai-dynamo-runtime: measure Dynamo's index as well, in turns, and give ratios",
    )
    options = parser.parse_args(argv)
    if options.beside:
        return _beside(options.beside, sequences=options.sequences, seed=options.seed, as_json=options.json)
    small, large = (measure(ranks, sequences=options.sequences, seed=options.seed) for ranks in _RANKS)
    if options.json:
        print(json.dumps({**asdict(small), "ranks": _RANKS[0], f"ranks_{_RANKS[1]}": asdict(large)}))
        return 0
    print(f"{'':28} {_RANKS[0]:>12} ranks {_RANKS[1]:>12} ranks")
    for name, value in asdict(small).items():
        print(f"{name:28} {value:>18,} {asdict(large)[name]:>18,}")
    return 0


def _beside(python: str, *, sequences: int, seed: int, as_json: bool) -> int:
    """Both indexes in turns, at the smaller number of ranks; medians and their ratios. Returns the exit status."""
    arguments = [str(number) for number in (_RANKS[0], sequences, _CHAIN_BLOCKS, seed)]
    _run_peer(python, "--check")
    own: list[dict[str, float]] = []
    peer: list[dict[str, float]] = []
    for _ in range(_TURNS):
        own.append(asdict(measure(_RANKS[0], sequences=sequences, seed=seed)))
        peer.append(json.loads(_run_peer(python, *arguments)))
    figures = {
        name: {"homing": statistics.median(each[name] for each in own), "dynamo": statistics.median(values)}
        for name in peer[0]
        if (values := [each[name] for each in peer])
    }
    if as_json:
        print(json.dumps(figures))
        return 0
    print(f"{'':28} {'homing':>12} {'dynamo':>12} {'ratio':>8}")
    for name, pair in figures.items():
        print(f"{name:28} {pair['homing']:>12,} {pair['dynamo']:>12,} {pair['homing'] / pair['dynamo']:>8.2f}")
    return 0


def _run_peer(python: str, *arguments: str) -> str:
    """What the peer's script prints. Raises ``CannotRun``."""
    try:
        run = subprocess.run(  # noqa: S603 - the interpreter that the user named
            [python, str(_PEER), *arguments], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise CannotRun(f"{python} cannot be run: {error.strerror}") from error
    if run.returncode:
        *_, reason = run.stderr.strip().splitlines() or [f"it ended with status {run.returncode}"]
        raise CannotRun(f"{python} cannot measure Dynamo's index (pip install ai-dynamo-runtime): {reason}")
    return run.stdout


def measure(ranks: int, *, sequences: int, seed: int) -> Measured:
    """Fill an index over ``ranks`` ranks and take all its times."""
    rng = random.Random(seed)
    tokens = [rng.randrange(_VOCABULARY) for _ in range(_HASH_TOKENS)]
    hashing = _median_seconds(lambda: block_keys(tokens, block_tokens=_BLOCK_TOKENS, parent=1), times=7)
    applied, hashed_and_applied = _apply(ranks, rng=rng, sequences=sequences)
    return Measured(
        hash_100k_tokens_ms=round(hashing * 1e3, 3),
        apply_blocks_per_s=round(applied),
        hash_and_apply_blocks_per_s=round(hashed_and_applied),
        lookup_us=round(_lookup(ranks, rng=rng) * 1e6, 1),
        full_pool_lookup_us=round(lookup_seconds(ranks, rng=rng) * 1e6, 1),
        bytes_per_block=round(_bytes_per_block(ranks, rng=rng, sequences=sequences)),
        bytes_per_further_holder=round(_bytes_per_further_holder(ranks, rng=rng), 2),
    )


def _apply(ranks: int, *, rng: random.Random, sequences: int) -> tuple[float, float]:
    """Blocks a second, without and with hashing: chains that nobody held, each on the next rank."""
    events = [_stored(_chain(rng)) for _ in range(sequences)]

    def fill() -> None:
        index = _index(ranks)
        for number, event in enumerate(events):
            index.apply(number % ranks, event)

    def hash_all() -> None:
        for event in events:
            keys_of_event(event, None, unit_tokens=_BLOCK_TOKENS)

    whole, hashing = (_median_seconds(run, times=3) for run in (fill, hash_all))
    blocks = sequences * _CHAIN_BLOCKS
    return blocks / (whole - hashing), blocks / whole


def _lookup(ranks: int, *, rng: random.Random) -> float:
    """Seconds for a chain that every rank holds to a depth of its own."""
    index = _index(ranks)
    chains = [_chain(rng) for _ in range(_LOOKUP_CHAINS)]
    for chain in chains:
        for rank in range(ranks):
            index.apply(rank, _stored(chain, blocks=rng.randrange(1, _CHAIN_BLOCKS + 1)))
    times = []
    for chain in chains:
        keys = block_keys(chain.tokens, block_tokens=_BLOCK_TOKENS, parent=namespace_seed("", ""))
        lookup = partial(index.reusable_tokens, keys, prompt_tokens=len(chain.tokens) + 1)
        assert len(lookup()) == ranks
        times.append(_median_seconds(lookup, times=25))
    return statistics.median(times)


def _bytes_per_block(ranks: int, *, rng: random.Random, sequences: int) -> float:
    """Memory of an index whose blocks have one holder each. Events are gone once they are applied."""
    index = _index(ranks)
    tracemalloc.start()
    before = _allocated_bytes()
    for number in range(sequences):
        index.apply(number % ranks, _stored(_chain(rng)))
    taken = _allocated_bytes() - before
    tracemalloc.stop()
    return taken / len(index)


def _bytes_per_further_holder(ranks: int, *, rng: random.Random) -> float:
    """What a block costs more for each rank beyond its first; the ranks are the last ones, whose bits are highest."""
    index = _index(ranks)
    chain = _chain(rng)
    holders = range(ranks - 1, ranks - 1 - _FURTHER_HOLDERS, -1)
    index.apply(0, _stored(chain))
    tracemalloc.start()
    before = _allocated_bytes()
    for rank in holders:
        index.apply(rank, _stored(chain))
    taken = _allocated_bytes() - before
    tracemalloc.stop()
    return taken / (len(index) * len(holders))


@dataclass(frozen=True, slots=True)
class _Chain:
    tokens: array[int]
    names: tuple[int, ...]


def _chain(rng: random.Random) -> _Chain:
    tokens = array("I", rng.choices(range(_VOCABULARY), k=_CHAIN_BLOCKS * _BLOCK_TOKENS))
    return _Chain(tokens, tuple(rng.getrandbits(64) for _ in range(_CHAIN_BLOCKS)))


def _stored(chain: _Chain, *, blocks: int = _CHAIN_BLOCKS) -> BlockStored:
    """As a decoder makes it: ids in an array, names without the event's bytes."""
    return BlockStored(chain.names[:blocks], None, chain.tokens[: blocks * _BLOCK_TOKENS], _BLOCK_TOKENS)


def _index(ranks: int) -> PrefixIndex:
    index = PrefixIndex(block_tokens=_BLOCK_TOKENS)
    for rank in range(ranks):
        index.add_rank(rank, domain="engine", pool=Pool(_POOL_BLOCKS))
    return index


def _median_seconds(run: Callable[[], object], *, times: int) -> float:
    """CPU time, as others may use the machine; without the collector, whose pauses belong to nobody."""
    taken = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(times):
            start = time.process_time()
            run()
            taken.append(time.process_time() - start)
    finally:
        gc.enable()
    return statistics.median(taken)


def _allocated_bytes() -> int:
    """What has been allocated, and not freed, since the counting began."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
