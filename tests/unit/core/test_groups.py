"""What a rank's groups of layers are: learnt from events, and forgotten where they may be others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.forecast import Pool
from router.core.index import PrefixIndex
from router.core.shared_pool import SharedPool
from router.core.usable import Geometry
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event

UNIT = 4
ROOT = namespace_seed("", "")
FULL, WINDOW, STATE, CHUNK = "full_attention", "sliding_window", "mamba", "chunked_local_attention"
#: A group: its kind, the tokens that a window sees, the tokens of a block.
Layout = Sequence[tuple[str | None, int | None, int]]
LAYOUTS: Sequence[Layout] = (
    [(None, None, 4)],
    [(FULL, None, 4)],
    [(FULL, None, 8)],
    [(FULL, None, 4), (WINDOW, 9, 4)],
    [(FULL, None, 8), (WINDOW, 17, 8)],
    [(WINDOW, 9, 4), (FULL, None, 4)],
    [(FULL, None, 4), (WINDOW, 9, 4), (WINDOW, 17, 4)],
    [(FULL, None, 4), (STATE, None, 8)],
    [(FULL, None, 4), (CHUNK, None, 4)],
    [(WINDOW, 9, 4)],
    [(STATE, None, 4)],
    [(FULL, None, 4), ("cross_attention", None, 4)],
)


def an_index(*, geometry: Geometry | None = None) -> PrefixIndex:
    index = PrefixIndex(block_tokens=UNIT)
    index.add_rank(0, domain="engine", geometry=geometry or Geometry(chunk_tokens=16), pool=Pool(64, all_blocks=128))
    return index


def text(number: int) -> list[int]:
    return [number * 1000 + at for at in range(48)]


def stored(
    tokens: Sequence[int], start: int, *, process: int, group: int, kind: str | None, window: int | None, block: int
) -> BlockStored:
    """What a group says of a prompt's blocks from ``start`` on. A window keeps no more of them than it needs."""
    ends = range((start + 1) * block, len(tokens) + 1, block)
    names = [hash((process, block, *tokens[:end])) & (1 << 64) - 1 for end in ends]
    kept = {WINDOW: -(-((window or 1) - 1) // block), STATE: 1}.get(kind or FULL, len(names))
    parent = hash((process, block, *tokens[: start * block])) & (1 << 64) - 1 if start else None
    span = tuple(tokens[start * block : len(names) * block + start * block])
    return BlockStored(tuple(names[-kept:]), parent, span, block, group=group, kind=kind, window_tokens=window)


def traffic(layout: Layout, *, process: int, rng: random.Random) -> list[list[Event]]:
    """Batches of a process with these groups: prompts, some of which grow, removals, a clear."""
    batches: list[list[Event]] = []
    for _ in range(rng.randrange(1, 5)):
        tokens, end = text(rng.randrange(3)), rng.choice([16, 32, 48])
        told: list[Event] = [
            stored(tokens[:end], 0, process=process, group=group, kind=kind, window=window, block=block)
            for group, (kind, window, block) in enumerate(layout)
        ]
        rng.shuffle(told)
        batches.append(told)
        if rng.random() < 0.4:
            gone = rng.choice([event for event in told if isinstance(event, BlockStored)])
            batches.append([BlockRemoved(gone.hashes[-1:], group=gone.group)])
    if rng.random() < 0.2:
        batches.insert(rng.randrange(len(batches)), [AllBlocksCleared()])
    return batches


def feed(index: PrefixIndex, batches: Sequence[Sequence[Event]]) -> None:
    for batch in batches:
        for event in batch:
            index.apply(0, event)
        index.end_batch(0)


def picture(index: PrefixIndex) -> object:
    """All that can be seen of a rank."""
    prompts = [block_keys(text(number), block_tokens=UNIT, parent=ROOT) for number in range(3)]
    return (
        [index.reusable_tokens(keys[:end], prompt_tokens=end * UNIT + 1) for keys in prompts for end in (3, 4, 8, 12)],
        {group: keys for group, keys in index.residency(0).items() if keys},
        index.blocks(0),
        sorted(index.met(0), key=lambda event: event.group),
        index.stride(0),
        type(index.pool(0)),
    )


@given(
    before=st.sampled_from(LAYOUTS), after=st.sampled_from(LAYOUTS), seed=st.integers(0, 2**16), is_told=st.booleans()
)
def test_a_process_in_another_ones_place_is_met_as_if_it_were_the_first(
    before: Layout, after: Layout, seed: int, is_told: bool
) -> None:
    """Whatever groups there were: once it is known that it may be another process, nothing is left of them. Whether the
    last process has said a word does not matter."""
    rng = random.Random(seed)
    old, new = traffic(before, process=1, rng=rng), traffic(after, process=2, rng=rng)
    index, fresh = an_index(), an_index()
    feed(index, old if is_told else old[:1])
    index.begin_anew(0)
    feed(index, new)
    feed(fresh, new)
    assert picture(index) == picture(fresh)


def test_what_groups_were_holds_until_the_next_process_says_what_they_are() -> None:
    """Most come back as they went. Of a prompt in flight a window keeps its end alone."""
    index = an_index()
    feed(index, traffic([(FULL, None, 4), (WINDOW, 9, 4)], process=1, rng=random.Random(1)))
    index.begin_anew(0)
    keys = block_keys(text(0), block_tokens=UNIT, parent=ROOT)
    index.promise(0, keys, prompt_tokens=49)
    assert index.reusable_tokens(keys[:6], prompt_tokens=25) == {}
    assert index.met(0) == []  # for another index it is not known
    assert index.has_gaps(0)
    feed(index, [[stored(text(0), 0, process=2, group=0, kind=FULL, window=None, block=4)]])
    assert index.reusable_tokens(keys[:6], prompt_tokens=25) == {0: 24}
    assert not index.has_gaps(0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(FULL, None, 4), (WINDOW, 9, 4)], [(FULL, None, 4), (WINDOW, 33, 4)]),
        ([(FULL, None, 4), (WINDOW, 9, 4)], [(FULL, None, 4), (STATE, None, 4)]),
        ([(WINDOW, 9, 4), (FULL, None, 4)], [(FULL, None, 4)]),
        ([(FULL, None, 4)], [(WINDOW, 9, 4), (FULL, None, 4)]),
    ],
)
def test_a_group_that_says_that_it_is_another_is_believed(before: Layout, after: Layout) -> None:
    """Nobody saw the restart. What the old process held is gone; told again, the new one is judged by its own rules."""
    index, fresh = an_index(), an_index()
    feed(index, traffic(before, process=1, rng=random.Random(1)))
    assert not index.was_contradicted(0)
    told: list[Event] = [
        stored(text(7), 0, process=2, group=group, kind=kind, window=window, block=block)
        for group, (kind, window, block) in enumerate(after)
    ]
    feed(index, [told])
    assert index.was_contradicted(0)
    index.clear(0)
    for each in (index, fresh):
        feed(each, [told])
    assert not index.was_contradicted(0)
    assert picture(index) == picture(fresh)


def test_what_an_event_leaves_out_is_no_contradiction() -> None:
    """One without kind or window is of the group that is known."""
    index = an_index()
    feed(index, [[stored(text(0)[:16], 0, process=1, group=0, kind=FULL, window=None, block=4)]])
    feed(index, [[stored(text(0), 4, process=1, group=0, kind=None, window=None, block=4)]])
    assert index.blocks(0) == 12


def test_a_batch_of_sparse_groups_alone_decides_nothing_for_good() -> None:
    """Who begins to listen late may first hear of a window that was computed again. Once full attention is met, what it
    names counts, at its true place, and what a full pool will give up is foretold as ever."""
    index = an_index()
    full = stored(text(0), 0, process=1, group=0, kind=FULL, window=None, block=4)
    window = BlockStored(full.hashes[5:7], full.hashes[4], (*text(0)[20:28],), 4, group=1, kind=WINDOW, window_tokens=9)
    early = BlockStored(full.hashes[:2], None, (*text(0)[:12],), 4, group=1, kind=WINDOW, window_tokens=9)
    feed(index, [[window], [early]])  # taken to be blocks 1 and 2; they are 0 and 1
    assert index.blocks(0) == 2
    feed(index, [[full]])
    assert index.blocks(0) == 12
    assert index.residency(0)[1] == frozenset(block_keys(text(0), block_tokens=UNIT, parent=ROOT)[:2])
    assert isinstance(index.pool(0), SharedPool)


@given(seed=st.integers(0, 2**16))
def test_blocks_are_counted_as_they_are_held(seed: int) -> None:
    """Whatever is told first of a rank with full attention, and in whatever order: the count is that of the chains."""
    rng = random.Random(seed)
    index = an_index()
    layout = rng.choice([layout for layout in LAYOUTS if any(kind in (None, FULL) for kind, _, _ in layout)])
    events = [event for batch in traffic(layout, process=1, rng=rng) for event in batch]
    rng.shuffle(events)
    for event in events:
        feed(index, [[event]])
    if not index.has_gaps(0):
        assert index.blocks(0) == len(index.residency(0)[-1])


@pytest.mark.parametrize("block", [UNIT, 2 * UNIT])
def test_a_dense_event_of_no_blocks_changes_nothing(block: int) -> None:
    """Behind an unknown parent, beside a prompt in flight, and where a block has several units."""
    index = an_index()
    feed(index, [[stored(text(0), 0, process=1, group=0, kind=FULL, window=None, block=block)]])
    index.promise(0, block_keys(text(1), block_tokens=UNIT, parent=ROOT), prompt_tokens=49)
    before = index.residency(0)
    for tokens in (UNIT, block):
        index.apply(0, BlockStored((), 99, (), tokens, kind=FULL))
        index.apply(0, BlockStored((), None, (), tokens, kind=FULL))
    assert index.residency(0) == before
