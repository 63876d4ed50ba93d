"""Is what requests hold what the cache has given out? For idle moments and for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_shim.cache.integrity import IntegrityError, check_integrity
from engine_shim.cache.radix import RadixCache, Receipt
from engine_shim.schedule.entry import Entry
from engine_shim.types import NULL_PAGE, GroupKind

Pages = Sequence[Sequence[int]]


def recount(
    cache: RadixCache,
    tenants: Sequence[tuple[Entry, Pages]],
    *,
    ownerless: Iterable[Pages],
    left: Iterable[Receipt],
    pins: Iterable[Receipt],
) -> None:
    """Raise ``IntegrityError`` unless every page has exactly one owner and all counts are true.

    ``tenants`` come with the pages of each group that are their own; ``ownerless`` ones are still in somebody's way.
    ``left`` are locks of requests that are gone, which transfers need.
    """
    held: list[list[int]] = [[] for _ in cache.pools]
    for entry, owned in tenants:
        _check_reads(cache, entry, owned)
    for each in (*(owned for _, owned in tenants), *ownerless):
        for pages, more in zip(held, each, strict=True):
            pages += more
    receipts = [*(entry.receipt_held for entry, _ in tenants), *left]
    check_integrity(cache, held=held, receipts=receipts, pins=pins)


def _check_reads(cache: RadixCache, entry: Entry, owned: Pages) -> None:
    """What a request reads and does not own is the tree's, and under its lock."""
    receipt = entry.receipt_held
    for group, table, own in zip(cache.layout.groups, entry.request.tables, owned, strict=True):
        locked = cache.locked_pages(receipt, group.index)
        read = set(table[:1] if group.kind is GroupKind.STATE else table[: receipt.pages])
        if not read <= {NULL_PAGE, *locked, *own}:
            raise IntegrityError(f"request {entry.request.id!r} reads pages of group {group.index} that may be evicted")
