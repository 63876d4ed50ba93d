"""Who may use which page: a free list for each cache group."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

from engine_shim.types import NULL_PAGE


class PageError(RuntimeError):
    """A page was freed twice, freed by a stranger, or asked of an empty pool: a bug, never load."""


class PagePool:
    """Pages 1 .. ``pages - 1`` of one group; page 0 is the null page and is never handed out.

    The last page freed is the first one handed out again, so a page that is given back too early is
    soon overwritten and shows up in tests. ``generations[page]`` counts how often a page has come back or turned.
    """

    __slots__ = ("_free", "_held", "generations", "total")

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise ValueError(f"a pool of {pages} pages has none beside the null page")
        self.total = pages - 1
        self._free = list(range(pages - 1, NULL_PAGE, -1))
        self._held = bytearray(pages)
        self.generations = array("q", bytes(8 * pages))

    @property
    def free_pages(self) -> int:
        """How many pages can be allocated now."""
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """How many pages are held, by requests or by the tree."""
        return self.total - len(self._free)

    def allocate(self, pages: int) -> list[int]:
        """Hand out ``pages`` pages. Raises ``PageError`` if there are not so many: make room first."""
        if pages > len(self._free):
            raise PageError(f"{pages} pages asked, {len(self._free)} free")
        cut = len(self._free) - pages
        taken = self._free[cut:]
        del self._free[cut:]
        for page in taken:
            self._held[page] = 1
        return taken

    def claim(self, pages: Collection[int]) -> None:
        """Hand out these very pages. Raises ``PageError`` unless all are free."""
        wanted = set(pages)
        left = [page for page in self._free if page not in wanted]
        if len(left) + len(pages) != len(self._free):
            raise PageError("a page that is claimed is not free")
        self._free = left
        for page in wanted:
            self._held[page] = 1

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back. Raises ``PageError`` at the first one that is not out."""
        for page in pages:
            if not NULL_PAGE < page <= self.total:
                raise PageError(f"page {page} is not of this pool (1 to {self.total})")
            if not self._held[page]:
                raise PageError(f"page {page} is free already")
            self._held[page] = 0
            self.generations[page] += 1
            self._free.append(page)

    def turn(self, page: int) -> None:
        """A page begins again with whoever has it. Raises ``PageError`` if nobody does."""
        if not self._held[page]:
            raise PageError(f"page {page} is free")
        self.generations[page] += 1

    def free_set(self) -> set[int]:
        """The free pages themselves, for checks."""
        return set(self._free)
