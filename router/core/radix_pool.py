"""The pages of an SGLang rank: a radix tree, whose leaves go by the time of their last use, and what requests take.

``core/forecast`` says what for, ``core/radix_forecast`` by which rules. SGLang tells of little while it generates: of
an answer's pages with its end, of what they pushed out with the next prompt.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence

from router.core.forecast import MAX_PENDING, Allocation, Pool
from router.core.radix_forecast import MOST_ROWS, RadixForecast
from router.core.radix_requests import Row, Unheard, Want


class RadixPool(Pool):
    """A pool whose pages hold ``page_tokens`` tokens, of a rank that runs so many requests at once (``seats``)."""

    def __init__(self, blocks: int | None, *, page_tokens: int, seats: int | None = None) -> None:
        super().__init__(blocks, is_radix=True)
        self._page_tokens = page_tokens
        self._seats = seats
        self._happened = 0
        self._heard = 0
        self._unheard: dict[Allocation, Unheard] = {}
        self._wants: dict[Allocation, Want] = {}
        self._answers: dict[Allocation, Callable[[], int]] = {}
        self._silent: dict[int, dict[Allocation, None]] = {}  # untold answers, by their prompt's last page
        self._foretold: RadixForecast | None = None  # it holds as long as ``_forecast``
        self._foretold_room = 0

    def anew(self) -> RadixPool:
        """One like it, of which nothing is known."""
        return RadixPool(self._blocks if self._is_known else None, page_tokens=self._page_tokens, seats=self._seats)

    def sent(self, keys: Sequence[int], *, blocks: int, want: Want | None = None) -> Allocation:
        """A request is on its way to the rank."""
        is_alone = not self._running and not any(each.is_running for each in self.pending)
        allocation = super().sent(keys, blocks=blocks)
        self._happened += 1
        want = self._wants[allocation] = want or Want(len(keys) * self._page_tokens)
        self._unheard[allocation] = Unheard(
            allocation, allocation.keys, blocks, want, self._happened, self._heard, is_alone=is_alone
        )
        return allocation

    def begun(self, allocation: Allocation) -> None:
        """It has its blocks: an event or its first token says so. Its use of the tree is where its event stands among
        the others, which may come later than the token.
        """
        self._heard += 1
        self._forecast = None
        if allocation in self._running or not allocation.is_running:
            return
        if allocation.keys:
            self._silent.setdefault(allocation.keys[-1], {})[allocation] = None
        if self._order.knows(allocation.keys):
            super().begun(allocation)
        else:
            self._running[allocation] = None

    def grows(self, allocation: Allocation, generated: Callable[[], int]) -> None:
        """Its answer has begun; so many tokens of it there are by now."""
        if allocation.is_running:
            self._answers[allocation] = generated

    def ended(self, allocation: Allocation, keys: Sequence[int]) -> None:
        """It is over, and leaves these blocks. The event that tells of them is their use: it may have come before, and
        the engine's order is not that in which answers end here. Where there is nothing to tell, this is.
        """
        self._happened += 1
        self._heard += 1
        generated = self._generated(allocation)
        self._answers.pop(allocation, None)
        want = self._wants.pop(allocation)
        unheard = self._unheard.get(allocation)
        if unheard is None:
            unheard = Unheard(allocation, (), 0, want, self._happened, self._heard, is_alone=False)
        is_told = allocation in self._running and allocation.keys and not self._is_silent(allocation)
        self._settle(allocation)
        self._order.let_go(allocation.keys[: allocation.pinned])
        self._running.pop(allocation, None)
        self._forecast = None
        adds = len(keys) > len(allocation.keys)
        allocation.is_running = False
        allocation.keys, allocation.blocks = array("Q", keys), len(keys)
        if adds and is_told:
            return
        if self._order.knows(keys):
            self._order.use(keys)
            return
        self._wait(allocation)
        unheard.ended_at, unheard.generated = self._happened, generated
        self._unheard[allocation] = unheard

    def _is_silent(self, allocation: Allocation) -> bool:
        """No event has told of its answer. It is not waited for any more."""
        waiting = self._silent.get(allocation.keys[-1], {})
        is_silent = allocation in waiting
        waiting.pop(allocation, None)
        if not waiting:
            self._silent.pop(allocation.keys[-1], None)
        return is_silent

    def first_to_go(self, keys: Iterable[int]) -> int | None:
        """Of blocks that go by one name the one that the engine would give up."""
        return self._order.first_to_go(keys)

    def awaits(self, key: int) -> bool:
        """Whether the event with this block is due."""
        return key in self._awaited

    def stored(self, parent: int | None, keys: Sequence[int], *, new: int | None = None) -> None:
        """The rank stored blocks. Those behind a prompt that nobody else waits for are the answer to it."""
        place = next((place for place, key in enumerate(keys) if key in self._awaited), None)
        if place is not None:
            allocation = self._awaited[keys[place]][0]
            self._order.use(allocation.keys[: len(allocation.keys) - 1 - place])  # a node that goes on there is cut
        super().stored(parent, keys, new=new)
        if place is not None:  # of answers that are alike no other event will tell
            alike = [each for key in keys for each in self._awaited.get(key, ()) if not each.is_running]
            for each in alike:
                self._settle(each)
        if place is None and parent is not None and (waiting := self._silent.get(parent)):
            self._is_silent(next(iter(waiting)))

    def removed(self, keys: Sequence[int], *, copies: int) -> None:
        """The rank gave pages up: it was full. Where nobody says how many pages it has, they are no fewer than it held
        then and its answers had of their own. While it gives up what nobody knows it holds more than is known.
        """
        if keys and not self._is_known:
            own = sum(row.own_pages(self._page_tokens, ahead_tokens=0) for row in self._rows().values())
            self._blocks = max(self._blocks or 0, copies + own)
        super().removed(keys, copies=copies)

    def _settle(self, allocation: Allocation) -> None:
        super()._settle(allocation)
        self._unheard.pop(allocation, None)
        if allocation in self._running and allocation.pinned < len(allocation.keys):  # its first token came before
            self._order.use(allocation.keys[: allocation.pinned], pins=-1)
            allocation.pinned = self._order.use(allocation.keys, pins=1)

    def may_bring(self, key: int) -> bool:
        """Whether requests unheard of will store a chain's first block."""
        return any(each.keys and each.keys[0] == key for each in self.pending)

    @property
    def is_moving(self) -> bool:
        """Whether what is there may be gone when the next prompt is scheduled."""
        return bool(self.pending or self._running)

    def kept(self, keys: Sequence[int], depth: int, *, copies: int, want: Want | None = None) -> int:
        """How many of the first ``depth`` blocks will be there; or more, if it waits and others before it compute them.
        ``copies`` is all that the rank holds now.
        """
        if not self.is_moving or self._blocks is None or len(self.pending) > MAX_PENDING or copies > self._blocks:
            return depth
        want = want or Want(len(keys) * self._page_tokens)
        own_pages, growing, due_tokens = 0, 0, 0.0
        for each in self._running:
            row = Row(self._wants[each], self._generated(each))
            own_pages += row.own_pages(self._page_tokens)
            growing += row.is_growing
            due_tokens += row.reserved_tokens
        begun_pages = sum(each in self._running for each in self._unheard)  # counted with their prompts
        room = self._blocks - copies - own_pages + begun_pages  # fewer than none: answers have pushed some out
        if not self._is_known:
            room = max(0, room)
        reserved_tokens = want.prompt_tokens + want.reserved_tokens + math.ceil(due_tokens)
        reserved_tokens += sum(each.want.reserved_tokens for each in self._unheard.values())
        spare_pages = 2 * (len(self.pending) + len(self._running) + 1)
        is_roomy = room >= self._pending_blocks + spare_pages + reserved_tokens // self._page_tokens
        if is_roomy and not self._is_seated_out():
            return depth

        def foretell() -> RadixForecast:
            assert self._blocks is not None, "else there is nothing to foretell"
            return RadixForecast(
                self._order,
                self._unheard.values(),
                self._running,
                rows=self._rows,
                own_pages=own_pages,
                growing=growing,
                due_tokens=due_tokens,
                blocks=self._blocks,
                room=room,
                page_tokens=self._page_tokens,
                heard=self._heard,
                seats=self._seats,
            )

        if self._foretold is None or self._forecast is None or room != self._foretold_room:
            self._foretold_room = room
            self._forecast = self._foretold = foretell()
        forecast = self._foretold
        if not forecast.lets_in(keys, want):
            forecast = foretell()
            forecast.wait(keys, want)
            return max(forecast.kept(keys, depth), forecast.found(keys))
        return forecast.kept(keys, depth)

    def _is_seated_out(self) -> bool:
        """Whether as many run, or will, as may at once, and few enough for ends to be looked ahead."""
        if self._seats is None or len(self._running) > MOST_ROWS:
            return False
        coming = sum(each.is_running and each not in self._running for each in self.pending)
        return len(self._running) + coming >= self._seats

    def _rows(self) -> dict[Allocation, Row]:
        """Those that run, in the order in which they were sent: the engine's."""
        return {each: Row(want, self._generated(each)) for each, want in self._wants.items() if each in self._running}

    def _generated(self, allocation: Allocation) -> int:
        answer = self._answers.get(allocation)
        return 0 if answer is None else answer()
