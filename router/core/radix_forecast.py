"""What an SGLang rank will have given up when it comes to a prompt: its scheduler, gone through as far as is known.

The rules are those of ``Scheduler``, ``PrefillAdder`` and ``UnifiedRadixCache`` (SGLang 0.5):

- Prompts of one batch are looked up and held on to before room is made for any: none takes from another. On a rank that
  generates nothing the first prompt is a batch by itself; those that come until it is computed are the next.
- A prompt is let in, first come first served, if what it lacks, its answer's bound and a page are less than all that is
  free or could be given up, but for what the running answers may still take. The first that is not, and all behind it,
  wait until an answer ends; what they had found may go meanwhile.
- Room is made as if each prompt needed a page more than it does (``alloc_paged_token_slots_extend``; with pages of one
  token it is exact), and for each token generated as if every answer began a page (``alloc_paged_token_slots_decode``).
- An answer enters the tree as it ends.

Which prompts are in one batch is the engine's secret: taken for one are those between whose sending nothing was heard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

from router.core.forecast import Allocation, Forecast
from router.core.radix_requests import Row, Unheard, Want
from router.core.recency import Recency, Stretch

#: So many answers are let end until a prompt that waits is let in, on a rank that generates no more than so many.
_MOST_ENDS = 4
MOST_ROWS = 16
#: Of what was given up: nothing is left.
_GONE = Stretch(())


class RadixForecast(Forecast):
    """The tree once all that was not heard of has happened, and the batches before the next have their pages."""

    def __init__(
        self,
        order: Recency,
        unheard: Iterable[Unheard],
        running: Collection[Allocation],
        *,
        rows: Callable[[], dict[Allocation, Row]],
        own_pages: int,
        growing: int,
        due_tokens: float,
        blocks: int,
        room: int,
        page_tokens: int,
        heard: int,
        seats: int | None,
    ) -> None:
        """The requests ``running`` have so many pages of their own, so many of them are ``growing``, and so many tokens
        are kept free for them; ``rows`` tells which is whose. No more run at once than there are ``seats``.
        """
        super().__init__(order, (), room=room)
        self._blocks = blocks
        self._page_tokens = page_tokens
        self._seats = seats
        self._spare = 1 if page_tokens > 1 else 0  # pages that a request is thought to need more than it does
        self._holds: dict[Allocation, dict[Stretch, int]] = {}
        self._cuts: dict[Stretch, list[int]] = {}  # of what was used anew: where its nodes end
        self._stays: dict[Stretch, int] = {}  # of what was given up and computed again: how much is no part of that
        self._used: dict[tuple[Stretch, int], None] = {}  # such nodes, those used longest ago first
        self._released: dict[Stretch, int] = {}  # pins that are no more
        self._running = running
        self._ask_rows: Callable[[], dict[Allocation, Row]] | None = rows
        self._rows: dict[Allocation, Row] = {}
        self._own_pages = own_pages
        self._due_tokens = due_tokens
        self._unpinned_pages = 0
        self._locked: dict[Stretch, int] | None = None  # what is held on to and not pinned, once it has been gathered
        self._locked_pages = 0
        self._found: dict[Allocation, int] = {}
        self._fresh: list[Unheard] = []  # being computed
        self._reserved_tokens = 0  # for what is let in together
        self._admitted: list[Unheard] = []
        decoding = set(running)
        waiting: list[Unheard] = []
        happened: list[tuple[int, bool, Unheard]] = []
        for each in unheard:
            if each.ended_at is None and each.allocation not in decoding:
                waiting.append(each)
                continue
            if each.blocks:
                happened.append((each.sent_at, False, each))
            else:  # it has run on to its end, holding on to what it had
                held = each.allocation.keys[: each.allocation.pinned]
                self._find(held, self._holds.setdefault(each.allocation, {}))
            if each.ended_at is not None:
                happened.append((each.ended_at, True, each))
                decoding.add(each.allocation)
        happened.sort(key=lambda item: item[0])
        for is_end, items in groupby(happened, key=lambda item: item[1]):
            batch = [each for _, _, each in items]
            if is_end:
                self._finish(batch, decoding=len(decoding))
                decoding.difference_update([each.allocation for each in batch])
            else:
                self._prefill(batch)
        self._compute()
        self._make_room_for(growing)
        first = self._scheduled_before(waiting, heard=heard)
        self._queue = list(first)
        self._schedule()
        self._launch()
        is_full = bool(self._queue)
        self._queue += waiting[len(first) :]
        if not is_full:
            self._schedule()

    @staticmethod
    def _scheduled_before(waiting: Sequence[Unheard], *, heard: int) -> Sequence[Unheard]:
        """Those that are a batch before the one of a prompt that comes now."""
        if waiting and waiting[0].is_alone:
            return waiting[:1]
        return [each for each in waiting if each.heard != heard]

    # --- the next prompt --------------------------------------------------------------------------------

    def lets_in(self, keys: Sequence[int], want: Want) -> bool:
        """Whether a prompt that comes now is scheduled next, and does not wait for an answer to end."""
        return not self._queue and self._fits(keys, want)

    def wait(self, keys: Sequence[int], want: Want) -> None:
        """Go on until it is let in. Nobody else may be asked for afterwards."""
        for _ in range(_MOST_ENDS if len(self._running) + len(self._rows) <= MOST_ROWS else 0):
            if not self._queue:
                self._use(keys)
            self._launch()
            self._end_next()
            self._schedule()
            if self.lets_in(keys, want) or not (self._rows or self._admitted):
                return

    def found(self, keys: Sequence[int]) -> int:
        """How many of the first pages are there when it is let in, with those that prompts before it compute."""
        found = 0
        for stretch, count in self._path(keys):
            found += min(count, left := self._left_of(stretch))
            if left < count:
                break
        return found

    def _fits(self, keys: Sequence[int], want: Want) -> bool:
        """``PrefillAdder.add_one_req``. What it finds cannot be given up for it."""
        if self._seats is not None and self._seated() >= self._seats:
            return False
        page = self._page_tokens
        locked = self._gather() if self._locked is None else self._locked
        found = lockable = 0
        for stretch, count in self._path(keys[: (want.prompt_tokens - 1) // page]):
            left = min(count, self._left_of(stretch))
            if not self._is_pinned(stretch):
                lockable += max(0, left - locked.get(stretch, 0))
            found += left
            if left < count:
                break
        fresh = sum(len(each.keys) - self._found[each.allocation] for each in self._fresh)
        held = self._order.pinned_blocks - self._unpinned_pages + self._locked_pages + lockable
        free_tokens = (self._blocks - self._own_pages - fresh - held) * page
        lacking_tokens = want.prompt_tokens - found * page
        return lacking_tokens + want.reserved_tokens + page < free_tokens - self._reserved_tokens - self._due_tokens

    def _seated(self) -> int:
        """How many are let in and have not ended."""
        running = 0 if self._ask_rows is None else len(self._running)  # else they are among the rows
        return running + len(self._rows) + len(self._admitted)

    def _is_pinned(self, stretch: Stretch) -> bool:
        return stretch.pins > self._released.get(stretch, 0)

    def _gather(self) -> dict[Stretch, int]:
        self._locked, self._locked_pages = {}, 0
        for held in self._holds.values():
            for stretch, count in held.items():
                self._lock(self._locked, stretch, count)
        return self._locked

    def _lock(self, locked: dict[Stretch, int], stretch: Stretch, count: int) -> None:
        if not self._is_pinned(stretch) and (more := count - locked.get(stretch, 0)) > 0:
            locked[stretch] = count
            self._locked_pages += more

    # --- the scheduler ----------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Those that wait are let in one after another, until one does not fit. That was looked up all the same."""
        while self._queue and self._fits(self._queue[0].keys, self._queue[0].want):
            each = self._queue.pop(0)
            lacking = each.want.prompt_tokens - self._look_up(each) * self._page_tokens
            pages = -(-lacking // self._page_tokens) + 1
            self._reserved_tokens += pages * self._page_tokens + each.want.reserved_tokens
            self._admitted.append(each)
        if self._queue:
            self._use(self._queue[0].keys)

    def _launch(self) -> None:
        """Those let in get their pages."""
        batch, self._admitted = self._admitted, []
        self._reserved_tokens = 0
        self._take_pages(batch)
        for each in batch:
            row = self._rows[each.allocation] = Row(each.want, 0)
            self._own_pages += row.own_pages(self._page_tokens)
            self._due_tokens += row.reserved_tokens

    def _end_next(self) -> None:
        """The answers grow until one ends, or several together."""
        self._compute()
        if self._ask_rows is not None:
            self._rows = self._ask_rows() | self._rows
            self._ask_rows = None
        page = self._page_tokens
        tokens = min((row.left_tokens for row in self._rows.values()), default=0)
        ended = [allocation for allocation, row in self._rows.items() if row.left_tokens == tokens]
        for allocation, row in self._rows.items():
            self._room += row.own_pages(page)
            self._rows[allocation] = row = Row(row.want, row.generated + tokens)
            self._room -= row.own_pages(page)
        self._make_room_for(len(self._rows) * self._spare)
        for allocation in ended:
            row = self._rows.pop(allocation)
            kept = (row.want.prompt_tokens % page + row.generated - 1) // page
            self._room += row.own_pages(page) - kept
            if kept > 0:
                self._touch(Stretch([0] * kept), kept)  # nobody knows its tokens yet
            self._let_go(allocation)
            self._enter(allocation.keys, None)
        self._own_pages = sum(row.own_pages(page) for row in self._rows.values())
        self._due_tokens = sum(row.reserved_tokens for row in self._rows.values())

    def _let_go(self, allocation: Allocation) -> None:
        self._locked = None
        if allocation in self._running:
            for stretch, _ in self._order.path(allocation.keys[: allocation.pinned]):
                self._released[stretch] = self._released.get(stretch, 0) + 1
                if not self._is_pinned(stretch):
                    self._unpinned_pages += len(stretch.keys)
        for stretch in self._holds.pop(allocation, ()):
            self._floor[stretch] = max([held.get(stretch, 0) for held in self._holds.values()], default=0)

    def _prefill(self, batch: Sequence[Unheard]) -> None:
        """What is there of their prompts is held on to, and room is made for the rest."""
        for each in batch:
            self._look_up(each)
        self._take_pages(batch)

    def _look_up(self, each: Unheard) -> int:
        """Hold on to what is there of a prompt. Returns how many pages that are."""
        found = self._found[each.allocation] = self._find(each.keys, self._holds.setdefault(each.allocation, {}))
        self._use(each.keys)
        return found

    def _take_pages(self, batch: Sequence[Unheard]) -> None:
        """They get their pages. What they compute is found once the batch behind them has its pages, too."""
        for each in batch:
            self._room -= each.blocks - self._found[each.allocation]
        self._make_room_for(len(batch) * self._spare)
        self._compute()
        self._fresh = list(batch)

    def _compute(self) -> None:
        """What was computed enters the tree; of pages that several prompts of a batch had computed one is kept."""
        for each in self._fresh:
            lacking = len(each.keys) - self._found.pop(each.allocation)
            self._room += max(0, lacking - self._enter(each.keys, self._holds[each.allocation]))
        self._fresh = []

    def _finish(self, batch: Sequence[Unheard], *, decoding: int) -> None:
        """Their answers had room made for them up to the last token; they enter the tree, and nothing is held on to."""
        self._compute()
        prompts = [len(each.keys) if each.blocks else each.allocation.pinned for each in batch]
        sizes = zip(batch, prompts, strict=True)
        own = [each.own_pages(self._page_tokens, prompt_pages=pages) for each, pages in sizes]
        self._room -= sum(own) - sum(each.blocks - len(each.keys) for each in batch)
        self._make_room_for(decoding)
        for each, pages in zip(batch, own, strict=True):
            self._let_go(each.allocation)
            self._room += pages - self._enter(each.allocation.keys, None)

    # --- the tree ---------------------------------------------------------------------------------------

    def _find(self, keys: Sequence[int], held: dict[Stretch, int]) -> int:
        """How many of the first pages are there. They are held on to, in ``held``."""
        found = 0
        for stretch, count in self._path(keys):
            left = min(count, self._left_of(stretch))
            self._keep(stretch, left, held)
            found += left
            if left < count:
                break
        return found

    def _use(self, keys: Sequence[int]) -> None:
        """What is there of them was looked up."""
        for stretch, count in reversed(self._path(keys)):
            if left := min(count, self._left_of(stretch)):
                self._touch(stretch, left)

    def _touch(self, stretch: Stretch, count: int) -> None:
        """So many pages of it were used, the last of them first; if that cuts a node its rest counts as used, too."""
        cuts = self._cuts.setdefault(stretch, [len(stretch.keys)])
        place = bisect_left(cuts, count)
        if cuts[place] != count:
            cuts.insert(place, count)
            self._move(stretch, cuts[place + 1])
        for end in reversed(cuts[: place + 1]):
            self._move(stretch, end)

    def _move(self, stretch: Stretch, end: int) -> None:
        self._used.pop((stretch, end), None)
        self._used[stretch, end] = None

    def _enter(self, keys: Sequence[int], held: dict[Stretch, int] | None) -> int:
        """These pages are there now, and used last: of one use the last page is the first to go. Returns how many of
        them are new.
        """
        path: list[tuple[Stretch, int]] = []
        known = 0
        for stretch, count in self._path(keys):
            if left := min(count, self._left_of(stretch)):
                path.append((stretch, left))
                known += left
            if left < count:
                self._stays[stretch] = left
                break
        if known < len(keys):
            stretch = Stretch(keys[known:])
            self._coming[stretch.keys[0]] = stretch
            path.append((stretch, len(stretch.keys)))
        for stretch, count in reversed(path):
            self._keep(stretch, count, held)
            self._touch(stretch, count)
        return len(keys) - known

    def _path(self, keys: Sequence[int]) -> list[tuple[Stretch, int]]:
        """What was given up and is computed again is a stretch of its own, with all that is behind it."""
        path: list[tuple[Stretch, int]] = []
        at = 0
        before = self._order.path(keys)
        for stretch, count in before:
            if stays := min(count, self._stays.get(stretch, count)):
                path.append((stretch, stays))
                at += stays
            if stays < count:
                break
        while at < len(keys) and (coming := self._coming.get(keys[at])) is not None:
            count = coming.common(keys, at)
            path.append((coming, min(count, self._stays.get(coming, count))))
            at += path[-1][1]
        if (rest := sum(count for _, count in before) - at) > 0:
            path.append((_GONE, rest))
        return path

    def _keep(self, stretch: Stretch, count: int, held: dict[Stretch, int] | None) -> None:
        if held is not None:
            held[stretch] = max(held.get(stretch, 0), count)
            self._floor[stretch] = max(self._floor.get(stretch, 0), count)
            if self._locked is not None:
                self._lock(self._locked, stretch, count)

    def _next_to_go(self) -> tuple[Stretch, int] | None:
        """Of nodes not looked at yet, or used since, the one used longest ago, with its end."""
        stretch = next((each for each in self._victims if each not in self._cuts), None)
        if stretch is not None:
            return stretch, len(stretch.keys)
        if (node := next(iter(self._used), None)) is not None:
            del self._used[node]
        return node

    def _make_room_for(self, blocks: int) -> None:
        """Give nodes up until so many blocks are free, or nothing is left to give up."""
        while self._room < blocks and (node := self._next_to_go()) is not None:
            stretch, end = node
            left = self._left_of(stretch)
            cuts = self._cuts.get(stretch, ())
            start = cuts[place - 1] if (place := bisect_left(cuts, end)) else 0
            stays = max(start, len(stretch.keys) if self._is_pinned(stretch) else self._floor.get(stretch, 0))
            if start < left <= end:
                goes = max(0, left - stays)
                self._left[stretch] = left - goes
                self._room += goes
