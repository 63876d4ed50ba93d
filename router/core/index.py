"""Which rank holds which block, and how much of a prompt each rank can reuse.

One ``PrefixIndex`` covers one model and one block size, over all its ranks. A block is named by its chain key
(``wire/block_keys``), which stands for the block and all before it; engines' own hashes are mapped onto keys through
the token ids of dense events. Ranks are bits in an integer: ``resident[key] = 0b101`` means slots 0 and 2.

Full attention needs *all* blocks from the start. A rank's resident blocks nearly always are such prefixes, since
engines evict tails first; where one is not (an inner block left before its children), the stranded descendants are
marked ``stranded``. What remains is downward closed, so the depth of every rank is found by bisection.

Sparse groups (sliding windows) are kept apart, per group index, and judged at the end of the dense prefix.

Copies are counted: engines store the same block twice (concurrent twins, recomputation after a window miss) and
remove each copy with an event of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from router.core.provisional import Provisional
from router.core.usable import Mask, boundary, depths
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import FULL, GPU, MLA, AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event

#: Stored blocks that wait for an unknown parent, per rank. Beyond it the oldest wait is given up.
MAX_ORPHANS = 4096


@dataclass(slots=True)
class _RankState:
    """What the index keeps for one slot besides its bits."""

    bit: int
    names: dict[EngineHash, int]
    blocks: int = 0
    dense_group: int | None = None
    windows: dict[int, int] = field(default_factory=dict)
    orphans: dict[EngineHash, list[BlockStored]] = field(default_factory=dict)
    unnamed: dict[EngineHash, list[int]] = field(default_factory=dict)


class PrefixIndex:
    """The blocks of one model, in blocks of ``block_tokens``. Mutated by its owner, on one thread."""

    def __init__(self, *, block_tokens: int, max_blocks: int = 1 << 23) -> None:
        self.block_tokens = block_tokens
        self.max_blocks = max_blocks
        self.refused_blocks = 0
        self.provisional = Provisional()
        self._resident: dict[int, int] = {}
        self._stranded: dict[int, int] = {}
        self._children: dict[int, int | set[int]] = {}
        self._sparse: dict[int, dict[int, int]] = {}
        self._copies: dict[tuple[int, int, int], int] = {}
        self._names: dict[str, dict[EngineHash, int]] = {}
        self._ranks: dict[int, _RankState] = {}
        self._forgotten = 0

    # --- membership -------------------------------------------------------------------------------

    def add_rank(self, slot: int, *, domain: str) -> None:
        """Know a rank. Ranks of one ``domain`` name equal blocks equally (same engine, same hash settings)."""
        self._ranks[slot] = _RankState(bit=1 << slot, names=self._names.setdefault(domain, {}))

    def remove_rank(self, slot: int) -> None:
        """Forget a rank and all it held."""
        self.clear(slot)
        del self._ranks[slot]

    def clear(self, slot: int) -> None:
        """The rank holds nothing. What its groups mean stays known. Takes time in the size of the index."""
        rank = self._ranks[slot]
        bit = rank.bit
        for key in [key for key, mask in self._resident.items() if mask & bit]:
            self._drop(self._resident, key, bit)
        for table in (self._stranded, *self._sparse.values()):
            for key in [key for key, mask in table.items() if mask & bit]:
                self._drop(table, key, bit)
        for copy in [copy for copy in self._copies if copy[0] == slot]:
            del self._copies[copy]
        self._sweep()
        rank.blocks = 0
        rank.orphans.clear()
        rank.unnamed.clear()

    # --- events -----------------------------------------------------------------------------------

    def apply(self, slot: int, event: Event) -> None:
        """Apply one event of a rank. Unknown events and other media than the device are passed over."""
        match event:
            case BlockStored() if event.medium == GPU:
                self._store(slot, event)
            case BlockRemoved() if event.medium == GPU:
                self._remove(slot, event)
            case AllBlocksCleared():
                self.clear(slot)
            case _:
                pass

    def _store(self, slot: int, event: BlockStored) -> None:
        rank = self._ranks[slot]
        if event.kind in (None, FULL, MLA):
            if rank.dense_group is None:
                rank.dense_group = event.group
        elif event.group not in rank.windows:
            # A recurrent checkpoint is a window of one block: the state at the very end of the prefix.
            rank.windows[event.group] = event.window_tokens or 2
        if event.group in rank.windows:
            self._store_sparse(rank, slot, event)
        elif event.group == rank.dense_group and event.is_dense and event.block_tokens == self.block_tokens:
            self._store_dense(rank, slot, event)

    def _store_sparse(self, rank: _RankState, slot: int, event: BlockStored) -> None:
        for name in event.hashes:
            key = rank.names.get(name)
            if key is None:
                rank.unnamed.setdefault(name, []).append(event.group)
            else:
                self._gain(slot, event.group, self._sparse.setdefault(event.group, {}), key)

    def _store_dense(self, rank: _RankState, slot: int, event: BlockStored) -> None:
        parent = None if event.parent is None else rank.names.get(event.parent)
        if parent is None and event.parent is not None:
            self._adopt_later(rank, event)
            return
        keys = _keys_of(event, parent)
        if len(self._resident) + len(keys) > self.max_blocks:
            self.refused_blocks += len(keys)
            return
        sound = parent is None or bool(self._sound(parent) & rank.bit)
        if sound and self._unknown(keys):
            # The usual case, at the speed of dict.update: a new tail of a sound prefix.
            self._resident.update(dict.fromkeys(keys, rank.bit))
            self._children.update(itertools.pairwise(keys))
            if parent is not None and keys:
                self._link(parent, keys[0])
            rank.blocks += len(keys)
        else:
            for key in keys:
                if parent is not None:
                    self._link(parent, key)
                self._gain_dense(rank, slot, key, sound=sound)
                parent = key
        rank.names.update(zip(event.hashes, keys, strict=True))
        if rank.unnamed:
            self._name(rank, slot, event.hashes)
        if rank.orphans:
            self._adopt(rank, slot, event.hashes)

    def _unknown(self, keys: list[int]) -> bool:
        """None of the keys is in the index, and none comes twice."""
        return (
            self._resident.keys().isdisjoint(keys)
            and self._children.keys().isdisjoint(keys)
            and len(set(keys)) == len(keys)
        )

    def _gain_dense(self, rank: _RankState, slot: int, key: int, *, sound: bool) -> None:
        if not self._gain(slot, -1, self._resident, key):
            return
        rank.blocks += 1
        if not sound:
            self._stranded[key] = self._stranded.get(key, 0) | rank.bit
        elif self._stranded:
            self._heal(key, rank.bit)

    def _gain(self, slot: int, group: int, table: dict[int, int], key: int) -> bool:
        """Add a copy; True if it is the first on this rank."""
        mask = table.get(key, 0)
        bit = 1 << slot
        if mask & bit:
            copy = (slot, group, key)
            self._copies[copy] = self._copies.get(copy, 0) + 1
            return False
        table[key] = mask | bit
        return True

    def _remove(self, slot: int, event: BlockRemoved) -> None:
        rank = self._ranks[slot]
        dense = event.group == rank.dense_group or (rank.dense_group is None and event.group not in rank.windows)
        for name in event.hashes:
            key = rank.names.get(name)
            if key is None:
                self._remove_waiting(rank, name, event.group)
                continue
            if dense:
                if self._lose(slot, -1, self._resident, key):
                    rank.blocks -= 1
                    self._drop(self._stranded, key, rank.bit)
                    self._strand_children(key, rank.bit)
            else:
                self._lose(slot, event.group, self._sparse.get(event.group, {}), key)
            if not self._held(key):
                self._forget(rank.names, name)

    def _lose(self, slot: int, group: int, table: dict[int, int], key: int) -> bool:
        """Take one copy away; True if it was the last on this rank."""
        copy = (slot, group, key)
        extra = self._copies.get(copy)
        if extra is not None:
            if extra == 1:
                del self._copies[copy]
            else:
                self._copies[copy] = extra - 1
            return False
        held = bool(table.get(key, 0) & (1 << slot))
        self._drop(table, key, 1 << slot)
        return held

    # --- blocks whose parent or name is not known yet ------------------------------------------------

    def _adopt_later(self, rank: _RankState, event: BlockStored) -> None:
        assert event.parent is not None
        rank.orphans.setdefault(event.parent, []).append(event)
        while len(rank.orphans) > MAX_ORPHANS:
            del rank.orphans[next(iter(rank.orphans))]

    def _adopt(self, rank: _RankState, slot: int, names: Sequence[EngineHash]) -> None:
        for name in names:
            for event in rank.orphans.pop(name, ()):
                self._store_dense(rank, slot, event)

    def _name(self, rank: _RankState, slot: int, names: Sequence[EngineHash]) -> None:
        for name in names:
            for group in rank.unnamed.pop(name, ()):
                self._gain(slot, group, self._sparse.setdefault(group, {}), rank.names[name])

    def _remove_waiting(self, rank: _RankState, name: EngineHash, group: int) -> None:
        waiting = rank.unnamed.get(name)
        if waiting is not None and group in waiting:
            waiting.remove(group)
            if not waiting:
                del rank.unnamed[name]
        for parent, events in list(rank.orphans.items()):
            kept = [event for event in events if name not in event.hashes]
            if len(kept) != len(events):
                rank.orphans[parent] = kept
                if not kept:
                    del rank.orphans[parent]

    # --- the shape of chains --------------------------------------------------------------------------

    def _sound(self, key: int) -> int:
        """Slots that hold this block and all before it."""
        return self._resident.get(key, 0) & ~self._stranded.get(key, 0)

    def _link(self, parent: int, child: int) -> None:
        known = self._children.get(parent)
        if known is None:
            self._children[parent] = child
        elif isinstance(known, set):
            known.add(child)
            if len(known) > 64 and len(known).bit_count() == 1:  # now and then: children come and go
                known.intersection_update(self._resident.keys())
                known.add(child)
        elif known != child:
            self._children[parent] = {known, child}

    def _children_of(self, key: int) -> Collection[int]:
        known = self._children.get(key)
        if known is None:
            return ()
        return known if isinstance(known, set) else (known,)

    def _strand_children(self, key: int, bit: int) -> None:
        todo = list(self._children_of(key))
        while todo:
            child = todo.pop()
            if self._sound(child) & bit:
                self._stranded[child] = self._stranded.get(child, 0) | bit
                todo.extend(self._children_of(child))

    def _heal(self, key: int, bit: int) -> None:
        todo = [key, *self._children_of(key)]
        while todo:
            child = todo.pop()
            if self._stranded.get(child, 0) & bit:
                self._drop(self._stranded, child, bit)
                todo.extend(self._children_of(child))

    def _held(self, key: int) -> bool:
        return key in self._resident or any(key in table for table in self._sparse.values())

    def _forget(self, names: dict[EngineHash, int], name: EngineHash) -> None:
        key = names.pop(name)
        if not any(child in self._resident for child in self._children_of(key)):
            self._children.pop(key, None)
        self._forgotten += 1
        if self._forgotten > len(self._resident) + 4096:
            self._sweep()

    def _sweep(self) -> None:
        """Let go of names and links whose block nobody holds: they outlive it where domains or holes differ."""
        self._forgotten = 0
        for table in self._names.values():
            for name in [name for name, key in table.items() if not self._held(key)]:
                del table[name]
        for key in [key for key in self._children if not any(c in self._resident for c in self._children_of(key))]:
            del self._children[key]

    @staticmethod
    def _drop(table: dict[int, int], key: int, bit: int) -> None:
        mask = table.get(key, 0) & ~bit
        if mask:
            table[key] = mask
        else:
            table.pop(key, None)

    # --- lookup ---------------------------------------------------------------------------------------

    def reusable_tokens(self, keys: Sequence[int], *, prompt_tokens: int) -> dict[int, int]:
        """Usable cached tokens of a prompt for each slot that has any.

        ``keys`` are the chain keys of the prompt's whole blocks. The last token is always computed, so at most
        ``(prompt_tokens - 1) // block_tokens`` blocks count.
        """
        limit = min(len(keys), (prompt_tokens - 1) // self.block_tokens)
        reusable: dict[int, int] = {}
        for slot, depth in depths(keys, self._mask, limit=limit).items():
            rank = self._ranks.get(slot)
            if rank is None:
                continue
            blocks = self._boundary(rank, keys, depth) if rank.windows else depth
            if blocks:
                reusable[slot] = blocks * self.block_tokens
        return reusable

    def _mask(self, key: int) -> int:
        mask = self._resident.get(key, 0)
        if self._stranded:
            mask &= ~self._stranded.get(key, 0)
        return mask | self.provisional.dense.get(key, 0)

    def _boundary(self, rank: _RankState, keys: Sequence[int], depth: int) -> int:
        tails = self.provisional.tails

        def mask_of(table: dict[int, int]) -> Mask:
            return lambda key: table.get(key, 0) | tails.get(key, 0)

        groups = {group: mask_of(self._sparse.get(group, {})) for group in rank.windows}
        needed = {group: self._window_blocks(window) for group, window in rank.windows.items()}
        return boundary(keys, depth, bit=rank.bit, groups=groups, needed=needed)

    def _window_blocks(self, window_tokens: int) -> int:
        return -(-(window_tokens - 1) // self.block_tokens)

    # --- what others show -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._resident)

    def blocks(self, slot: int) -> int:
        """Blocks believed resident on a rank, in its dense group."""
        return self._ranks[slot].blocks

    def orphans(self, slot: int) -> int:
        """Blocks a rank has announced whose parent is not known."""
        return sum(len(event.hashes) for events in self._ranks[slot].orphans.values() for event in events)

    def tail_blocks(self, slot: int) -> int:
        """Blocks at a prompt's end that the rank's widest window needs (0: no window groups)."""
        return self._window_blocks(max(self._ranks[slot].windows.values(), default=1))

    def residency(self, slot: int) -> dict[int, frozenset[int]]:
        """For tests and consistency checks: keys held by a rank, per group (-1: the dense group)."""
        bit = 1 << slot
        tables = {-1: self._resident, **self._sparse}
        return {group: frozenset(key for key, mask in table.items() if mask & bit) for group, table in tables.items()}


def _keys_of(event: BlockStored, parent: int | None) -> list[int]:
    """Chain keys of a dense event's blocks. Adapter and salt root the chain; other extra keys enter at their block."""
    extra = event.extra_keys or ()
    if parent is None:
        salt = event.cache_salt or "\x00".join(map(str, extra[0] or () if extra else ()))
        parent = namespace_seed(event.lora_name or "", salt)
        extra = extra[1:] and (None, *extra[1:])
    if not any(extra):
        return block_keys(event.token_ids, block_tokens=event.block_tokens, parent=parent)
    keys: list[int] = []
    for place, start in enumerate(range(0, len(event.token_ids), event.block_tokens)):
        if place < len(extra) and extra[place]:
            parent = namespace_seed(str(parent), *map(str, extra[place]))
        block = event.token_ids[start : start + event.block_tokens]
        keys += block_keys(block, block_tokens=event.block_tokens, parent=parent)
        parent = keys[-1]
    return keys
