"""Sliding-window layers in the simulated cache: only the window before a boundary counts, and it must be whole."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulate.runs import Path, Run, path_blocks
from loadtest.simulate.windows import Span, WindowCache, believed_usable, usable_blocks, window_before


def cache_of(capacity: int, window: int) -> tuple[WindowCache, list[tuple[Run, Span | None]]]:
    told: list[tuple[Run, Span | None]] = []
    return WindowCache(capacity, window, lambda run, span: told.append((run, span))), told


def visit(cache: WindowCache, *path: tuple[Run, int], fork: int = 0) -> bool:
    depth = path_blocks(path)
    if not cache.has_room(path, depth):
        return False
    cache.take(path, depth, fork=fork)
    cache.give_back(path, depth)
    return True


@st.composite
def held_paths(draw: st.DrawFn) -> tuple[Path, dict[Run, Span]]:
    path, spans = [], {}
    for _ in range(draw(st.integers(1, 4))):
        run = Run()
        path.append((run, draw(st.integers(1, 6))))
        low = draw(st.integers(0, 6))
        spans[run] = (low, draw(st.integers(low, 8)))
    return tuple(path), spans


@given(held_paths(), st.integers(0, 24), st.integers(1, 7))
def test_usable_is_the_deepest_block_with_its_whole_window(
    held: tuple[Path, dict[Run, Span]], most: int, window: int
) -> None:
    """Against looking at each block of each window."""
    path, spans = held
    there = [spans[run][0] <= block < spans[run][1] for run, blocks in path for block in range(blocks)]
    depths = range(min(most, len(there)) + 1)
    expected = max(depth for depth in depths if all(there[max(0, depth - window) : depth]))

    assert usable_blocks(path, most, spans, window=window) == expected


def test_each_slot_lets_use_what_its_windows_do() -> None:
    """Of a run that three slots store one has the window at block 40, one an earlier window, and one none."""
    run = Run(spans={0: (24, 40), 1: (4, 20)})
    stored = dict.fromkeys(range(3), 40)

    assert believed_usable(((run, 40),), stored, window=16) == {0: 40, 1: 20, 2: 0}


def test_a_conversation_resumes_where_its_last_prompt_ended() -> None:
    """100 blocks, then 130 of the same run with a window of 16: all 100 can be used, and afterwards all 130."""
    cache, _ = cache_of(64, 16)
    run = Run()
    visit(cache, (run, 100))
    assert cache.usable(((run, 130),), 130) == 100

    visit(cache, (run, 130))
    assert cache.usable(((run, 130),), 130) == 130
    assert cache.usable(((run, 130),), 110) == 0  # the window before 110 has slid away
    assert cache.used == 16


def test_the_oldest_window_goes_and_takes_the_whole_prefix_along() -> None:
    """Two windows fit; with the third the first is gone, however much other layers hold of it."""
    cache, told = cache_of(32, 16)
    one, two, three = Run(), Run(), Run()
    for run in (one, two, three):
        visit(cache, (run, 50))

    assert told == [(one, None)]
    assert cache.usable(((one, 50),), 50) == 0
    assert cache.usable(((three, 50),), 50) == 50


def test_a_shared_head_can_be_used_once_it_was_seen_to_fork() -> None:
    """Of a head of 40 blocks nothing is left by the first prompt; the second leaves the window at the fork behind."""
    cache, _ = cache_of(1000, 16)
    head, one, two, three = Run(), Run(), Run(), Run()
    visit(cache, (head, 40), (one, 60))
    assert cache.usable(((head, 40), (two, 60)), 40) == 0

    visit(cache, (head, 40), (two, 60), fork=40)
    assert cache.usable(((head, 40), (three, 60)), 40) == 40


def test_windows_in_use_stay_and_refuse_others_their_place() -> None:
    """One window of two is in use: the next may have the other, and no third is let in."""
    cache, _ = cache_of(32, 16)
    one, two = Run(), Run()
    cache.take(((one, 50),), 50, fork=0)
    assert visit(cache, (two, 50))
    cache.take(((two, 50),), 50, fork=0)

    assert not visit(cache, (Run(), 50))
    assert cache.spans == {one: (34, 50), two: (34, 50)}


def test_the_books_agree_after_anything() -> None:
    """Random growth, forks and ends: never over capacity, and what is in use is whole."""
    rng = random.Random(3)
    cache, _ = cache_of(60, 8)
    heads = [Run() for _ in range(3)]
    sizes: dict[Run, tuple[Run, int]] = {}
    running: list[tuple[Path, int]] = []
    for _ in range(3000):
        if running and rng.random() < 0.5:
            cache.give_back(*running.pop(rng.randrange(len(running))))
            continue
        run = rng.choice(list(sizes)) if sizes and rng.random() < 0.7 else Run()
        head, blocks = sizes.get(run, (rng.choice(heads), 0))
        if any(run in dict(path) for path, _ in running):
            continue
        sizes[run] = (head, blocks + rng.randrange(1, 12))
        path = ((head, 10), (run, sizes[run][1]))
        depth = path_blocks(path)
        if not cache.has_room(path, depth):
            continue
        cache.take(path, depth, fork=rng.choice((0, 10)))
        running.append((path, depth))

        assert cache.used == sum(high - low for low, high in cache.spans.values()) <= cache.capacity
        assert all(
            cache.spans[run][0] <= span[0] and span[1] <= cache.spans[run][1]
            for path, depth in running
            for run, span in window_before(path, depth, window=8)
        )
