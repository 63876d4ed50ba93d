"""Rings against an oracle that knows what each page was last claimed for: nothing referenced is ever written over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.cache.pool import PageError, PagePool
from engine_shim.cache.ring import Rings

PAGE = 4
# (owner, pages to claim, pages to let go of, whether to end)
Moves = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 4), st.integers(0, 9)), max_size=40)


@given(moves=Moves, ring=st.integers(1, 6), room=st.integers(1, 18))
def test_a_claim_is_granted_exactly_when_nothing_is_read_there(
    moves: list[tuple[int, int, int, int]], ring: int, room: int
) -> None:
    """For every size of ring, short ones too: what an owner may read is its own until it lets go of it."""
    pool = PagePool(1 + room)
    rings = Rings(pool, pages=ring, page_tokens=PAGE)
    stands: dict[int, tuple[int, int]] = {}  # page: owner and number
    spans: dict[int, tuple[int, int]] = {}  # owner: what it may read, [from, to)
    lives: set[tuple[int, int]] = set()  # page and generation of every claim
    for owner, claims, passed, end in moves:
        name = str(owner)
        if owner not in spans:
            fits = pool.free_pages >= ring
            if not fits:
                with pytest.raises(PageError, match="pages asked"):
                    rings.open(name)
                continue
            rings.open(name)
            spans[owner] = (0, 0)
        first, last = spans[owner]
        for _ in range(claims):
            if last - first == ring:
                with pytest.raises(PageError, match="still holds position"):
                    rings.claim(name, last, keep_from=first)
                break
            page = rings.claim(name, last, keep_from=first)
            assert stands.get(page, (None, -1))[0] in (None, owner)
            stands[page] = (owner, last)
            assert (page, pool.generations[page]) not in lives, "two claims of one page look alike"
            lives.add((page, pool.generations[page]))
            last += 1
        first = min(first + passed, last)
        spans[owner] = (first, last)
        for other, (start, stop) in spans.items():
            pages = {number: page for page, (who, number) in stands.items() if who == other}
            rings.check(str(other), [0] * start + [pages[number] for number in range(start, stop)])
        if end == 0:
            for page in rings.held(name):
                stands.pop(page, None)
            rings.close(name)
            del spans[owner]
    assert pool.used_pages == ring * len(spans)


def opened() -> tuple[Rings, PagePool, list[int]]:
    """Ring "a" of three pages with pages 2, 3 and 4 of its sequence, and a ring "b"."""
    pool = PagePool(9)
    rings = Rings(pool, pages=3, page_tokens=PAGE)
    rings.open("a")
    rings.open("b")
    return rings, pool, [0, 0, *[rings.claim("a", number, keep_from=2) for number in range(2, 5)]]


def test_a_table_that_is_not_the_ring_s_is_found() -> None:
    """Another position, another owner, another life of the page: each alone."""
    rings, pool, table = opened()
    rings.check("a", table)
    rings.claim("b", 0, keep_from=0)
    for wrong in ([0, *table], [*table[:3], *table[4:2:-1]], [*table[:4], rings.held("b")[0]]):
        with pytest.raises(PageError, match="is not what"):
            rings.check("a", wrong)
    pool.turn(table[2])
    with pytest.raises(PageError, match="is not what"):
        rings.check("a", table)


def test_misuse_is_an_error() -> None:
    """A second ring, and a page that turns though nobody has it."""
    rings, pool, table = opened()
    with pytest.raises(PageError, match="has a ring already"):
        rings.open("a")
    rings.close("a")
    assert rings.held("a") == []
    with pytest.raises(PageError, match="is free"):
        pool.turn(table[2])
