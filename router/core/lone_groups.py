"""Ranks without a dense group: all layers attend within windows (Mistral 7B, Phi-3), or keep recurrent state alone.

No dense event tells which blocks the names in a sparse one stand for. Such an event covers all tokens that a step has
computed and names, in their order, those blocks that are kept: they lie before the last place where the prompt can be
resumed. Of a prompt in flight that place is known; else it is taken to be the event's end.

That a rank is of this kind shows at the end of a batch of events: what a step stores is told of all groups in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from router.core.rank_state import RankState, keys_of_event
from router.core.shared_pool import SharedPool
from router.core.tables import CopyTable
from router.core.taking_over import TakingOver
from router.core.usable import Kind, slots_of
from router.wire.kv_events import BlockStored


class LoneGroups(TakingOver):
    """Blocks of sparse groups beside which there is no dense one."""

    def end_batch(self, slot: int) -> None:
        """A batch of a rank's events has been applied whole."""
        self.provisional.settle()
        self.tidy()
        rank = self._ranks[slot]
        if isinstance(rank.pool, SharedPool):
            rank.pool.guard.attempt(rank.pool.batch_ended)
        if not rank.unplaced:
            return
        rank.is_lone = all(rule.kind is Kind.WINDOW for rule in rank.rules.values())
        if not rank.is_lone:
            rank.wait_unplaced()
            return
        self._lone |= rank.bit
        rank.pool = None  # what it foretells is of chains
        events, rank.unplaced = rank.unplaced, []
        for event in events:
            self._store_lone(rank, slot, event)

    def _end_lone(self, rank: RankState, slot: int) -> None:
        """There is a dense group after all: its events will tell which blocks they are that were placed without it."""
        rank.is_lone, self._lone = False, self._lone & ~rank.bit
        rank.blocks = 0
        for name, key in rank.names.strays().items():
            for group in rank.rules:
                table = self._sparse[group]
                while table.masks.get(key, 0) & rank.bit:
                    table.lose(slot, key)
                    rank.wait_for_name(name, group)
        for group in rank.rules:
            self._sparse[group].clear(slot)
        self._renew_pool(slot)

    def _store_lone(self, rank: RankState, slot: int, event: BlockStored) -> None:
        rule = rank.rules[event.group]
        count = len(event.hashes)
        if count and (asked := self._asked(rank, slot, event)) is not None:
            places = self._kept_places(rank, rule, event, *asked)
            if len(places) == count:
                keys = asked[0].keys[rule.stride - 1 :: rule.stride]
                self._gain_lone(rank, slot, event, [keys[at] for at in places if at is not None])
                return
        keys, end = self._span(rank, slot, event)
        if count < len(keys):  # of more than lie before one place those before others cannot be told
            count = min(count, rule.needed)
            keys = keys[max(0, end - count) : end]
        self._gain_lone(rank, slot, replace(event, hashes=event.hashes[len(event.hashes) - count :]), keys)

    def _gain_lone(self, rank: RankState, slot: int, event: BlockStored, keys: Sequence[int]) -> None:
        table = self._sparse[event.group]
        for name, key in zip(event.hashes, keys, strict=False):
            if len(table.masks) >= self.max_blocks and key not in table:
                self._forget_oldest(table)
            self._note_stray(rank, name, key)
            rank.blocks += table.gain(slot, key)
            rank.applied_blocks += 1
            self.provisional.confirm(slot, event.group, (key,))

    def _forget_oldest(self, table: CopyTable) -> None:
        for slot in slots_of(table.discard(next(iter(table.masks)))):
            self._ranks[slot].blocks -= self._ranks[slot].is_lone
        self.evicted_blocks += 1
        self._note_forgotten(1)

    def _span(self, rank: RankState, slot: int, event: BlockStored) -> tuple[Sequence[int], int]:
        """The keys of all blocks that an event covers, and behind how many of them its prompt can be resumed."""
        unit, stride = self.block_tokens, event.block_tokens // self.block_tokens
        for chain in self.provisional.expected(slot):
            if units := chain.end_of(event, unit_tokens=unit):
                before = len(chain.keys) - len(units)
                end = len(chain.keys) if rank.geometry.eagle or not chain.tail else chain.tail
                return units[stride - 1 :: stride], (end - before) // stride
        parent = None if event.parent is None else rank.names.stray(event.parent)
        if parent is None and event.parent is not None:
            return (), 0
        if len(event.hashes) < len(event.token_ids) // event.block_tokens:
            event = replace(event, extra_keys=None)  # nothing tells which blocks they are of
        keys = keys_of_event(event, parent, unit_tokens=unit)
        return keys, len(keys)

    def _add_lone(self, found: dict[int, int], keys: Sequence[int], limit: int) -> None:
        """Look at a prompt up to the last block that a rank of this kind has, or has promised."""
        tables = [table.masks for table in self._sparse.values()] + list(self.provisional.sparse.values())
        missing = self._lone
        for slot in [slot for slot in found if missing >> slot & 1]:
            del found[slot]  # promised before the rank was known to be one
        for end in range(limit, 0, -1):
            held = 0
            for table in tables:
                held |= table.get(keys[end - 1], 0)
            if held := held & missing:
                found.update(dict.fromkeys(slots_of(held), end))
                missing ^= held
                if not missing:
                    return
