"""The scheduler's own notes on a request."""

from __future__ import annotations

from dataclasses import dataclass

from engine_shim.cache.radix import Receipt
from engine_shim.types import Request


@dataclass(slots=True, eq=False)
class Entry:
    """One request, from ``add`` to its last output.

    While it runs, its page tables are divided like this (window of 2 pages, 10 pages in use)::

        page          0   1   2   3   4 | 5   6   7   8   9
        full table    t   t   t   t   t | o   o   o   o   o     t: the tree's, locked by ``receipt``
        window table  .   .   .   .   . | .   .   o   o   o     o: its own   .: NULL_PAGE, the window has passed
                                        ^ receipt.pages
                                                  ^ window_from: the window of the first token of page 9 begins here

    ``receipt`` is None while the request waits. ``fork_tokens``: a prefill chunk ends here so that the
    window's tail is stored (0: nowhere). ``prefilling``: the prompt (after a preemption: all known tokens) is
    not in the tree yet. ``admitted``: it has run before. ``aborted``: it ends when the batch it is part of is
    committed.
    """

    request: Request
    receipt: Receipt | None = None
    window_from: int = 0
    fork_tokens: int = 0
    prefilling: bool = True
    admitted: bool = False
    aborted: bool = False

    @property
    def remaining_tokens(self) -> int:
        """Positions known and not computed; one for a request that decodes."""
        return len(self.request.tokens) - self.request.computed_tokens

    @property
    def next_tokens(self) -> int:
        """Positions that one chunk may run at most: up to the fork point or to the end."""
        if self.request.computed_tokens < self.fork_tokens:
            return self.fork_tokens - self.request.computed_tokens
        return self.remaining_tokens
