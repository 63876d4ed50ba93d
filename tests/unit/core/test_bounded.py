"""The bound holds for all that is held, whatever a stream of events says, and for all indexes together."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from router.core.blocks import SLICE
from router.core.bounded import _LONGEST_ADAPTER, _MOST_ADAPTERS
from router.core.budget import Budget
from router.core.forecast import Pool
from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored, Event

FULL = "full_attention"
MOST = 1024


def twenty(number: int) -> BlockStored:
    """A chain of twenty blocks."""
    return BlockStored(tuple(range(20 * number, 20 * number + 20)), None, [number] * 320, 16, kind=FULL)


def one(name: int, *, tokens: int | None = None, kind: str = FULL, group: int = 0) -> BlockStored:
    """A chain of one block."""
    text = [name if tokens is None else tokens] * 16
    return BlockStored((name,), None, text, 16, group=group, kind=kind, window_tokens=64 if kind != FULL else None)


def ends_inside_a_block(number: int) -> Iterator[Event]:
    yield one(number) if number else BlockStored((1 << 40,), None, list(range(32)), 32, kind=FULL)


def other_names_for_one_block(number: int) -> Iterator[Event]:
    yield one(number, tokens=7)


def windows_whose_dense_block_goes(number: int) -> Iterator[Event]:
    yield one(number)
    yield one(number, group=1, kind="sliding_window")
    yield BlockRemoved((number,))


def all_groups_of_a_block(number: int) -> Iterator[Event]:
    yield one(number)
    yield from (one(number, group=group, kind="sliding_window") for group in range(1, 6))


def tiers(number: int) -> Iterator[Event]:
    yield one(number % 50)
    yield replace(one(number % 50), medium=f"TIER-{number}")
    yield BlockRemoved((number % 50,), medium=f"OTHER-{number}")


def adapters(number: int) -> Iterator[Event]:
    yield replace(one(number), lora_name=f"{number}" + "x" * _LONGEST_ADAPTER * (number % 2))


def wide_orphans(number: int) -> Iterator[Event]:
    yield replace(one(number), parent=1 << 50 | number, extra_keys=(["x" * 10_000 + str(number)],))


def long_chains(number: int) -> Iterator[Event]:
    yield BlockStored(tuple(range(512 * number, 512 * number + 512)), None, [number] * 16 * 512, 16, kind=FULL)


@pytest.mark.parametrize(
    ("stream", "events", "most_bytes"),
    [
        (long_chains, 375, 850_000),
        (ends_inside_a_block, 8_000, 900_000),
        (other_names_for_one_block, 5_000, 500_000),
        (windows_whose_dense_block_goes, 3_000, 950_000),
        (all_groups_of_a_block, 2_000, 950_000),
        (tiers, 1_000, 300_000),
        (adapters, 10_000, 2_000_000),
        (wide_orphans, 2_000, 800_000),
    ],
)
def test_no_stream_takes_more_than_the_bound(
    stream: Callable[[int], Iterator[Event]], events: int, most_bytes: int
) -> None:
    """A thousand blocks may be held: what is held after many times as many takes no more than those would.

    ``most_bytes`` is a third more than such a stream ever takes, or more, with all that has a bound of its own:
    adapters, names of forgotten blocks. Beyond it is whatever loses a few hundred bytes, of long chains a few for each
    block, at every event.
    """
    index = PrefixIndex(block_tokens=16, max_blocks=MOST)
    index.add_rank(0, domain="engine", pool=Pool(None, all_blocks=4096))
    for number in range(64):  # tables that exist anyway
        for event in stream(number):
            index.apply(0, event)
        index.end_batch(0)
    gc.collect()
    tracemalloc.start()
    for number in range(64, events):
        for event in stream(number):
            index.apply(0, event)
        index.end_batch(0)
        assert index.budget.used <= MOST + 130
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < most_bytes
    assert len(index.adapters) <= _MOST_ADAPTERS
    assert len(index._tiers) <= 16


def test_further_holders_of_a_block_count() -> None:
    """Forty ranks hold the same prompts: what the thirty-nine others take leaves room for fewer blocks."""
    index = PrefixIndex(block_tokens=16, max_blocks=MOST)
    for slot in range(40):
        index.add_rank(slot, domain="engine")
    for number in range(40):
        for slot in range(40):
            index.apply(slot, twenty(number))
            index.end_batch(slot)
    held = sum(index.blocks(slot) for slot in range(40))
    assert held > 20 * len(index) > 20 * 200
    assert len(index) + (held - len(index)) // 14 <= MOST + 100


def test_the_ends_of_prompts_that_came_last_stay() -> None:
    """What is forgotten of ends inside a block is what came first, and nothing is promised of it any more."""
    index = PrefixIndex(block_tokens=16, max_blocks=MOST)
    index.add_rank(0, domain="engine")
    index.meet(0, [BlockStored((), None, (), 32, group=1, kind="mamba")])
    for number in range(3 * MOST):
        for event in ends_inside_a_block(number):
            index.apply(0, event)
        index.apply(0, one(number, group=1, kind="mamba"))

    def found(number: int) -> dict[int, int]:
        keys = block_keys([number] * 16, block_tokens=16, parent=namespace_seed("", ""))
        return index.reusable_tokens(keys, prompt_tokens=17)

    assert [found(number) for number in (1, 3 * MOST - 1)] == [{}, {0: 16}]
    assert index.evicted_blocks > MOST


def test_indexes_of_one_budget_have_one_bound() -> None:
    """Who has most makes room: an index with little keeps it beside one that is flooded."""
    budget = Budget(MOST)
    small, large = (PrefixIndex(block_tokens=16, budget=budget) for _ in range(2))
    for index in (small, large):
        index.add_rank(0, domain="engine")
    for number in range(5):
        small.apply(0, twenty(number))
    for number in range(300):
        large.apply(0, twenty(number))
        assert len(small) + len(large) <= MOST
    assert (len(small), len(large)) == (100, MOST - 100)

    for number in range(5, 300):
        small.apply(0, twenty(number))
    assert (len(small) + len(large), budget.used) == (MOST, MOST)
    assert abs(len(small) - len(large)) <= 40
    budget.leave(large)
    assert budget.used == len(small)


def test_an_event_at_the_bound_waits_for_no_chore() -> None:
    """However much is still to be let go of by and by, one event goes on with a few slices of it."""
    index = PrefixIndex(block_tokens=16, max_blocks=MOST)
    index.add_rank(0, domain="engine")
    for number in range(MOST // 20 + 1):
        index.apply(0, twenty(number))
    steps = 0

    def endless() -> Iterator[None]:
        nonlocal steps
        while True:
            steps += 1
            yield

    index._chores.append(endless())
    index.apply(0, twenty(10_000))
    index.end_batch(0)

    assert len(index) <= MOST
    assert 0 < steps <= 8 * SLICE
