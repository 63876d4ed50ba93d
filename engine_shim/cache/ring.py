"""Rings: each running request's pages of the sliding-window group, written round and round.

::

    pages of the ring    a   b   c   d   e        five pages for a window of two
    after six pages      0'  1'  2   3'  4'       primes: passed by the window, free to be written again
    page 5 is            5   1'  2   3'  4'       written over page 0: its slot turns

Every page that is part of a ring is a *slot* with an owner, the position it begins at, and the generation that its page
had when it was claimed. A slot is claimed by its owner alone, and only if what it held lies before all that the owner
may still read; so nothing that is referenced can be written over, whatever the sizes are. Idea: SGLang's ring for
sliding windows, in which a slot was known by its number only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_shim.cache.pool import PageError, PagePool
from engine_shim.types import NULL_PAGE


@dataclass(slots=True)
class RingSlot:
    """One page of a ring. ``position`` is -1 until it has been claimed."""

    page: int
    owner: str
    position: int = -1
    generation: int = -1


class Rings:
    """The rings of one pool, each of ``pages`` pages, by owner."""

    def __init__(self, pool: PagePool, *, pages: int, page_tokens: int) -> None:
        self.pages = pages
        self._pool = pool
        self._page = page_tokens
        self._rings: dict[str, tuple[RingSlot, ...]] = {}

    def is_open(self, owner: str) -> bool:
        """Whether an owner has a ring."""
        return owner in self._rings

    def open(self, owner: str) -> None:
        """Give an owner a ring. Raises ``PageError`` if it has one, or if so many pages are not free."""
        if owner in self._rings:
            raise PageError(f"{owner!r} has a ring already")
        self._rings[owner] = tuple(RingSlot(page, owner) for page in self._pool.allocate(self.pages))

    def claim(self, owner: str, number: int, *, keep_from: int) -> int:
        """The page for the ``number``-th page of an owner's sequence, which may still read from ``keep_from`` on.

        Raises ``PageError`` if what stands there is another's, or may still be read.
        """
        slot = self._rings[owner][number % self.pages]
        if slot.owner != owner:
            raise PageError(f"page {slot.page} of {owner!r} is a slot of {slot.owner!r}")
        if slot.position >= keep_from * self._page:
            raise PageError(
                f"page {slot.page} still holds position {slot.position}, read from {keep_from * self._page}"
            )
        if slot.position >= 0:
            self._pool.turn(slot.page)
        slot.position, slot.generation = number * self._page, self._pool.generations[slot.page]
        return slot.page

    def held(self, owner: str) -> list[int]:
        """The pages of an owner's ring, claimed or not; none if it has no ring."""
        return [slot.page for slot in self._rings.get(owner, ())]

    def close(self, owner: str) -> None:
        """The owner reads and writes no more; its pages go back to the pool."""
        ring = self._rings.pop(owner, ())
        self._pool.free([slot.page for slot in ring])

    def check(self, owner: str, table: Sequence[int]) -> None:
        """Raise ``PageError`` unless each page of a table is the owner's slot for just that position, and still is."""
        for number, page in enumerate(table):
            if page == NULL_PAGE:
                continue
            slot = self._rings[owner][number % self.pages]
            expected = (page, owner, number * self._page, self._pool.generations[page])
            if (slot.page, slot.owner, slot.position, slot.generation) != expected:
                raise PageError(f"page {page} is not what {owner!r} has at position {number * self._page}")
