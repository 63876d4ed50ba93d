"""What the index keeps for one rank besides its bits, and how it reads one dense event."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.core.adoption import Adopted
from router.core.chains import Chains
from router.core.forecast import Pool
from router.core.names import Names
from router.core.pairs import Pairs
from router.core.shared_pool import SharedPool
from router.core.usable import Geometry, Rule
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored, EngineHash

#: Parents that stored blocks wait for, per rank. Beyond it the oldest wait is given up.
MAX_ORPHANS = 4096
#: Names of sparse blocks that wait for their dense event, per rank.
MAX_UNNAMED = 65536
#: Of those that wait for one parent or one name.
MAX_ALIKE = 256
#: A unit of the budget.
_UNIT_BYTES = 128
_TOKEN_BYTES, _NUMBER_BYTES = 4, 32


@dataclass(slots=True)
class RankState:
    """What the index keeps for one slot besides its bits. ``rules`` are of all groups but the dense one.

    ``align`` is the least common multiple of all strides: every hit ends there. ``segment_tokens`` says of a window
    group before the end of which segments it keeps blocks (1: all), besides what lies before a prompt's end (0: that
    alone); ``retention_tokens`` is the worker's word for it, where it gave one. ``has_tails``: prompts' ends are found
    by units smaller than a block. ``orphans`` are events by the parent that they wait for, ``_waiting`` the same, with
    it, by each of their blocks. ``reported`` are the blocks that a sparse group told of last as found, not
    stored. ``unplaced`` are events of sparse groups in a batch without a dense one so far; ``is_lone``: there is none.
    ``between`` are events of a batch that name blocks whose ends lie inside the dense group's.
    ``met`` tells of each group what its first event did; ``is_settled``: the dense one has stored several blocks of
    that size at once. ``odd_events`` in a row were of blocks that no group of the rank has. ``judged``
    says by how many prompts a window group seems to have no draft's layers; -1: it has. ``given`` is the pool as it
    was at first, for one like it. ``pairs`` is of one whose blocks are found by their own tokens and the one behind
    them, and of which nothing is computed again; ``pairs_below`` of what lies below its device. ``is_doubted``: what is
    known is of a process that may be gone. ``is_contradicted``: a later event said otherwise, and nobody was told yet.
    """

    bit: int
    names: Names
    geometry: Geometry
    chains: Chains
    pool: Pool | SharedPool | None = None
    given: Pool | None = None
    adopted: Adopted = field(default_factory=Adopted)
    has_tails: bool = False
    blocks: int = 0
    applied_blocks: int = 0
    dense_group: int | None = None
    stride: int = 1
    align: int = 1
    rules: dict[int, Rule] = field(default_factory=dict)
    retention_tokens: int | None = None
    segment_tokens: dict[int, int] = field(default_factory=dict)
    orphans: dict[EngineHash, list[BlockStored]] = field(default_factory=dict)
    unplaced: list[BlockStored] = field(default_factory=list)
    between: list[BlockStored] = field(default_factory=list)
    met: dict[int, BlockStored] = field(default_factory=dict)
    is_settled: bool = False
    odd_events: int = 0
    judged: dict[int, int] = field(default_factory=dict)
    pairs: Pairs | None = None
    pairs_below: Pairs = field(default_factory=Pairs)
    is_lone: bool = False
    is_doubted: bool = False
    is_contradicted: bool = False
    unnamed: dict[EngineHash, list[int]] = field(default_factory=dict)
    reported: tuple[EngineHash, ...] = ()
    orphan_blocks: int = 0
    orphan_units: int = 0
    _waiting: dict[EngineHash, tuple[tuple[EngineHash, BlockStored], ...]] = field(default_factory=dict)

    @property
    def recomputed_units(self) -> int:
        """Of what full attention finds so much is computed again, with EAGLE: a block, or a unit where hits end inside
        one.
        """
        return (1 if self.has_tails else self.stride) if self.geometry.eagle and self.pairs is None else 0

    @property
    def units_behind(self) -> int:
        """So much is looked at behind a prompt's last token but one: all of what is computed again, with several groups
        of layers. With one group nothing is.
        """
        return self.recomputed_units if len(self.met) > 1 else 0

    def paired_units(self, tokens: int, *, unit_tokens: int) -> int:
        """Units of whole blocks among so many tokens, where each is found with the token behind it."""
        units = max(0, tokens - 1) // unit_tokens
        return units - units % self.stride

    # --- blocks whose parent or name is not known yet ------------------------------------------------

    def wait_for_parent(self, parent: EngineHash, event: BlockStored, *, most_blocks: int) -> None:
        """Keep an event until its parent is stored. The oldest waits are given up where there are too many."""
        names = dict.fromkeys(event.hashes)
        alike = max((len(self._waiting.get(name, ())) for name in names), default=0)
        if max(alike, len(self.orphans.get(parent, ()))) >= MAX_ALIKE:
            return
        self.orphans.setdefault(parent, []).append(event)
        self.orphan_blocks += len(event.hashes)
        self.orphan_units += _units(event)
        mine = ((parent, event),)
        for name in names:
            self._waiting[name] = self._waiting.get(name, ()) + mine
        while len(self.orphans) > MAX_ORPHANS or self.orphan_units > most_blocks:
            self.take_orphans(next(iter(self.orphans)))

    def take_orphans(self, parent: EngineHash) -> Sequence[BlockStored]:
        """The events that wait for a parent; they wait no longer."""
        events = self.orphans.pop(parent, ())
        for event in events:
            self._end_wait(event)
        return events

    def _end_wait(self, event: BlockStored) -> None:
        self.orphan_blocks -= len(event.hashes)
        self.orphan_units -= _units(event)
        for name in dict.fromkeys(event.hashes):
            left = tuple([each for each in self._waiting[name] if each[1] is not event])
            if left:
                self._waiting[name] = left
            else:
                del self._waiting[name]

    def drop_orphan(self, name: EngineHash) -> bool:
        """A block that waits was removed, and with it those stored beside it. False if none of that name waits."""
        waiting = self._waiting.get(name)
        if waiting is None:
            return False
        last = waiting[-1][0]
        gone = [event for parent, event in waiting if parent == last]
        for event in gone:
            self._end_wait(event)
        left = [event for event in self.orphans[last] if not any(event is each for each in gone)]
        if left:
            self.orphans[last] = left
        else:
            del self.orphans[last]
        return True

    def wait_for_name(self, name: EngineHash, group: int) -> None:
        """Keep that a sparse group has a block, until a dense event names it."""
        waiting = self.unnamed.setdefault(name, [])
        if len(waiting) < MAX_ALIKE:
            waiting.append(group)
        if len(self.unnamed) > MAX_UNNAMED:
            del self.unnamed[next(iter(self.unnamed))]

    def wait_unplaced(self) -> None:
        """What sparse groups have told of in this batch waits for a dense event that names it."""
        for event in self.unplaced:
            for name in event.hashes:
                self.wait_for_name(name, event.group)
        self.unplaced.clear()

    def drop_unnamed(self, name: EngineHash, group: int) -> None:
        """A sparse group has lost a block that waits for its name."""
        waiting = self.unnamed.get(name, [])
        if group in waiting:
            waiting.remove(group)
            if not waiting:
                del self.unnamed[name]

    def forget_groups(self) -> None:
        """Of no group is anything known."""
        self.met.clear()
        self.dense_group, self.is_lone, self.has_tails, self.is_doubted = None, False, False, False
        self.pairs = None
        self.is_settled, self.odd_events = False, 0
        self.rules, self.segment_tokens, self.align, self.judged = {}, {}, 1, {}
        self.reported = ()

    def forget_waits(self) -> None:
        """Nothing is waited for."""
        self.orphans.clear()
        self.unplaced.clear()
        self.between.clear()
        self.unnamed.clear()
        self.orphan_blocks = self.orphan_units = 0
        self._waiting.clear()


def _units(event: BlockStored) -> int:
    """What an event that waits takes, in the units of ``core/budget``: its names, or its tokens and extra keys."""
    extra = event.extra_keys or ()
    chars = sum(len(key) if isinstance(key, str) else _NUMBER_BYTES for keys in extra for key in keys or ())
    return max(len(event.hashes), (_TOKEN_BYTES * len(event.token_ids) + chars) // _UNIT_BYTES)


def keys_of_event(event: BlockStored, parent: int | None, *, unit_tokens: int) -> array[int]:
    """Chain keys of a dense event's blocks. Adapter and salt root the chain; other extra keys enter at their block."""
    extra = event.extra_keys or ()
    if event.lora_name:  # vLLM names the adapter first in each block's extra keys, too; a salt may be spelled alike
        extra = tuple(keys[1:] if keys and keys[0] == event.lora_name else keys for keys in extra)
    if parent is None:
        roots = (event.cache_salt,) if event.cache_salt else map(str, extra[0] or ("",) if extra else ("",))
        parent = namespace_seed(event.lora_name or "", *roots)
        extra = extra[1:] and (None, *extra[1:])
    stride = event.block_tokens // unit_tokens
    if not any(extra):
        return array("Q", block_keys(event.token_ids, block_tokens=unit_tokens, parent=parent))[stride - 1 :: stride]
    keys = array("Q")
    for place, start in enumerate(range(0, len(event.token_ids), event.block_tokens)):
        if place < len(extra) and extra[place]:
            parent = namespace_seed(str(parent), *map(str, extra[place]))
        block = event.token_ids[start : start + event.block_tokens]
        parent = block_keys(block, block_tokens=unit_tokens, parent=parent)[-1]
        keys.append(parent)
    return keys
