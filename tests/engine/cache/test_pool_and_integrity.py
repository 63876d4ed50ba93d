"""Misuse of pages is an error at once, and a damaged cache does not pass its own check."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import IntegrityError, check_integrity
from engine_shim.cache.node import Node
from engine_shim.cache.pool import PageError, PagePool
from engine_shim.cache.radix import RadixCache
from engine_shim.types import NULL_PAGE, CacheGroup, CacheLayout, GroupKind


def test_a_pool_hands_out_every_page_but_the_null_page_once() -> None:
    """Five pages are four to use, each different; the fifth is refused."""
    pool = PagePool(5)
    assert sorted(pool.allocate(3) + pool.allocate(1)) == [1, 2, 3, 4]
    assert (pool.total, pool.used_pages, pool.free_pages) == (4, 4, 0)
    with pytest.raises(PageError, match="1 pages asked, 0 free"):
        pool.allocate(1)


@pytest.mark.parametrize(("page", "message"), [(1, "free already"), (0, "not of this pool"), (5, "not of this pool")])
def test_a_pool_takes_back_only_what_is_out(page: int, message: str) -> None:
    """A page freed twice, the null page and a page of another pool are refused."""
    pool = PagePool(5)
    pool.free(pool.allocate(1))
    with pytest.raises(PageError, match=message):
        pool.free([page])


def small_cache() -> tuple[RadixCache, list[int]]:
    """Three pages of two tokens in the tree, the last two with window pages, and one page out to a request."""
    groups = (CacheGroup(0, GroupKind.FULL, (1,)), CacheGroup(1, GroupKind.WINDOW, (0,), 4))
    layout = CacheLayout(2, groups, (8, 8))
    cache = RadixCache(layout, EventRecorder(layout))
    tables = (cache.pools[0].allocate(3), [NULL_PAGE, *cache.pools[1].allocate(2)])
    assert cache.insert("", range(6), tables) == ([], [])
    return cache, cache.pools[0].allocate(1)


def test_a_receipt_cannot_be_released_twice() -> None:
    """The second release finds no lock."""
    cache, _ = small_cache()
    receipt = cache.lock(cache.match("", range(6)))
    cache.release(receipt)
    with pytest.raises(PageError, match="released twice"):
        cache.release(receipt)


def _leaf(cache: RadixCache) -> Node:
    return list(cache.nodes())[-1]


def _forget_a_page(cache: RadixCache) -> None:
    cache.pools[1].allocate(1)


def _drop_from_order(cache: RadixCache) -> None:
    cache.components[1].unlocked.remove(_leaf(cache), 2)


def _age_the_parent(cache: RadixCache) -> None:
    cache.components[0].unlocked.refresh(_leaf(cache))


def _lock_without_receipt(cache: RadixCache) -> None:
    cache.lock(cache.match("", range(6)))


DAMAGES: list[tuple[Callable[[RadixCache], object], str]] = [
    (_forget_a_page, "0 owners"),
    (lambda cache: cache.pools[0].free([_leaf(cache).held[0][0]]), "2 owners"),
    (_drop_from_order, "may be evicted"),
    (_age_the_parent, "more recent than its parent"),
    (_lock_without_receipt, "locks"),
    (lambda cache: _leaf(cache).hashes.reverse(), "hashes"),
    (lambda cache: _leaf(cache).held[1].pop(), "pages of group 1"),
    (lambda cache: _leaf(cache).held[0].pop(), "pages of group 0"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_is_found(damage: Callable[[RadixCache], object], message: str) -> None:
    """The check passes on a sound cache and names the fault in a damaged one."""
    cache, held = small_cache()
    check_integrity(cache, held=[held, []], receipts=[])
    damage(cache)
    with pytest.raises(IntegrityError, match=message):
        check_integrity(cache, held=[held, []], receipts=[])
