"""A prompt's pages on their way from one rank's cache to another's. Pure: the caches and their contents are arguments.

The sender copies what it has of a prompt as soon as that is computed, so nothing of its cache is held for whoever will
fetch it. The receiver enters the pages into its own tree, as if it had computed them, and then runs the request as any
other: what did not arrive, or was evicted again before the request's turn, is computed. So a transfer that brings less
costs time and never a wrong answer; and a page is written only by the rank's own thread, between two steps, into pages
that nobody else holds. ::

    full     [skip, pages)                what the receiver does not hold
    draft    the same                     the draft head's, where both ranks have one
    window   the last window before the end
    state    the one at the end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from engine_shim.cache.radix import FULL, RadixCache
from engine_shim.types import NULL_PAGE, CacheLayout, GroupKind


class PageStore(Protocol):
    """What pages hold. Called in the rank's own thread, between two steps.

    ``contents`` names how a page is encoded: what is written has to have been read from a store of the same name.
    """

    @property
    def contents(self) -> str: ...

    def read(self, group: int, page: int) -> bytes:
        """A page's (or slot's) contents."""

    def write(self, group: int, page: int, data: bytes) -> None:
        """Replace them."""


class NoContents:
    """A timing model's pages hold nothing."""

    contents = "nothing"

    def read(self, group: int, page: int) -> bytes:
        return b""

    def write(self, group: int, page: int, data: bytes) -> None:
        """Nothing to keep."""


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive pages of one group, the first being number ``start`` of the prompt; of a state group its one slot.

    ``is_whole``: the group has every page of a prompt, so who holds some of them needs the others alone.
    """

    start: int
    pages: list[bytes]
    is_whole: bool

    def without(self, pages: int) -> Run:
        """The same for somebody who holds the first ``pages`` pages of the prompt."""
        skip = min(max(0, pages - self.start), len(self.pages)) if self.is_whole else 0
        return Run(self.start + skip, self.pages[skip:], self.is_whole)


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """The first ``pages`` pages of a prompt, one run a group. ``cached_tokens``: what the sender had not to compute."""

    layout: str
    pages: int
    cached_tokens: int
    runs: list[Run]

    def without(self, pages: int) -> Parcel:
        """The same for somebody who holds the first ``pages`` pages."""
        return msgspec.structs.replace(self, runs=[run.without(pages) for run in self.runs])

    @property
    def sent_pages(self) -> int:
        """Pages of full attention that are in it."""
        return len(self.runs[FULL].pages)


def layout_name(layout: CacheLayout, *, model: str, contents: str) -> str:
    """What two ranks must have in common to exchange pages; ``contents`` is their stores'."""
    groups = ",".join(f"{group.kind}:{len(group.layers)}:{group.window_tokens}" for group in layout.groups)
    return f"{model}/{layout.page_tokens}/{groups}/{contents}"


def known_pages(cache: RadixCache, namespace: str, prompt: Sequence[int]) -> int:
    """How many pages of a prompt a cache could reuse now."""
    return cache.match(namespace, _whole(cache, prompt)).pages


def pack(
    cache: RadixCache, store: PageStore, namespace: str, prompt: Sequence[int], *, model: str, cached_tokens: int
) -> Parcel:
    """Copy what the cache holds of a prompt; its last token's page is left out, as the receiver computes that."""
    match = cache.match(namespace, _whole(cache, prompt))
    runs = []
    for group, table in zip(cache.layout.groups, match.tables, strict=True):
        held = table[:1] if group.kind is GroupKind.STATE else table[: match.pages]
        start = held.count(NULL_PAGE)  # a window table begins with what has passed
        contents = [store.read(group.index, page) for page in held[start:]]
        runs.append(Run(start, contents, cache.components[group.index].is_whole))
    return Parcel(layout_name(cache.layout, model=model, contents=store.contents), match.pages, cached_tokens, runs)


class Entered(NamedTuple):
    """How many pages of the prompt can be reused now, and its tables if some of them came in."""

    pages: int
    tables: tuple[Sequence[int], ...]


def unpack(cache: RadixCache, store: PageStore, namespace: str, prompt: Sequence[int], parcel: Parcel) -> Entered:
    """Enter a parcel into the cache.

    Does nothing where the cache has lost what the parcel was to continue, or has no room.
    """
    tokens = tuple(prompt[: parcel.pages * cache.layout.page_tokens])
    match = cache.match(namespace, _whole(cache, prompt))
    if match.pages >= parcel.pages or match.pages < parcel.runs[FULL].start:
        return Entered(match.pages, ())
    receipt = cache.lock(match)  # making room must not take what is to be continued
    new = _allocated(cache, [_missing(parcel, run, match.pages) for run in parcel.runs])
    cache.release(receipt)
    if new is None:
        return Entered(match.pages, ())
    tables = []
    for group, run, pages in zip(cache.layout.groups, parcel.runs, new, strict=True):
        for page, data in zip(pages, run.pages[len(run.pages) - len(pages) :], strict=True):
            store.write(group.index, page, data)
        before = match.tables[group.index] if run.is_whole else [NULL_PAGE] * (parcel.pages - len(pages))
        tables.append(pages if group.kind is GroupKind.STATE else [*before, *pages])
    for pool, twins in zip(cache.pools, cache.insert(namespace, tokens, tables), strict=True):
        pool.free(twins)
    return Entered(parcel.pages, tuple(tables))


def _whole(cache: RadixCache, prompt: Sequence[int]) -> Sequence[int]:
    """The pages before a prompt's last token, which is always computed."""
    page_tokens = cache.layout.page_tokens
    return prompt[: (len(prompt) - 1) // page_tokens * page_tokens]


def _missing(parcel: Parcel, run: Run, known_pages: int) -> int:
    """How many pages of a group a receiver needs that knows the first so many of the prompt."""
    return parcel.pages - known_pages if run.is_whole else len(run.pages)


def _allocated(cache: RadixCache, wanted: Sequence[int]) -> list[list[int]] | None:
    """New pages for each group, at the cost of what was not used for long; None: there is no room for all of them."""
    for group, (pool, pages) in enumerate(zip(cache.pools, wanted, strict=True)):
        if pool.free_pages < pages:
            cache.evict(group, pages - pool.free_pages)
    if any(pool.free_pages < pages for pool, pages in zip(cache.pools, wanted, strict=True)):
        return None
    return [pool.allocate(pages) for pool, pages in zip(cache.pools, wanted, strict=True)]
