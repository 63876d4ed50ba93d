"""What an index may hold at most, and what it lets go of (``core/budget``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from router.core.blocks import Blocks
from router.core.shared_pool import SharedPool
from router.core.usable import slots_of
from router.wire.kv_events import BlockStored

#: After this share of the bound has been told of, all that is held is counted anew.
_COUNTED_SHARE = 64
_FEW = 64
#: So many blocks may wait for a parent on each rank, whatever else there is.
FEW_ORPHANS = 1024
#: A run takes so many units besides its blocks; one of so many blocks is in the unit.
_RUN_UNITS = 5
_USUAL_RUN = 16
#: So many further holders of blocks are one unit.
_HOLDERS_A_UNIT = 14
#: So many adapters are known by name, and so many tiers below the device.
_MOST_ADAPTERS = 4096
_LONGEST_ADAPTER = 256
_MOST_TIERS = 16


class Bounded(Blocks):
    """Blocks within the bound of a budget."""

    _besides = 0  # what is held besides blocks of dense groups, when it was counted last
    _uncounted = 0
    _may_take = False  # whether what was granted is not used up

    @property
    def held(self) -> int:
        """What is held, in the budget's units."""
        return len(self) + self._besides

    def forget(self, count: int) -> None:
        """Let go of so much, of what there is most of first; of dense blocks the ends of chains, on all ranks: what is
        left is true, only less.
        """
        goal = self.held - count
        self.tidy()  # one slice, lest an event wait for all that is to be let go of
        is_swept = False
        while (excess := self.held - goal) > 0:
            group = max(self._sparse, key=lambda group: len(self._sparse[group].masks), default=None)
            many = 0 if group is None else len(self._sparse[group].masks)
            if group is not None and many > len(self):
                self._evict_sparse(group, min(many, excess))
            elif len(self):
                self._evict(min(len(self), excess))
            elif is_swept:
                break
            else:
                is_swept = True
                self.sweep()
                for rank in self._ranks.values():
                    rank.forget_waits()
            if self.held > goal:
                self._count_besides()
        self.budget.note(self, self.held)

    def recall(self) -> None:
        """Take nothing more without asking."""
        self._may_take, self._quota = False, 0
        self.budget.note(self, self.held)

    def _account(self, event: BlockStored) -> None:
        """An event is about to be entered: each of its names adds one thing or another at most."""
        count = 1 + len(event.hashes)
        self._quota -= count
        if self._quota < 0:
            self._ask(count)

    def _ask(self, count: int) -> None:
        """What was granted is used up."""
        self._uncounted += count
        if self._may_take or self._uncounted > max(_FEW, self.max_blocks // _COUNTED_SHARE):
            self._count_besides()
        self.budget.note(self, self.held)
        self.budget.make_room()
        self._quota = self.budget.grant(self, self.held) - count
        self._may_take = self._quota >= 0
        if not self._may_take:
            self.recall()

    def _count_besides(self) -> None:
        self._uncounted = 0
        tables = self._sparse.values()
        ranks = self._ranks.values()
        names = sum(map(len, self._names.values())) + sum(len(rank.names.own or ()) for rank in ranks)
        self._besides = (
            sum(len(table.masks) + table.extra_copies() for table in tables)
            + _RUN_UNITS * max(0, len(self._runs.by_number) - len(self) // _USUAL_RUN)
            + sum(chains.extra_copies() for chains in self._chains.values())
            + max(0, names - len(self) - self._forgotten)
            + max(0, sum(rank.blocks for rank in ranks if not rank.is_lone) - len(self)) // _HOLDERS_A_UNIT
            + sum(max(0, rank.orphan_units - FEW_ORPHANS) for rank in ranks)
            + sum(rank.blocks * len(rank.rules) for rank in ranks if isinstance(rank.pool, SharedPool))
        )

    def _make_room(self, parent: int | None, blocks: int) -> bool:
        """Forget what does not fit beside so many more. False: they cannot come in, or not behind ``parent`` now."""
        if self._may_take:
            return True
        if blocks > self.max_blocks:
            return False
        self.budget.note(self, self.held)
        if self.budget.used + blocks > self.max_blocks:
            self.budget.make_room(blocks)
        self.budget.note(self, self.held + blocks)
        return parent is None or self._runs.key(parent) is not None

    def _evict(self, count: int) -> None:
        forgotten = 0
        for chains in self._chains.values():
            for keys, lost in chains.evict(count - forgotten):
                forgotten += len(keys)
                for slot, bits in lost.items():
                    rank = self._ranks[slot]
                    rank.blocks -= bits.bit_count()
                    if rank.pool is not None:
                        gone = [key for at, key in enumerate(keys) if bits >> at & 1]
                        rank.pool.guard.attempt(rank.pool.removed, gone, copies=0)
                for group in self._sparse:
                    self._discard(group, keys)
        self.evicted_blocks += forgotten
        self._note_forgotten(forgotten)

    def _evict_sparse(self, group: int, count: int) -> None:
        """Forget blocks of a sparse group, those stored first first."""
        keys = list(islice(self._sparse[group].masks, count))
        self._discard(group, keys)
        self.evicted_blocks += len(keys)
        self._note_forgotten(len(keys))

    def _discard(self, group: int, keys: Sequence[int]) -> None:
        """Forget blocks of a sparse group on all ranks."""
        table = self._sparse[group]
        for key in keys:
            for slot in slots_of(table.discard(key)):
                rank = self._ranks[slot]
                rank.blocks -= rank.is_lone
                if isinstance(rank.pool, SharedPool):
                    rank.pool.guard.attempt(rank.pool.lost, group, key)

    def _note_adapter(self, name: str) -> None:
        """An adapter is in use; of very many those heard of first are forgotten."""
        if name not in self.adapters and len(name) <= _LONGEST_ADAPTER:
            self.adapters[name] = None
            if len(self.adapters) > _MOST_ADAPTERS:
                del self.adapters[next(iter(self.adapters))]

    def _known_tier(self, tier: str) -> str | None:
        """A tier by one spelling; None where there are too many."""
        if tier not in self._tiers and len(self._tiers) >= _MOST_TIERS:
            return None
        return self._tiers.setdefault(tier, tier)
