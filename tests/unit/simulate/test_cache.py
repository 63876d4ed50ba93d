"""A rank's cache: what is evicted, what stays, and that the books agree after anything."""

from __future__ import annotations

import random

from loadtest.simulate.cache import RunCache
from loadtest.simulate.runs import Run


def cache_of(capacity: int) -> tuple[RunCache, list[tuple[Run, int]]]:
    evicted: list[tuple[Run, int]] = []
    return RunCache(capacity, lambda run, left: evicted.append((run, left))), evicted


def visit(cache: RunCache, *path: tuple[Run, int], extra: int = 0) -> bool:
    if not cache.take(path, extra):
        return False
    cache.give_back(path, extra)
    return True


def test_the_least_recently_used_loses_its_tail_first() -> None:
    """10 blocks: a holds 6, b needs 7. Three of a's blocks go, from its end."""
    cache, evicted = cache_of(10)
    a, b = Run(), Run()
    visit(cache, (a, 6))
    visit(cache, (b, 7))

    assert evicted == [(a, 3)]
    assert cache.match(((a, 6),)) == 3
    assert cache.match(((b, 7),)) == 7


def test_a_leaf_goes_before_its_parent() -> None:
    """Head 4 with leaves 3 and 3 fill the pool; 5 more take the older leaf, then two blocks of the younger one."""
    cache, evicted = cache_of(10)
    head, old, young, other = Run(), Run(), Run(), Run()
    visit(cache, (head, 4), (old, 3))
    visit(cache, (head, 4), (young, 3))
    visit(cache, (other, 5))

    assert evicted == [(old, 0), (young, 1)]
    assert cache.match(((head, 4), (young, 3))) == 5


def test_what_is_in_use_stays_and_bounds_what_may_start() -> None:
    """6 of 10 blocks are in use and 2 belong to a reply: 3 do not fit, 2 do."""
    cache, evicted = cache_of(10)
    used, waiting = Run(), Run()
    assert cache.take(((used, 6),), 2)

    assert not cache.take(((waiting, 3),), 0)
    assert cache.take(((waiting, 2),), 0)
    assert evicted == []
    cache.give_back(((used, 6),), 2)
    assert cache.used == 8


def test_the_books_agree_after_anything() -> None:
    """Random paths of a random tree, taken and given back in any order."""
    rng = random.Random(3)
    cache, _ = cache_of(60)
    trunk = [(Run(), rng.randint(1, 9)) for _ in range(3)]
    branches = [[(Run(), rng.randint(1, 12)) for _ in range(rng.randint(1, 3))] for _ in range(8)]
    running = []
    for _ in range(3000):
        if running and rng.random() < 0.5:
            cache.give_back(*running.pop(rng.randrange(len(running))))
        else:
            whole = [*trunk[: rng.randint(0, 3)], *rng.choice(branches)] if rng.random() < 0.5 else [*trunk]
            kept = whole[: rng.randint(1, len(whole))]
            if len({id(run) for run, _ in kept}) == len(kept) and kept[0] in (trunk[0], *(b[0] for b in branches)):
                path = tuple(kept)
                if cache.take(path, extra := rng.randint(0, 5)):
                    assert cache.match(path) == sum(blocks for _, blocks in path)
                    running.append((path, extra))
        cache.check()
