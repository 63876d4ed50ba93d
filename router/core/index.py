"""Which rank holds which block, and how much of a prompt each rank can reuse.

One ``PrefixIndex`` covers one model over all its ranks. A block is named by its chain key (``wire/block_keys``),
which stands for the block and all before it; engines' own hashes are mapped onto keys through the token ids of dense
events. Sparse groups (windows, recurrent state) name their blocks by the same hashes, often before the dense event
has come: such names wait. So do dense blocks whose parent is not known: no position is ever guessed.

Groups are judged at the end of the dense prefix by the rules of ``core/usable``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from router.core.forecast import Pool
from router.core.namespaces import Namespaces
from router.core.provisional import DENSE, Provisional, Ticket
from router.core.rank_state import MAX_ORPHANS, MAX_UNNAMED, RankState, bound, keys_of_event
from router.core.tables import ChainTable, CopyTable
from router.core.usable import Geometry, Kind, Mask, Rule, boundary, depths, only, rule_of, slots_of
from router.wire.kv_events import GPU, REMOTE, AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event


class PrefixIndex:
    """The blocks of one model, in units of ``block_tokens``. Mutated by its owner, on one thread."""

    def __init__(self, *, block_tokens: int, max_blocks: int = 1 << 23) -> None:
        self.block_tokens = block_tokens
        self.max_blocks = max_blocks
        self.evicted_blocks = 0
        self.provisional = Provisional()
        self.namespaces = Namespaces()
        self.adapters: set[str] = set()
        self._dense = ChainTable()
        self._sparse: defaultdict[int, CopyTable] = defaultdict(CopyTable)
        self._lower = CopyTable()
        self._names: dict[str, dict[EngineHash, int]] = {}
        self._ranks: dict[int, RankState] = {}
        self._strides: dict[int, int] = {}
        self._forgotten = 0

    # --- membership -------------------------------------------------------------------------------

    def add_rank(self, slot: int, *, domain: str, geometry: Geometry | None = None, pool: Pool | None = None) -> None:
        """Know a rank. Ranks of one ``domain`` name equal blocks equally (same engine, same hash settings)."""
        names = self._names.setdefault(domain, {})
        self._ranks[slot] = RankState(bit=1 << slot, names=names, geometry=geometry or Geometry(), pool=pool)
        self._set_stride(slot, 1)

    def remove_rank(self, slot: int) -> None:
        """Forget a rank and all it held."""
        self.clear(slot)
        self._set_stride(slot, None)
        del self._ranks[slot]

    def clear(self, slot: int) -> None:
        """The rank holds nothing. What its groups mean stays known. Takes time in the size of the index."""
        rank = self._ranks[slot]
        self.provisional.forget_ended(slot)
        for table in (self._dense, self._lower, *self._sparse.values()):
            table.clear(slot)
        rank.blocks = 0
        if rank.pool is not None:
            rank.pool.cleared()
        rank.orphans.clear()
        rank.unnamed.clear()
        self._sweep()

    # --- events -----------------------------------------------------------------------------------

    def apply(self, slot: int, event: Event) -> None:
        """Apply one event of a rank. Unknown events, and blocks that lie on another machine, are passed over."""
        match event:
            case BlockStored() if event.medium == GPU:
                self._store(slot, event)
            case BlockStored() if event.locality != REMOTE:
                self._store_lower(slot, event)
            case BlockRemoved():
                self._remove(slot, event)
            case AllBlocksCleared():
                self.clear(slot)
            case _:
                pass

    def _store(self, slot: int, event: BlockStored) -> None:
        rank = self._ranks[slot]
        if event.group != rank.dense_group and event.group not in rank.rules:
            self._meet_group(rank, slot, event)
        if event.group == rank.dense_group:
            if event.is_dense and event.block_tokens == rank.stride * self.block_tokens:
                self._store_dense(rank, slot, event)
        elif rank.rules[event.group].kind is not Kind.UNUSED:
            self._store_sparse(rank, slot, event)

    def _meet_group(self, rank: RankState, slot: int, event: BlockStored) -> None:
        """A group's first event tells what it is. The first dense one carries the chains."""
        rule = rule_of(
            event.kind,
            window_tokens=event.window_tokens,
            block_tokens=event.block_tokens,
            unit_tokens=self.block_tokens,
            geometry=rank.geometry,
        )
        if rule.kind is Kind.DENSE and rank.dense_group is None:
            rank.dense_group = event.group
            self._set_stride(slot, rule.stride)
        else:
            rank.rules[event.group] = rule
            rank.pool = None  # the groups share one, in an order that no event tells
        rank.align = math.lcm(
            rank.stride, *(rule.stride for rule in rank.rules.values() if rule.kind is not Kind.UNUSED)
        )

    def _set_stride(self, slot: int, stride: int | None) -> None:
        """Note how many units a dense block of the rank has; None as it leaves."""
        for known in self._strides:
            self._strides[known] &= ~(1 << slot)
        if stride is not None:
            self._ranks[slot].stride = stride
            self._strides[stride] = self._strides.get(stride, 0) | 1 << slot

    def _store_dense(self, rank: RankState, slot: int, event: BlockStored) -> None:
        parent = None if event.parent is None else rank.names.get(event.parent)
        if parent is None and event.parent is not None:
            rank.orphans.setdefault(event.parent, []).append(event)
            bound(rank.orphans, MAX_ORPHANS)
            return
        if event.lora_name:
            self.adapters.add(event.lora_name)
        keys: Sequence[int] = keys_of_event(event, parent, unit_tokens=self.block_tokens)
        if self.namespaces:
            parent, keys = self.namespaces.claim(parent, keys, waits=self.provisional.waits(slot))
        if (excess := len(self) + len(keys) - self.max_blocks) > 0:
            self._evict(excess)
            if parent is not None and parent not in self._dense:  # it had to go itself
                return
        rank.blocks += self._dense.extend(slot, parent, keys)
        rank.applied_blocks += len(keys)
        rank.names.update(zip(event.hashes, keys, strict=True))
        if rank.pool is not None:
            rank.pool.stored(parent, keys)
        self.provisional.confirm(slot, DENSE, keys)
        if rank.unnamed or rank.orphans:
            self._end_waits(rank, slot, event.hashes)

    def _evict(self, count: int) -> None:
        """Forget the longest known tails, on all ranks: what is left is true, only less."""
        for key, mask in self._dense.evict(count):
            self.evicted_blocks += 1
            for slot in slots_of(mask):
                rank = self._ranks[slot]
                rank.blocks -= 1
                if rank.pool is not None:
                    rank.pool.removed((key,), copies=0, is_held=self._dense.holds(slot))
            for table in (self._lower, *self._sparse.values()):
                table.discard(key)
        self._forgotten += count
        if self._forgotten > len(self) // 4 + 4096:
            self._sweep()

    def _store_sparse(self, rank: RankState, slot: int, event: BlockStored) -> None:
        table = self._sparse[event.group]
        self._note_keeping(rank, event)
        for name in event.hashes:
            key = rank.names.get(name)
            if key is not None:
                table.gain(slot, key)
                self.provisional.confirm(slot, event.group, (key,))
            else:
                rank.unnamed.setdefault(name, []).append(event.group)
                bound(rank.unnamed, MAX_UNNAMED)

    def _note_keeping(self, rank: RankState, event: BlockStored) -> None:
        """Learn how a window group thins out: one that ever stores nothing of a block keeps prompts' ends only."""
        if not event.hashes:
            rank.keeps_all[event.group] = False
        elif event.is_dense and len(event.hashes) > rank.rules[event.group].needed:
            rank.keeps_all.setdefault(event.group, True)

    def _store_lower(self, slot: int, event: BlockStored) -> None:
        """A copy below the device, in host memory or on disk: worth a load, not a prefill. Dense groups only."""
        rank = self._ranks[slot]
        if event.group in rank.rules:
            return
        keys: Sequence[int | None] = [rank.names.get(name) for name in event.hashes]
        if None in keys and event.is_dense and event.block_tokens == rank.stride * self.block_tokens:
            parent = None if event.parent is None else rank.names.get(event.parent)
            if parent is not None or event.parent is None:
                keys = keys_of_event(event, parent, unit_tokens=self.block_tokens)
        for name, key in zip(event.hashes, keys, strict=True):
            if key is not None:
                rank.names[name] = key
                self._lower.gain(slot, key)

    def _remove(self, slot: int, event: BlockRemoved) -> None:
        rank = self._ranks[slot]
        on_device = event.medium == GPU
        sparse = event.group in rank.rules
        if sparse and not on_device:
            return
        table = self._sparse[event.group] if sparse else self._dense if on_device else self._lower
        copies = self._dense.copies[slot]
        gone: list[int] = []
        for name in event.hashes:
            key = rank.names.get(name)
            if key is None:
                self._remove_waiting(rank, name, event.group)
                continue
            if self.namespaces:
                key = next((each for each in self.namespaces.alike(key) if table.masks.get(each, 0) & rank.bit), key)
            last = table.lose(slot, key)
            if last and table is self._dense:
                rank.blocks -= 1
                gone.append(key)
            if not self._known(key):
                self._forget(rank.names, name)
        if rank.pool is not None and table is self._dense:
            rank.pool.removed(gone, copies=copies, is_held=self._dense.holds(slot))

    # --- blocks whose parent or name is not known yet ------------------------------------------------

    def _end_waits(self, rank: RankState, slot: int, names: Sequence[EngineHash]) -> None:
        for name in names:
            for group in rank.unnamed.pop(name, ()):
                self._sparse[group].gain(slot, rank.names[name])
                self.provisional.confirm(slot, group, (rank.names[name],))
        for name in names:
            for event in rank.orphans.pop(name, ()):
                self._store_dense(rank, slot, event)

    def _remove_waiting(self, rank: RankState, name: EngineHash, group: int) -> None:
        waiting = rank.unnamed.get(name, [])
        if group in waiting:
            waiting.remove(group)
            if not waiting:
                del rank.unnamed[name]
            return
        for parent, events in list(rank.orphans.items()):
            kept = [event for event in events if name not in event.hashes]
            if kept:
                rank.orphans[parent] = kept
            else:
                del rank.orphans[parent]

    # --- names --------------------------------------------------------------------------------------

    def _held(self, key: int) -> bool:
        return key in self._dense or key in self._lower or any(key in table for table in self._sparse.values())

    def _known(self, key: int) -> bool:
        return any(map(self._held, self.namespaces.alike(key)))

    def _forget(self, names: dict[EngineHash, int], name: EngineHash) -> None:
        self._dense.forget_links(names.pop(name))
        self._forgotten += 1
        if self._forgotten > len(self) + 4096:
            self._sweep()

    def _sweep(self) -> None:
        """Let go of names and links whose block nobody holds: they outlive it where domains or holes differ."""
        self._forgotten = 0
        for names in self._names.values():
            for name in [name for name, key in names.items() if not self._known(key)]:
                del names[name]
        self._dense.sweep()
        self.namespaces.forget(lambda key: self._held(key) or key in self.provisional.dense)

    # --- what requests will leave behind ------------------------------------------------------------------

    def promise(self, slot: int, keys: Sequence[int], *, prompt_tokens: int) -> Ticket:
        """Count a prompt's blocks as resident from now on; events, or ``provisional.drop``, end that.

        Window groups keep what lies before two places (vLLM's retention): where this very prompt could be resumed, and
        where the dense group alone had known it up to (a junction, which others may share). Only blocks that the
        request computes are kept by it.
        """
        rank = self._ranks[slot]
        ends = keys[rank.stride - 1 :: rank.stride]
        held = depths(ends, lambda key: self._dense.sound(key) & rank.bit, limit=len(ends)).get(slot, 0)
        promised = {DENSE: ends[held:]}
        if rank.rules:
            limit = (prompt_tokens - 1) // self.block_tokens
            known = self._depths(keys, prompt_tokens, self._mask()).get(slot, 0)
            usable = self._boundary(rank, keys, known)
            kept = {end - end % rank.align for end in ((limit, known) if known > usable else (limit,))}
            for group, rule in rank.rules.items():
                promised[group] = self._promised(rank, group, rule, keys, start=usable, ends=kept)
        return self.provisional.add(slot, promised)

    def promise_more(self, slot: int, keys: Sequence[int], *, start: int) -> Ticket:
        """Count the units from ``start`` on as resident, too: what a request has generated."""
        rank = self._ranks[slot]
        start -= start % rank.stride
        held = self._dense.masks
        ends = keys[start + rank.stride - 1 :: rank.stride]
        promised: dict[int, Sequence[int]] = {DENSE: [key for key in ends if not held.get(key, 0) & rank.bit]}
        for group, rule in rank.rules.items():
            promised[group] = self._promised(rank, group, rule, keys, start=start, ends=set())
        return self.provisional.add(slot, promised)

    def _promised(
        self, rank: RankState, group: int, rule: Rule, keys: Sequence[int], *, start: int, ends: set[int]
    ) -> Sequence[int]:
        held = self._sparse[group].masks
        blocks = rule.kept(start, len(keys), ends=ends, keeps_all=rank.keeps_all.get(group, False))
        names = [keys[(block + 1) * rule.stride - 1] for block in blocks]
        return [key for key in names if not held.get(key, 0) & rank.bit]

    # --- lookup ---------------------------------------------------------------------------------------

    def reusable_tokens(self, keys: Sequence[int], *, prompt_tokens: int) -> dict[int, int]:
        """Usable cached tokens of a prompt, on the device, for each slot that has any.

        ``keys`` are the chain keys of the prompt's whole units. The last token is always computed.
        """
        reusable: dict[int, int] = {}
        for slot, depth in self._depths(keys, prompt_tokens, self._mask()).items():
            rank = self._ranks[slot]
            if rank.pool is not None:
                depth = self._kept(rank.pool, slot, keys, depth)
            units = self._boundary(rank, keys, depth) if rank.rules else depth
            units -= rank.stride * rank.geometry.eagle
            if units > 0:
                reusable[slot] = units * self.block_tokens
        return reusable

    def _kept(self, pool: Pool, slot: int, keys: Sequence[int], depth: int) -> int:
        """Units of ``depth`` that will be there when the engine comes to the request."""
        stride = self._ranks[slot].stride
        ends = keys if stride == 1 else keys[stride - 1 :: stride]
        return pool.kept(ends, depth // stride, copies=self._dense.copies[slot]) * stride

    def pool(self, slot: int) -> Pool | None:
        """The rank's pool, to be told of requests; None where its groups share one, or nobody gave it."""
        return self._ranks[slot].pool

    def loadable_tokens(self, keys: Sequence[int], *, prompt_tokens: int) -> dict[int, int]:
        """Tokens of a prompt that lie on the device *or* below it, for each slot; empty if nothing lies below."""
        lower = self._lower.masks
        if not lower:
            return {}
        device = self._mask()
        found = self._depths(keys, prompt_tokens, lambda key: (device(key) or 0) | lower.get(key, 0))
        return {slot: depth * self.block_tokens for slot, depth in found.items()}

    def _depths(self, keys: Sequence[int], prompt_tokens: int, mask: Mask) -> dict[int, int]:
        """Dense units from the start, for the ranks of every stride."""
        limit = min(len(keys), (prompt_tokens - 1) // self.block_tokens)
        found: dict[int, int] = {}
        for stride, members in self._strides.items():
            if members:
                ends = keys if stride == 1 else keys[stride - 1 :: stride]
                own = mask if members.bit_count() == len(self._ranks) else only(mask, members)
                blocks = depths(ends, own, limit=limit // stride)
                found.update({slot: count * stride for slot, count in blocks.items()})
        return found

    def _mask(self) -> Mask:
        """Who holds a dense block, or will: as cheap a function as the index's state allows."""
        masks, stranded, promised = self._dense.masks, self._dense.stranded, self.provisional.dense
        if stranded:
            return lambda key: masks.get(key, 0) & ~stranded.get(key, 0) | promised.get(key, 0)
        if promised:
            return lambda key: masks.get(key, 0) | promised.get(key, 0)
        return masks.get

    def _boundary(self, rank: RankState, keys: Sequence[int], depth: int) -> int:
        def mask_of(masks: dict[int, int], promised: dict[int, int]) -> Mask:
            return lambda key: masks.get(key, 0) | promised.get(key, 0)

        groups = {
            group: mask_of(self._sparse[group].masks, self.provisional.sparse.get(group, {})) for group in rank.rules
        }
        return boundary(keys, depth, bit=rank.bit, groups=groups, rules=rank.rules, align=rank.align)

    # --- what others show -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._dense.masks)

    def blocks(self, slot: int) -> int:
        """Blocks believed resident on a rank, in its dense group."""
        return self._ranks[slot].blocks

    def applied_blocks(self, slot: int) -> int:
        """Dense blocks that events have brought in so far, whether or not they are still there."""
        return self._ranks[slot].applied_blocks

    def stride(self, slot: int) -> int:
        """Units in a dense block of the rank."""
        return self._ranks[slot].stride

    def orphans(self, slot: int) -> int:
        """Blocks a rank has announced whose parent is not known."""
        return sum(len(event.hashes) for events in self._ranks[slot].orphans.values() for event in events)

    def residency(self, slot: int) -> dict[int, frozenset[int]]:
        """For tests and consistency checks: keys held by a rank, per sparse group (-1: the dense group)."""
        return {-1: self._dense.keys_of(slot), **{group: table.keys_of(slot) for group, table in self._sparse.items()}}
