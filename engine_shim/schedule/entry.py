"""The scheduler's own notes on a request."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from engine_shim.cache.copies import Copy
from engine_shim.cache.radix import Receipt
from engine_shim.schedule.transit import Load, Sinking
from engine_shim.types import NULL_PAGE, Request, Sunk


@dataclass(slots=True, eq=False)
class Entry:
    """One request, from ``add`` to its last output.

    While it runs, its page tables are divided like this (window of 2 pages, 10 pages in use)::

        page          0   1   2   3   4 | 5   6   7   8   9
        full table    t   t   t   t   t | o   o   o   o   o     t: the tree's, locked by ``receipt``
        window table  .   .   .   .   . | .   .   o   o   o     o: its own   .: NULL_PAGE, the window has passed
                                        ^ receipt.pages
                                                  ^ window_from: the window of the first token of page 9 begins here

    Of a recurrent group it owns up to two slots: the one its next chunk writes (the second entry of its table),
    and ``kept_slot`` with the state after ``kept_tokens``, the last page boundary that a chunk ended on. The chunk
    after that reads the kept slot and writes the other one, so no state is ever copied. What the table's first entry
    names beside these two is the tree's, locked.

    While ``load`` is there, pages ``load.full_from`` .. ``load.pages`` of the full table, the window before their end
    and the kept slot are written by transfers from the host. They are its own: in the window group pages from
    ``window_own_from`` on, which else is ``receipt.pages``. ``fetches``: transfers from disk that it waits for.
    ``loaded_tokens``: what its last admission owes to copies below the device.

    Up to ``rebuilt_until`` it has all but the window, which it computes again from ``window_start`` on; 0 if there is
    nothing to rebuild. Its window table begins there, and until it has come to an end the tree gets none of that.

    ``head_pages`` is set for a context that is longer than the device (see ``sinks``): so much of it may be the tree's.
    ``sunk`` are the copies it reads on the host, ``below`` says the same to whoever runs it; ``sinking`` is on its way.

    ``precedence``: who has the lower one is admitted before, and preempted after, all others. ``receipt`` is None while
    the request waits. ``stops``: positions, ascending, where a prefill chunk ends so that
    what was computed is stored there. ``prefilling``: the prompt (after a preemption: all known tokens) is
    not in the tree yet. ``admitted``: it has run before. ``aborted``: it ends when the batch it is part of is
    committed. ``leader``: the running request whose prefill this one waits for, up to ``lead_tokens``;
    ``asked_admissions``: how many requests had been admitted when one was looked for last.

    ``launches``: the launched steps it is part of, which run ``launched_tokens`` positions behind the computed ones and
    sample ``launched_samples`` tokens. Until they are committed it keeps its pages, come what may.
    """

    request: Request
    precedence: tuple[int, int]
    receipt: Receipt | None = None
    window_from: int = 0
    window_own_from: int = 0
    rebuilt_until: int = 0
    window_start: int = 0
    kept_slot: int = NULL_PAGE
    kept_tokens: int = 0
    stops: list[int] = field(default_factory=list)
    prefilling: bool = True
    admitted: bool = False
    aborted: bool = False
    leader: Entry | None = None
    lead_tokens: int = 0
    asked_admissions: int = -1
    load: Load | None = None
    loaded_tokens: int = 0
    fetches: set[int] = field(default_factory=set)
    head_pages: int | None = None
    sunk: list[Copy] = field(default_factory=list)
    below: Sunk | None = None
    sinking: Sinking | None = None
    launches: int = 0
    launched_tokens: int = 0
    launched_samples: int = 0

    @property
    def receipt_held(self) -> Receipt:
        """The receipt of a request that holds pages."""
        assert self.receipt is not None, "only an admitted request holds pages"
        return self.receipt

    @property
    def own_from(self) -> int:
        """Where in the full table its own pages begin: behind the tree's and those that it reads on the host."""
        return self.receipt_held.pages + len(self.sunk)

    @property
    def next_start(self) -> int:
        """The first position that is neither computed nor launched."""
        return self.request.computed_tokens + self.launched_tokens

    @property
    def remaining_tokens(self) -> int:
        """Positions that can be run and are not launched; one for a request that decodes."""
        return len(self.request.tokens) + self.launched_samples - self.next_start

    @property
    def next_tokens(self) -> int:
        """Positions that one chunk may run at most: up to the next stop or to the end."""
        start = self.next_start
        return next((stop - start for stop in self.stops if stop > start), self.remaining_tokens)

    @property
    def waits_for_leader(self) -> bool:
        """The leader runs and has not stored what this request is waiting for."""
        leader = self.leader
        return (
            leader is not None
            and leader.receipt is not None
            and (leader.is_moving or (leader.prefilling and leader.request.computed_tokens < self.lead_tokens))
        )

    @property
    def is_moving(self) -> bool:
        """Whether transfers write its pages or read them, so that none can change hands."""
        return self.load is not None or self.sinking is not None

    @property
    def is_rebuilding(self) -> bool:
        """Whether the window is still being computed again."""
        return self.request.computed_tokens < self.rebuilt_until

    def stop_at(self, tokens: int) -> None:
        """Have the prefill store what it has at this position, which is ahead of it."""
        if tokens < len(self.request.tokens) and tokens not in self.stops:
            insort(self.stops, tokens)

    def pass_stop(self) -> bool:
        """Whether the computed positions end at a stop, which then is done with."""
        reached = bool(self.stops) and self.stops[0] == self.request.computed_tokens
        if reached:
            del self.stops[0]
        return reached


def by_precedence(entry: Entry) -> tuple[int, int]:
    """Sorts first to last."""
    return entry.precedence
