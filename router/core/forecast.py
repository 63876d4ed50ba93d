"""What of a prompt's prefix will still be there when the engine comes to it.

A cache that is full gives up, for each block that a request takes, the block not used for longest. Requests that were
sent and not yet scheduled, or whose events are still under way, take theirs before the next one is looked at. So they
are gone through in the order in which they were sent: each keeps what it finds, and has room made for the rest.

- vLLM takes free blocks one by one, those used longest ago first, of one request its tail first
  (``FreeKVCacheBlockQueue``). A request finds what one scheduled before it is about to compute.
- SGLang gives up whole nodes of its tree, leaves first: ``core/radix_pool``. What is being computed is not found.

While there is room for all, nothing of this is done. The size of the pool is the worker's word; of one that says none,
it is the most that was held when a block had to go.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from router.core.guard import Guard
from router.core.recency import Recency, Stretch

#: With more requests than this unheard of, nothing is foretold: such a rank is not chosen for its cache.
MAX_PENDING = 32


@dataclass(slots=True, eq=False)
class Allocation:
    """The blocks of one request in a pool: ``keys`` of the whole ones, ``blocks`` with the one begun.

    ``pinned`` of them are known to be in use. Events of it are due until ``awaited`` is stored.
    """

    pool: Pool
    keys: array[int]
    blocks: int
    awaited: int | None = None
    is_running: bool = True
    pinned: int = 0

    def begun(self) -> None:
        """It has its blocks."""
        self.pool.guard.attempt(self.pool.begun, self)

    def grows(self, generated: Callable[[], int]) -> None:
        """Its answer has begun; so many tokens of it there are by now, of which events tell late or not at all."""
        self.pool.guard.attempt(self.pool.grows, self, generated)

    def ended(self, keys: Sequence[int]) -> None:
        """It is over, and leaves these blocks."""
        self.pool.guard.attempt(self.pool.ended, self, keys)

    def forget(self) -> None:
        """It failed, or its events did not come in time."""
        self.pool.guard.attempt(self.pool.forget, self)


class Pool:
    """The blocks of one rank's dense group, and who uses them. Mutated by its owner, on one thread."""

    def __init__(self, blocks: int | None, *, is_radix: bool = False, all_blocks: int | None = None) -> None:
        """``all_blocks`` are those of all groups of layers, if there turn out to be several."""
        self.guard = Guard()
        self._blocks = blocks
        self.all_blocks = all_blocks
        self._is_known = blocks is not None
        #: Of what a request finds so many blocks are computed again (EAGLE), for ``core/shared_pool``. Here it is left
        #: out: the copies that this makes, and that go later, have no places in the order.
        self.recomputed_blocks = 0
        self.is_radix = is_radix
        self._order = Recency(is_merged=not is_radix)
        self._running: dict[Allocation, None] = {}
        #: Requests unheard of, in the order in which they were sent. Without any there is nothing to foretell.
        self.pending: dict[Allocation, None] = {}
        self._pending_blocks = 0
        self._awaited: dict[int, list[Allocation]] = {}
        self._forecast: Forecast | None = None  # holds until something changes

    @property
    def blocks(self) -> int | None:
        """How many blocks it has, as far as is known."""
        return self._blocks

    @property
    def is_moving(self) -> bool:
        """Whether what is there may be gone when the next prompt is scheduled."""
        return bool(self.pending)

    def anew(self) -> Pool:
        """One like it, of which nothing is known."""
        return Pool(self._blocks if self._is_known else None, is_radix=self.is_radix, all_blocks=self.all_blocks)

    # --- requests -------------------------------------------------------------------------------------

    def sent(self, keys: Sequence[int], *, blocks: int) -> Allocation:
        """A request is on its way to the rank."""
        allocation = Allocation(self, array("Q", keys), blocks)
        self._wait(allocation)
        return allocation

    def begun(self, allocation: Allocation) -> None:
        """It has its blocks: an event or its first token says so. Where it stores none, no event ever will."""
        if allocation in self._running or not allocation.is_running:
            return
        allocation.pinned = self._order.use(allocation.keys, pins=1)
        self._running[allocation] = None
        self._forecast = None
        if allocation.pinned == len(allocation.keys):
            self._settle(allocation)

    def grows(self, allocation: Allocation, generated: Callable[[], int]) -> None:
        """Its answer has so many tokens by now. Here its blocks count as its events come."""

    def ended(self, allocation: Allocation, keys: Sequence[int]) -> None:
        """It is over, and leaves these blocks; they are those used last."""
        self._settle(allocation)
        self._order.use(allocation.keys[: allocation.pinned], pins=-1)
        self._running.pop(allocation, None)
        self._forecast = None
        allocation.is_running = False
        allocation.keys, allocation.blocks = array("Q", keys), len(keys)
        if self._order.use(keys) < len(keys):
            self._wait(allocation)

    def forget(self, allocation: Allocation) -> None:
        """It failed, or its events did not come in time."""
        if allocation.is_running:
            self.ended(allocation, ())
        self._settle(allocation)

    def _wait(self, allocation: Allocation) -> None:
        self.pending[allocation] = None
        self._pending_blocks += allocation.blocks
        self._forecast = None
        if allocation.keys:
            allocation.awaited = allocation.keys[-1]
            self._awaited.setdefault(allocation.awaited, []).append(allocation)

    def _settle(self, allocation: Allocation) -> None:
        """No event of it is due any more."""
        if allocation not in self.pending:
            return
        del self.pending[allocation]
        self._pending_blocks -= allocation.blocks
        self._forecast = None
        if allocation.awaited is not None:
            waiting = self._awaited[allocation.awaited]
            waiting.remove(allocation)
            if not waiting:
                del self._awaited[allocation.awaited]

    # --- events ---------------------------------------------------------------------------------------

    def stored(self, parent: int | None, keys: Sequence[int], *, new: int | None = None) -> None:
        """The rank stored blocks, the last ``new`` of which it did not have (None: all). With the last block that a
        request was to store it has all of it.
        """
        if not keys:
            return
        self._order.add(parent, keys, new=len(keys) if new is None else new)
        self._forecast = None
        if self._awaited and not self._awaited.keys().isdisjoint(keys):
            for key in keys:
                waiting = self._awaited.get(key)
                if waiting and (key == keys[-1] or not waiting[0].is_running):  # of an answer cut off there may be more
                    allocation = waiting[0]
                    self.begun(allocation)
                    self._settle(allocation)

    def removed(self, keys: Sequence[int], *, copies: int) -> None:
        """The rank gave blocks up. Before, it held so many copies; 0 where that is not known."""
        if copies and not self._is_known and not self.is_radix:
            self._blocks = max(self._blocks or 0, copies)
        for key in reversed(keys):
            self._order.remove(key)
        self._forecast = None

    def cleared(self) -> None:
        """The rank's cache was emptied."""
        self._order.clear()
        self._forecast = None

    def cached(self) -> Iterator[int]:
        """Its blocks, the one to go first first."""
        return (key for stretch in self._order for key in reversed(stretch.keys))

    # --- the forecast -----------------------------------------------------------------------------------

    def kept(self, keys: Sequence[int], depth: int, *, copies: int) -> int:
        """How many of the first ``depth`` blocks will be there. ``copies`` is all that the rank holds now."""
        if not self.pending or self._blocks is None or len(self.pending) > MAX_PENDING or copies > self._blocks:
            return depth
        # A request that runs holds a block begun, which counts already while its prompt is unheard of. Where that does
        # not fit, one has ended that seems to run.
        begun = len(self._running) - sum(each in self._running for each in self.pending)
        room = max(0, self._blocks - copies - begun)
        if room >= self._pending_blocks:
            return depth
        if self._forecast is None:
            self._forecast = Forecast(self._order, self.pending, room=room)
        return self._forecast.kept(keys, depth)


class Forecast:
    """A pool once all pending requests have their blocks: ``left[stretch]`` of it stay, ``floor[stretch]`` in use."""

    def __init__(self, order: Recency, pending: Iterable[Allocation], *, room: int) -> None:
        self._order = order
        self._room = room
        self._left: dict[Stretch, int] = {}
        self._floor: dict[Stretch, int] = {}
        self._coming: dict[int, Stretch] = {}  # what will have been stored, by first block
        self._leaving: deque[Stretch] = deque()  # of it, what nobody holds on to
        self._victims = iter(order)
        self._victim: Stretch | None = None
        for allocation in pending:
            self._allocate(allocation)

    def kept(self, keys: Sequence[int], depth: int) -> int:
        """How many of the first ``depth`` blocks are left."""
        at = 0
        for stretch, count in self._path(keys[:depth]):
            left = self._left_of(stretch)
            if left < count:
                return at + left
            at += count
        return depth  # what is not known here is of requests under way

    def _allocate(self, allocation: Allocation) -> None:
        path = self._path(allocation.keys)
        found = 0
        for stretch, count in path:
            left = min(count, self._left_of(stretch))
            self._hold(stretch, left, allocation)
            found += left
            if left < count:
                break
        self._room -= allocation.blocks - found
        self._make_room()
        known = 0
        for stretch, count in path:  # what had gone is computed again
            self._left[stretch] = max(self._left_of(stretch), count)
            self._hold(stretch, count, allocation)
            known += count
        if known < len(allocation.keys):
            stretch = Stretch(allocation.keys[known:], pins=allocation.is_running)
            self._coming[stretch.keys[0]] = stretch
            if not allocation.is_running:
                self._leaving.append(stretch)

    def _hold(self, stretch: Stretch, count: int, allocation: Allocation) -> None:
        """A running request keeps hold of its blocks; those of one that has ended are the last in the order."""
        if allocation.is_running:
            self._floor[stretch] = max(self._floor.get(stretch, 0), count)

    def _path(self, keys: Sequence[int]) -> list[tuple[Stretch, int]]:
        path = self._order.path(keys)
        at = sum(count for _, count in path)
        while at < len(keys) and (stretch := self._coming.get(keys[at])) is not None:
            path.append((stretch, stretch.common(keys, at)))
            at += path[-1][1]
        return path

    def _left_of(self, stretch: Stretch) -> int:
        return self._left.get(stretch, len(stretch.keys))

    def _make_room(self) -> None:
        """Give up what was used longest ago, until there is room or nothing is left to give up."""
        while self._room < 0:
            stretch = self._victim or next(self._victims, None) or (self._leaving.popleft() if self._leaving else None)
            if stretch is None:
                return
            left = self._left_of(stretch)
            goes = max(0, left - (len(stretch.keys) if stretch.pins else self._floor.get(stretch, 0)))
            goes = min(goes, -self._room)
            self._left[stretch] = left - goes
            self._room += goes
            self._victim = stretch if self._room >= 0 else None
