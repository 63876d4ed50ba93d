"""What each rank holds, by its events.

One ``Residency`` covers one model over all its ranks. Engines' names for blocks are mapped onto chain keys through the
token ids of dense events. Sparse groups (windows, recurrent state) name their blocks by the same hashes, often before
the dense event has come: such names wait. So do dense blocks whose parent is not known, unless a prompt in flight says
where they belong (``core/adoption``): no position is ever guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from router.core.bounded import FEW_ORPHANS
from router.core.groups import Groups
from router.core.provisional import DENSE
from router.core.radix_pool import RadixPool
from router.core.rank_state import RankState, keys_of_event
from router.core.shared_pool import SharedPool
from router.core.usable import Kind
from router.wire.kv_events import GPU, REMOTE, AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event, tier_of

#: Among the sparse groups: prompts' ends inside a block of the dense group. Other groups have the engine's numbers.
TAILS = -2
#: On each rank this share of the blocks that may be known may wait for a parent, or ``FEW_ORPHANS``, if it is more.
ORPHANS_SHARE = 16


class Residency(Groups):
    """Blocks, as events bring and take them."""

    # --- events -----------------------------------------------------------------------------------

    def apply(self, slot: int, event: Event) -> None:
        """Apply one event of a rank. Unknown events, and blocks that lie on another machine, are passed over."""
        match event:
            case BlockStored() if event.locality == REMOTE:
                pass
            case BlockStored() if event.medium == GPU:
                self._store(slot, event)
            case BlockStored():
                self._store_lower(slot, event)
            case BlockRemoved() if event.locality != REMOTE:
                self._remove(slot, event)
            case AllBlocksCleared():
                begin = self.begin_anew if self._ranks[slot].odd_events else self.clear
                begin(slot)
            case _:
                pass

    def _store(self, slot: int, event: BlockStored) -> None:
        rank = self._ranks[slot]
        if self._is_odd(rank, slot, event):
            return
        if rank.is_doubted:
            self._forget_groups(rank, slot)
        self._account(event)
        if self._is_news(rank, event):
            self._learn_group(rank, slot, event)
            if rank.dense_group is not None:
                early, rank.unplaced = rank.unplaced, []
                for each in early:
                    self._store_sparse(rank, slot, each)
        if event.group == rank.dense_group:
            if not event.hashes or not event.is_dense:
                pass
            elif event.block_tokens == rank.stride * self.block_tokens:
                rank.is_settled = rank.is_settled or len(event.hashes) > 1
                self._store_dense(rank, slot, event)
            elif event.block_tokens == self.block_tokens:
                self._store_tail(rank, slot, event)
        elif rank.rules[event.group].kind is not Kind.UNUSED:
            self._store_sparse(rank, slot, event)

    def _store_dense(self, rank: RankState, slot: int, event: BlockStored) -> None:
        """Store an event, those that wait for its blocks, those that wait for theirs, and so on."""
        due = [event]
        while due:
            event = due.pop()
            if self._is_stored(rank, slot, event) and (rank.unnamed or rank.orphans):
                due += reversed(self._end_waits(rank, slot, event.hashes))

    def _is_stored(self, rank: RankState, slot: int, event: BlockStored) -> bool:
        """Whether an event could be placed, and there was room for it."""
        parent = None if event.parent is None else self._place(rank, event.parent)
        parent_key = None if parent is None else self._runs.key(parent)
        if parent_key is None and event.parent is not None:
            parent = self._adopt(rank, slot, event, self.provisional.expected(slot))
            parent_key = None if parent is None else self._runs.key(parent)
        if parent_key is None and event.parent is not None:
            most = max(FEW_ORPHANS, self.max_blocks // ORPHANS_SHARE)
            rank.wait_for_parent(event.parent, event, most_blocks=most)
            return False
        if parent is not None and (rank.adopted.is_used or not self._runs.holds(slot, parent)):
            self._heal(rank, slot, parent)
        if event.lora_name:
            self._note_adapter(event.lora_name)
        keys: Sequence[int] = keys_of_event(event, parent_key, unit_tokens=self.block_tokens)
        if self.namespaces:
            parent, keys = self._claim(rank, slot, event, parent, keys)
        if not self._make_room(parent, len(keys)):
            return False
        hashes = event.hashes
        if again := self._told_again(rank, slot, event, keys):
            known = rank.chains.places(rank.chains.path(keys, limit=again), again)
            self._name_taken(rank, slot, known)
            rank.applied_blocks += again
            self._learn(rank, slot, hashes[:again], known, fresh=0)
            self.provisional.confirm(slot, DENSE, keys[:again])
            parent, keys, hashes = known[-1], keys[again:], hashes[again:]
        if keys:
            self._enter(rank, slot, parent, keys, hashes)
        if rank.pairs is not None and len(event.next_tokens) == len(keys):
            rank.pairs.store(hashes, keys, event.next_tokens)
        return True

    def _place(self, rank: RankState, name: EngineHash) -> int | None:
        """Where a block is known in chains like the rank's."""
        place = rank.names.place(name)
        return place if place is not None and rank.chains.has(place) else None

    def _enter(
        self, rank: RankState, slot: int, parent: int | None, keys: Sequence[int], hashes: Sequence[EngineHash]
    ) -> None:
        before = None if parent is None else self._runs.key(parent)
        places: Iterable[int]
        known = self._runs.blocks
        new, places = rank.chains.extend(slot, parent, keys)
        fresh = self._runs.blocks - known
        rank.blocks += new
        rank.applied_blocks += len(keys)
        if rank.adopted.is_used:
            places = list(places)
            self._name_taken(rank, slot, places)
        self._learn(rank, slot, hashes, places, fresh=fresh)
        if rank.pool is not None:
            rank.pool.guard.attempt(rank.pool.stored, before, keys, new=new)
        self.provisional.confirm(slot, DENSE, keys)

    def _told_again(self, rank: RankState, slot: int, event: BlockStored, keys: Sequence[int]) -> int:
        """How many of an event's first blocks were found, not stored (vLLM's ``kv_cache_report_mode: full``).

        Dense groups alone resume behind whatever they hold, so nothing of that is ever stored from the start on. With
        sparse groups it may be; the report of one, which is told first, names far more than such a group keeps.
        """
        if event.parent is not None or event.kind is None or len(keys) < 2:
            return 0
        if rank.rules and event.hashes != rank.reported:
            return 0
        path = rank.chains.path(keys, limit=len(keys))
        return rank.chains.depths(path)[slot] if rank.chains.holds_at(path, slot, 0) else 0

    def _claim(
        self, rank: RankState, slot: int, event: BlockStored, parent: int | None, keys: Sequence[int]
    ) -> tuple[int | None, Sequence[int]]:
        """The event's chain in the namespace that waits for it, if the rank has the block before it there, too."""
        key = None if parent is None else self._runs.key(parent)
        waits = self._waits(rank, slot)
        if keys and event.parent is not None and not waits(keys[-1]):
            for place in rank.names.all_places(event.parent)[:-1]:
                other = self._runs.key(place)
                behind = keys_of_event(event, other, unit_tokens=self.block_tokens)
                if other is not None and waits(behind[-1]):
                    return place, behind
        own, claimed = self.namespaces.claim(key, keys, waits=waits)
        if own == key or event.parent is None:
            return parent, claimed
        places = rank.names.all_places(event.parent)
        return next(((place, claimed) for place in places if self._runs.key(place) == own), (parent, keys))

    def _waits(self, rank: RankState, slot: int) -> Callable[[int], bool]:
        """Whether a block is due: it is promised, or the last of a request that is unheard of."""
        promised, pool = self.provisional.waits(slot), rank.pool
        if not isinstance(pool, RadixPool):
            return promised
        return lambda key: promised(key) or bool(pool.guard.attempt(pool.awaits, key))

    def _store_sparse(self, rank: RankState, slot: int, event: BlockStored) -> None:
        if self._is_report(rank, event):
            rank.reported = event.hashes
            return
        self._note_keeping(rank, slot, event)
        self._judge_drafts(rank, slot, event)
        if rank.is_lone:
            self._store_lone(rank, slot, event)
            return
        if rank.dense_group is None:
            rank.unplaced.append(event)
            return
        keys = [self._key(rank, name) for name in event.hashes]
        if None in keys and self._ends_inside(rank, event) and (tail := self._tail_key(rank, slot, event)) is not None:
            self._meet_tails(rank)
            self._note_stray(rank, event.hashes[0], tail)
            keys = [tail]
        for name, key in zip(event.hashes, keys, strict=True):
            if key is not None:
                self._gain_sparse(rank, slot, key, event.group)
                self.provisional.confirm(slot, event.group, (key,))
            else:
                rank.wait_for_name(name, event.group)
        if None in keys:
            self._wait_between(rank, event)

    def _is_report(self, rank: RankState, event: BlockStored) -> bool:
        """Whether a group tells of more than it keeps, which lies before a prompt's end and before where it forked."""
        rule = rank.rules[event.group]
        if event.parent is not None or not event.is_dense or rank.segment_tokens.get(event.group, 1):
            return False
        return rule.kind is Kind.WINDOW and len(event.hashes) > 2 * rule.needed

    def _note_keeping(self, rank: RankState, slot: int, event: BlockStored) -> None:
        """Learn how a window group thins out: one that ever stores nothing of a block keeps prompts' ends only; one
        that stores more than two of them, or what was generated, keeps all.
        """
        if rank.retention_tokens is not None:
            rank.segment_tokens[event.group] = rank.retention_tokens
        elif not event.hashes:
            rank.segment_tokens[event.group] = 0
        elif event.is_dense and event.group not in rank.segment_tokens:
            before = None if event.parent is None else self._key(rank, event.parent)
            is_generated = before is not None and self.provisional.ends_prompt(slot, before, stride=rank.stride)
            if is_generated or len(event.hashes) > 2 * rank.rules[event.group].needed:  # ends and forks are two places
                rank.segment_tokens[event.group] = 1

    def _store_lower(self, slot: int, event: BlockStored) -> None:
        """A copy below the device, in host memory or on disk: worth a load, not a prefill. Dense groups only."""
        rank = self._ranks[slot]
        if rank.is_doubted:
            self._forget_groups(rank, slot)
        tier = self._known_tier(tier_of(event.medium))
        if event.group in rank.rules or tier is None:
            return
        self._account(event)
        if rank.dense_group is None and event.is_dense and event.hashes:
            rule = self._rule(rank, event)
            if rule.kind is Kind.DENSE and rule.stride != rank.stride:  # until the device's own blocks tell
                self._set_stride(slot, rule.stride)
        known = [self._place(rank, name) for name in event.hashes]
        if None in known and event.is_dense and event.block_tokens == rank.stride * self.block_tokens:
            parent = None if event.parent is None else self._place(rank, event.parent)
            key = None if parent is None else self._runs.key(parent)
            if key is not None or event.parent is None:
                keys = keys_of_event(event, key, unit_tokens=self.block_tokens)
                if self._make_room(parent, len(keys)):
                    before = self._runs.blocks
                    places = rank.chains.extend(slot, parent, keys, tier=tier)[1]
                    self._learn(rank, slot, event.hashes, places, fresh=self._runs.blocks - before)
                    if event.next_tokens:
                        rank.pairs_below.store(event.hashes, keys, event.next_tokens)
                return
        is_paired = len(event.next_tokens) == len(known)
        for at, place in enumerate(known):
            if place is not None:
                rank.chains.gain(slot, place, tier=tier)
                if is_paired and (key := self._runs.key(place)) is not None:
                    rank.pairs_below.store(event.hashes[at : at + 1], (key,), event.next_tokens[at : at + 1])

    def _remove(self, slot: int, event: BlockRemoved) -> None:
        rank = self._ranks[slot]
        tier = tier_of(event.medium)
        if event.group in rank.rules:
            rank.wait_unplaced()
            if tier == GPU:
                for name in event.hashes:
                    self._lose_sparse(rank, slot, name, event.group)
        elif tier != GPU or event.group == rank.dense_group:
            if rank.pairs is not None:
                (rank.pairs if tier == GPU else rank.pairs_below).remove(event.hashes)
            copies = self._copies(slot)
            names: Sequence[EngineHash] = event.hashes
            if isinstance(rank.pool, RadixPool) and tier == GPU:
                names = rank.names.in_chain_order(names, self._runs)
            if self.namespaces and isinstance(rank.pool, RadixPool) and tier == GPU:
                for name in reversed(names):  # of one name that block goes which nothing is behind any more
                    if (key := self._remove_dense(rank, slot, name, tier)) is not None:
                        rank.pool.guard.attempt(rank.pool.removed, (key,), copies=copies)
                return
            if tier != GPU or (gone := self._lose_named(rank, slot, names)) is None:
                gone = [key for name in names if (key := self._remove_dense(rank, slot, name, tier)) is not None]
            if rank.pool is not None and tier == GPU:
                is_counted = isinstance(rank.pool, RadixPool) or not rank.adopted.has_gaps
                rank.pool.guard.attempt(rank.pool.removed, gone, copies=copies if is_counted else 0)

    def _lose_sparse(self, rank: RankState, slot: int, name: EngineHash, group: int) -> None:
        key, table = self._key(rank, name), self._sparse[group]
        alike = () if key is None else self.namespaces.alike(key)
        key = next((each for each in alike if table.masks.get(each, 0) & rank.bit), None)
        if key is None:
            rank.drop_unnamed(name, group)
            return
        is_last = table.lose(slot, key)
        if rank.is_lone:
            rank.blocks -= is_last
        if isinstance(rank.pool, SharedPool) and group in rank.rules:
            rank.pool.guard.attempt(rank.pool.lost, group, key)
        if not self._is_sparse(key):
            self._forget_sparse(rank, name, key)

    def _forget_sparse(self, rank: RankState, name: EngineHash, key: int) -> None:
        """No sparse group holds a block any more: its name goes, unless dense ones do."""
        rank.names.drop_stray(name, key)
        for place in rank.names.all_places(name):
            if self._runs.key(place) == key and not self._runs.is_held(place):
                rank.names.forget(name, place)
                rank.chains.trim_at(place)
                self._note_forgotten(1)

    def _remove_dense(self, rank: RankState, slot: int, name: EngineHash, tier: str) -> int | None:
        """Returns the block's key if this was the rank's last copy of it."""
        place = rank.names.place(name)
        if place is None or (key := self._runs.key(place)) is None:
            if (tail := rank.names.stray(name)) is not None and self._sparse[TAILS].masks.get(tail, 0) & rank.bit:
                self._lose_sparse(rank, slot, name, TAILS)
            elif tier == GPU and not rank.drop_orphan(name) and (gone := rank.adopted.removed_unknown()) is not None:
                self._let_go(rank, slot, gone, with_itself=True)
            return None
        if self.namespaces:
            places = {self._runs.key(each): each for each in rank.names.all_places(name)}
            alike = [each for each in self.namespaces.alike(key) if each in places]
            held = [each for each in alike if self._runs.holds(slot, places[each], tier=tier)]
            pool, first = rank.pool, None
            if isinstance(pool, RadixPool) and len(held) > 1:
                first = pool.guard.attempt(pool.first_to_go, held)
            key = first or next(iter(held), key)
            place = places[key]
        if tier == GPU and rank.orphans and not self._runs.holds(slot, place):  # another rank gave it the name
            rank.drop_orphan(name)
            return None
        is_last = rank.chains.lose(slot, place, tier=tier)
        if is_last and tier == GPU:
            rank.blocks -= 1
            if rank.adopted.is_used:
                self._let_go(rank, slot, place)
        elif tier == GPU and isinstance(rank.pool, SharedPool):
            rank.pool.guard.attempt(rank.pool.lost_twin, key)
        if not self._is_held(place):
            rank.names.forget(name, place)
            self._note_forgotten(1)
        return key if is_last else None

    # --- ends of prompts inside a block ---------------------------------------------------------------

    def _store_tail(self, rank: RankState, slot: int, event: BlockStored) -> None:
        """A prompt's end inside a block, by its last unit: every group that has it can be met there."""
        key = self._tail_key(rank, slot, event)
        if key is None:
            return
        self._meet_tails(rank)
        self._sparse[TAILS].gain(slot, key)
        rank.applied_blocks += 1
        for name in event.hashes:
            self._note_stray(rank, name, key)
        self.provisional.confirm(slot, DENSE, (key,))
        for each in self._end_waits(rank, slot, event.hashes):
            self._store_dense(rank, slot, each)

    def _tail_key(self, rank: RankState, slot: int, event: BlockStored) -> int | None:
        """The key of the one unit that an event stores, if what is before it is known, or a prompt in flight has it."""
        before = None if event.parent is None else self._key(rank, event.parent)
        if before is None and event.parent is not None:
            again = rank.geometry.eagle and event.group != rank.dense_group
            found = (
                each.tail_of(event, unit_tokens=self.block_tokens, before_last=again)
                for each in self.provisional.expected(slot)
            )
            return next((each for each in found if each is not None), None)
        return keys_of_event(event, before, unit_tokens=self.block_tokens)[-1]

    def _ends_inside(self, rank: RankState, event: BlockStored) -> bool:
        """Whether a sparse group stores what it takes to go on inside a block."""
        is_smaller = rank.met[event.group].block_tokens > event.block_tokens == self.block_tokens
        return is_smaller and len(event.hashes) == 1 and event.is_dense

    def _meet_tails(self, rank: RankState) -> None:
        """Every group can be met at ends inside a block, if recurrent state is kept there and no window has larger
        blocks (``partial_hash_hits_enabled``): else full attention tells of such ends, and nobody goes on there.
        """
        larger = [rule for rule in rank.rules.values() if rule.stride > 1]
        if not rank.has_tails and larger and all(rule.is_state or rule.kind is Kind.DENSE for rule in larger):
            rank.has_tails, rank.align = True, 1
            if rank.rules:  # whose blocks are found at such ends, too: of their pool nothing is foretold
                rank.pool = None
            rank.rules = {group: replace(rule, stride=1) for group, rule in rank.rules.items()}

    # --- blocks whose parent or name is not known yet ------------------------------------------------

    def _end_waits(self, rank: RankState, slot: int, names: Sequence[EngineHash]) -> Sequence[BlockStored]:
        """These blocks are known now: sparse groups have what they named. Returns the events that waited for them."""
        for name in names:
            for group in rank.unnamed.pop(name, ()):
                if (key := self._key(rank, name)) is not None:
                    self._gain_sparse(rank, slot, key, group)
                    self.provisional.confirm(slot, group, (key,))
        return [event for name in names for event in rank.take_orphans(name)]
