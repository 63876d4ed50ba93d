"""What each rank holds, whatever brought it in: chains of dense blocks, tables of sparse ones, and their names.

A block is named by its chain key (``wire/block_keys``), which stands for the block and all before it. Engines' own
hashes are mapped onto places in the chains.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat

from router.core.adoption import Adopted
from router.core.budget import Budget
from router.core.chains import Chains
from router.core.forecast import Pool
from router.core.names import Names, NameTable
from router.core.namespaces import Namespaces
from router.core.provisional import Provisional
from router.core.rank_state import RankState
from router.core.runs import Run, Runs
from router.core.shared_pool import SharedPool
from router.core.tables import CopyTable
from router.core.usable import Geometry
from router.wire.kv_events import EngineHash

#: So many runs, or so many times 16 names, are let go of in one go: a millisecond's work or a few.
SLICE = 128
#: Where sparse groups may hold blocks, so many of a run take as long as a run without.
_BLOCKS_A_STEP = 256


class Blocks:
    """The blocks of one model, in units of ``block_tokens``. Mutated by its owner, on one thread."""

    def __init__(self, *, block_tokens: int, max_blocks: int = 1 << 23, budget: Budget | None = None) -> None:
        """``budget`` is shared with other indexes; without one this index may hold ``max_blocks``."""
        self.block_tokens = block_tokens
        self.budget = budget or Budget(max_blocks)
        self.evicted_blocks = 0
        #: Told a slot of whose pool nothing is foretold until it is cleared, as it raised this.
        self.on_failed_forecast: Callable[[int, Exception], None] = lambda _slot, _error: None
        self.provisional = Provisional()
        self.namespaces = Namespaces()
        self.adapters: dict[str, None] = {}
        self._tiers: dict[str, str] = {}
        self._runs = Runs(sparse_end=self._sparse_end)
        self._chains: dict[int, Chains] = {}
        self._sparse: defaultdict[int, CopyTable] = defaultdict(CopyTable)
        self._names: dict[str, NameTable] = {}
        self._ranks: dict[int, RankState] = {}
        self._radix_slots: set[int] = set()
        self._eagle_slots: set[int] = set()
        self._forgotten = 0
        self._chores: deque[Iterator[None]] = deque()
        self._is_sweeping = False
        self._quota = 0  # so much may be added without asking the budget
        self._lone = 0  # slot bits of ranks without a dense group (``core/lone_groups``)

    # --- membership -------------------------------------------------------------------------------

    def add_rank(
        self,
        slot: int,
        *,
        domain: str,
        geometry: Geometry | None = None,
        pool: Pool | None = None,
        retention_tokens: int | None = None,
    ) -> None:
        """Know a rank. Ranks of one ``domain`` name equal blocks equally (same engine, same hash settings)."""
        table = self._names.setdefault(domain, NameTable())
        names = Names(table, partial(self._has_place, slot), partial(self._has_key, slot))
        self._ranks[slot] = RankState(
            1 << slot, names, geometry or Geometry(), self._chains_of(1), given=pool, retention_tokens=retention_tokens
        )
        self._take_pool(slot, pool)
        if self._ranks[slot].geometry.eagle:
            self._eagle_slots.add(slot)
        if pool is not None and pool.is_radix:
            self._radix_slots.add(slot)
        self._set_stride(slot, 1)

    def remove_rank(self, slot: int) -> None:
        """Forget a rank and all it held."""
        self.clear(slot)
        self._radix_slots.discard(slot)
        self._eagle_slots.discard(slot)
        self._ranks.pop(slot).chains.members &= ~(1 << slot)
        self._lone &= ~(1 << slot)

    @property
    def max_blocks(self) -> int:
        """So much may be held, together with the other indexes of the budget."""
        return self.budget.most_blocks

    @property
    def has_ranks(self) -> bool:
        """Whether any rank is known."""
        return bool(self._ranks)

    def clear(self, slot: int) -> None:
        """The rank holds nothing. What its groups mean stays known. Takes time in what it held; what nobody holds any
        more is let go of in slices (``tidy``).
        """
        rank = self._ranks[slot]
        self.provisional.forget_ended(slot)
        runs = rank.chains.clear(slot)
        held = max(rank.blocks, sum(table.clear(slot) for table in self._sparse.values()))
        rank.blocks = 0
        if rank.pool is not None:
            if rank.pool.guard.has_failed:
                rank.pool = rank.pool.anew()
                self._listen(slot)
            rank.pool.guard.attempt(rank.pool.cleared)
        rank.forget_waits()
        if rank.pairs is not None:
            rank.pairs.clear()
            rank.pairs_below.clear()
        rank.adopted = Adopted()
        self._chores += (rank.names.rejoin(), self._let_go_of(rank.chains, runs))
        self.tidy()
        self._note_forgotten(held)

    def _take_pool(self, slot: int, pool: Pool | None) -> None:
        rank = self._ranks[slot]
        rank.pool = pool
        if pool is not None:
            pool.recomputed_blocks = int(rank.geometry.eagle)
        self._listen(slot)

    def _renew_pool(self, slot: int) -> None:
        """The rank has a pool like the one it had at first, of which nothing is known."""
        given = self._ranks[slot].given
        self._take_pool(slot, None if given is None else given.anew())

    def _listen(self, slot: int) -> None:
        if (pool := self._ranks[slot].pool) is not None:
            pool.guard.on_failure = lambda error: self.on_failed_forecast(slot, error)

    def _chains_of(self, stride: int) -> Chains:
        return self._chains.setdefault(stride, Chains(self._runs))

    def _set_stride(self, slot: int, stride: int) -> None:
        """Note how many units a dense block of the rank has."""
        rank = self._ranks[slot]
        if stride != rank.stride:  # what is known by now was in lower tiers, in blocks of another size
            rank.chains.trim(rank.chains.clear(slot))
        rank.chains.members &= ~rank.bit
        rank.stride, rank.chains = stride, self._chains_of(stride)
        rank.chains.members |= rank.bit

    # --- what was taken over ------------------------------------------------------------------------------

    def _take_over(self, rank: RankState, slot: int, ends: Sequence[int]) -> tuple[int, bool] | None:
        """The rank has the chain of these dense blocks whole. Returns the last place, and whether it is new; None where
        there is no room.

        Those it was not known to have stand and fall with the last of them.
        """
        path = rank.chains.path(ends, limit=len(ends))
        places = rank.chains.places(path, len(ends))
        known, held = len(places), rank.chains.depths(path).get(slot, 0)
        if max(len(self), self.budget.used) + len(ends) - known > self.max_blocks:
            return None
        lacking = [at for at in range(held, known) if not self._runs.holds(slot, places[at])]
        for at in lacking:
            rank.chains.gain(slot, places[at])
        self._quota -= len(ends) - known
        if known < len(ends):
            places += rank.chains.extend(slot, places[-1] if places else None, ends[known:])[1]
            lacking += range(known, len(ends))
        if lacking:
            rank.adopted.is_used = True
            rank.blocks += len(lacking)
            if rank.pool is not None:
                start = lacking[0]
                before = ends[start - 1] if start else None
                rank.pool.guard.attempt(rank.pool.stored, before, ends[start:], new=len(lacking))
        is_new = bool(lacking) and lacking[-1] == len(ends) - 1
        rank.adopted.take(places[-1], places[:-1], new=[places[at] for at in lacking[: len(lacking) - is_new]])
        return places[-1], is_new

    def _take_over_sparse(self, rank: RankState, slot: int, keys: Sequence[int], units: int) -> None:
        """A prompt was resumed behind so many of its units, so every group has what that takes."""
        for group, rule in rank.rules.items():
            for unit in rule.needed_at(units):
                if unit < len(keys) and not self._sparse[group].masks.get(keys[unit], 0) & rank.bit:
                    self._gain_sparse(rank, slot, keys[unit], group)

    def _gain_sparse(self, rank: RankState, slot: int, key: int, group: int) -> None:
        self._sparse[group].gain(slot, key)
        if isinstance(rank.pool, SharedPool):
            rank.pool.guard.attempt(rank.pool.gained, group, key)

    def _let_go(self, rank: RankState, slot: int, place: int, *, with_itself: bool = False) -> None:
        """A place is gone, and with it what was taken over with it."""
        taken = rank.adopted.let_go(place)
        self._lose_taken(rank, slot, [*taken, place] if with_itself else taken)

    def _name_taken(self, rank: RankState, slot: int, places: Sequence[int]) -> None:
        """Blocks that had been taken over were stored after all: that is the one copy of them."""
        for place in places:
            if rank.adopted.named(place) and rank.chains.has_twin(slot, place):
                rank.chains.lose(slot, place)
                if isinstance(rank.pool, SharedPool) and (key := self._runs.key(place)) is not None:
                    rank.pool.guard.attempt(rank.pool.lost_twin, key)
                self._lose_taken_sparse(rank, slot, place)

    def _lose_taken(self, rank: RankState, slot: int, places: Sequence[int]) -> None:
        keys = {place: key for place in places if (key := self._runs.key(place)) is not None}
        for place in keys:
            self._lose_taken_sparse(rank, slot, place)
        lost = rank.chains.lose_all(slot, keys)
        rank.blocks -= len(lost)
        if rank.pool is not None:
            rank.pool.guard.attempt(rank.pool.removed, [keys[place] for place in lost], copies=0)

    def _lose_taken_sparse(self, rank: RankState, slot: int, place: int) -> None:
        if (key := self._runs.key(place)) is not None:
            for group in rank.rules:
                is_held = self._sparse[group].masks.get(key, 0) & rank.bit
                self._sparse[group].lose(slot, key)
                if is_held and isinstance(rank.pool, SharedPool):
                    rank.pool.guard.attempt(rank.pool.lost, group, key)

    def _lose_named(self, rank: RankState, slot: int, names: Sequence[EngineHash]) -> list[int] | None:
        """The rank gave up blocks, all of them known and each named once (None: they are not). Returns the keys of what
        it has no copy of any more. In any order it takes time in their number.
        """
        places = rank.names.places(names)
        keys = {place: key for place in places if (key := self._runs.key(place)) is not None}
        if len(keys) < len(names) or self.namespaces or rank.orphans or rank.adopted.is_used:
            return None
        lost = rank.chains.lose_all(slot, keys)
        rank.blocks -= len(lost)
        if isinstance(rank.pool, SharedPool):
            for place in keys.keys() - lost:
                rank.pool.guard.attempt(rank.pool.lost_twin, keys[place])
        forgotten = [(name, place) for name, place in zip(names, places, strict=True) if not self._is_held(place)]
        for name, place in forgotten:
            rank.names.forget(name, place)
        self._note_forgotten(len(forgotten))
        return [keys[place] for place in lost]

    # --- names --------------------------------------------------------------------------------------

    def _key(self, rank: RankState, name: EngineHash) -> int | None:
        place = rank.names.place(name)
        return rank.names.stray(name) if place is None else self._runs.key(place)

    def _learn(
        self, rank: RankState, slot: int, names: Sequence[EngineHash], places: Iterable[int], *, fresh: int
    ) -> None:
        """Blocks were stored under these names; the last ``fresh`` of them nobody had known."""
        common = rank.names.common.places
        if rank.names.own is None and (fresh < len(names) or not common.keys().isdisjoint(names)):
            places = list(places)
            before = [*map(common.get, names)]
            if before != places and self._are_at_odds(slot, before, places, fresh=fresh):
                rank.names.part()
        rank.names.learns.learn(names, places, keeps_others=bool(self.namespaces))

    def _are_at_odds(self, slot: int, before: Sequence[int | None], places: Sequence[int], *, fresh: int) -> bool:
        """Whether names are those of other blocks on other ranks (of places ``before``), or other ones for blocks that
        others have named.
        """
        is_asked = not self.namespaces
        for at, (known, place) in enumerate(zip(before, places, strict=True)):
            if known is None:
                is_odd = is_asked and at < len(places) - fresh and self._is_named_beside(slot, place)
                is_asked = False  # what holds of one block holds of those behind it
            else:
                is_odd = known != place and self._runs.is_held_beside(slot, known) and not self._are_alike(known, place)
            if is_odd:
                return True
        return False

    def _is_named_beside(self, slot: int, place: int) -> bool:
        """Whether another rank with the same table of names holds a block that it has named: what it has taken over it
        has not.
        """
        common = self._ranks[slot].names.common
        return self._runs.is_held_beside(slot, place) and any(
            rank.names.common is common and rank.names.own is None and not rank.adopted.is_used
            for other, rank in self._ranks.items()
            if other != slot and self._runs.holds(other, place)
        )

    def _are_alike(self, place: int, other: int) -> bool:
        """Whether two places are of one text, which the rank's events tell of by one name (``core/namespaces``)."""
        key = self._runs.key(place)
        return key is not None and self._runs.key(other) in self.namespaces.alike(key)

    def _note_stray(self, rank: RankState, name: EngineHash, key: int) -> None:
        """A sparse group holds a block that has no place."""
        known = rank.names.stray(name)
        if known not in (None, key) and any(t.masks.get(known, 0) & ~rank.bit for t in self._sparse.values()):
            rank.names.part()
        rank.names.learns.strays[name] = key

    def _is_sparse(self, key: int) -> bool:
        return any(key in table.masks for table in self._sparse.values())

    def _is_held(self, place: int) -> bool:
        """Whether any rank holds a block, on whatever tier and in whatever group."""
        return self._runs.is_held(place) or ((key := self._runs.key(place)) is not None and self._is_sparse(key))

    def _unheld(self, places: Sequence[int]) -> Collection[int]:
        """Those of which that is not so."""
        gone = self._runs.unheld(places)
        if self._sparse:
            gone = {each for each in gone if (key := self._runs.key(each)) is None or not self._is_sparse(key)}
        return gone

    def _has_place(self, slot: int, place: int) -> bool:
        """Whether a rank holds a block, on whatever tier and in whatever group."""
        key = self._runs.key(place)
        return key is not None and (self._runs.has(slot, place) or self._has_key(slot, key))

    def _has_key(self, slot: int, key: int) -> bool:
        """Whether a sparse group of a rank holds a block."""
        return any(table.masks.get(key, 0) >> slot & 1 for table in self._sparse.values())

    def _sparse_end(self, keys: Sequence[int]) -> int:
        """How many of these blocks there are up to the last that a sparse group holds."""
        tables = [table.masks for table in self._sparse.values() if table.masks]
        if all(masks.keys().isdisjoint(keys) for masks in tables):
            return 0
        return next(end for end in range(len(keys), 0, -1) if self._is_sparse(keys[end - 1]))

    def _note_forgotten(self, count: int) -> None:
        self._forgotten += count
        if self._forgotten > len(self) // 4 + 4096:
            self.sweep_soon()

    # --- letting go, in slices ------------------------------------------------------------------------

    def sweep(self) -> None:
        """Let go at once of names whose block nobody holds: they outlive it where ranks leave or domains differ."""
        self.sweep_soon()
        while self.tidy():
            pass

    def sweep_soon(self) -> None:
        """The same, by and by."""
        if not self._is_sweeping:
            self._is_sweeping = True
            self._chores.append(self._sweep())

    def tidy(self, steps: int = SLICE) -> bool:
        """Go on with what is to be let go of, so many steps. False: nothing is left to do."""
        while self._chores:
            for _ in islice(self._chores[0], steps):
                steps -= 1
            if not steps:
                return True
            self._chores.popleft()
        return False

    def _let_go_of(self, chains: Chains, runs: Sequence[Run]) -> Iterator[None]:
        for run in runs:
            blocks = len(run.keys) if self._sparse else 0
            chains.trim((run,))
            yield from repeat(None, 1 + blocks // _BLOCKS_A_STEP)

    def _sweep(self) -> Iterator[None]:
        forgotten = self._forgotten
        own = [rank.names.own for rank in self._ranks.values() if rank.names.own is not None]
        for names in (*self._names.values(), *own):
            yield from names.sweep(unheld=self._unheld, is_sparse=self._is_sparse)
        for chains in list(self._chains.values()):
            yield from self._let_go_of(chains, chains.runs())
        if self.namespaces:
            known = set(self.provisional.dense).union(*(table.masks for table in self._sparse.values()))
            known.update(*(chains.all_keys() for chains in self._chains.values()))
            pools = (rank.pool for rank in self._ranks.values() if rank.pool is not None)
            known.update(*(each.keys for pool in pools for each in pool.pending))  # requests unheard of
            self.namespaces.forget(known.__contains__)
        self._is_sweeping = False
        self._forgotten -= forgotten  # of what came since, names may be left

    # --- how much it is ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._runs.blocks

    def _copies(self, slot: int) -> int:
        """Blocks on the device with all their copies, in the dense group."""
        rank = self._ranks[slot]
        return rank.blocks + rank.chains.twins(slot)
