"""Stored blocks whose parent nobody has heard of, and the prompts that they may be of.

Who begins to listen late, or has lost messages that cannot be had again, knows nothing of the blocks from before. What
is stored behind them can be placed all the same: if it is what a prompt sent to this very rank would store, key for
key, then its parent is that prompt's block before it, and the engine has all of the prompt up to there.

What an engine says it has reused (``cached_tokens``) is taken over, too: it was there, whoever stored it and when.

Units smaller than a block (vLLM's ``--prefix-match-unit``) are met in the same way: a prompt's tail is stored by the
name of its last unit, whose parent is inside the block and has never been stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from router.wire.block_keys import block_keys
from router.wire.kv_events import BlockStored

#: Ends of reused prefixes without a name that are kept for a rank.
MAX_NAMELESS = 1024
#: Reused prefixes that are remembered for groups yet to be met: the first events tell of all groups.
MAX_RESUMED = 16


@dataclass(frozen=True, slots=True)
class Expected:
    """A chain that a rank is to store, by the keys of its units.

    A prompt's last unit that can be found again is the one before ``tail``. From ``start`` on blocks are generated:
    they come one by one.
    """

    keys: Sequence[int]
    tail: int = 0
    start: int | None = None

    def ends(self, event: BlockStored, *, unit_tokens: int) -> Iterable[int]:
        """Units of the chain that the event's blocks may stand behind, the last first."""
        stride = event.block_tokens // unit_tokens
        last = len(self.keys) - len(self.keys) % stride - len(event.hashes) * stride
        first = last if self.start is None else min(last, self.start - self.start % stride)
        return range(last, max(0, first - 1), -stride)

    def before(self, event: BlockStored, *, unit_tokens: int, end: int) -> Sequence[int]:
        """The chain's first units up to ``end``, if the event's blocks stand behind them; else none."""
        return self.keys[:end] if self._continues(end, event.token_ids, unit_tokens) else ()

    def end_of(self, event: BlockStored, *, unit_tokens: int) -> Sequence[int]:
        """The chain's last units, if they are those that the event covers; else none.

        What divides namespaces may be told of the very first unit alone: that one stands with those behind it.
        """
        count = len(event.token_ids) // unit_tokens
        at = len(self.keys) - count
        first = max(at, 1)
        if at < 0 or first == len(self.keys) or (event.parent is None) != (at == 0):
            return ()
        is_own = self._continues(first, event.token_ids[(first - at) * unit_tokens :], unit_tokens)
        return self.keys[at:] if is_own else ()

    def starts(self, event: BlockStored, parent: int | None, *, unit_tokens: int) -> Iterable[int]:
        """Units of the prompt that those which the event covers may stand behind. ``parent``: the last of them, if it
        is known.
        """
        count = len(event.token_ids) // unit_tokens
        if self.start is not None or count > len(self.keys) or count < 1 + (event.parent is None):
            return ()
        if event.parent is None:
            return (0,)
        if parent is not None:
            return (self.keys.index(parent) + 1,) if parent in self.keys else ()
        return range(len(self.keys) - count, 0, -1)

    def covers(self, event: BlockStored, at: int, *, unit_tokens: int) -> bool:
        """Whether an event covers the units behind ``at``. At the start of a prompt the very first is believed."""
        first = max(at, 1)
        return first < len(self.keys) and self._continues(
            first, event.token_ids[(first - at) * unit_tokens :], unit_tokens
        )

    def tail_of(self, event: BlockStored, *, unit_tokens: int, before_last: bool = False) -> int | None:
        """The key of the unit that the event stores, if it is this prompt's last, or the one before."""
        tail = self.tail - before_last
        is_own = tail > 1 and self._continues(tail - 1, event.token_ids, unit_tokens)
        return self.keys[tail - 1] if is_own else None

    def _continues(self, at: int, tokens: Sequence[int], unit_tokens: int) -> bool:
        """Whether these tokens are the chain's behind ``at`` units."""
        parent = self.keys[at - 1]
        if block_keys(tokens[:unit_tokens], block_tokens=unit_tokens, parent=parent) != [self.keys[at]]:
            return False
        found = block_keys(tokens, block_tokens=unit_tokens, parent=parent)
        return list(self.keys[at : at + len(found)]) == found


@dataclass(slots=True)
class Adopted:
    """Places of one rank that were taken over without having been stored: nobody will say under what names they go.

    ``before[place]`` are those that stand and fall with it; ``vouchers`` are how many such places each of them stands
    with. ``nameless`` are places at the end of what the engine itself said it had reused. They go once as many blocks
    that nobody knows were removed as there may have been when they were last used: ``nameless[place]`` is that count.
    ``resumed`` are such prompts, and how many of their units, for groups of which nothing was heard yet. ``is_used``:
    anything was taken over.
    """

    before: dict[int, list[int]] = field(default_factory=dict)
    vouchers: dict[int, int] = field(default_factory=dict)
    nameless: dict[int, float] = field(default_factory=dict)
    resumed: deque[tuple[Sequence[int], int]] = field(default_factory=lambda: deque(maxlen=MAX_RESUMED))
    unknown_removals: int = 0
    is_used: bool = False

    @property
    def has_gaps(self) -> bool:
        """Whether there were blocks that no event told of."""
        return self.is_used or self.unknown_removals > 0

    def __contains__(self, place: int) -> bool:
        return place in self.vouchers or place in self.nameless

    def take(self, place: int, before: Sequence[int], *, new: Sequence[int]) -> None:
        """A place is behind others, of which the ``new`` ones are taken over with it."""
        vouchers, fresh = self.vouchers, frozenset(new)
        taken = [each for each in before if each in fresh or each in vouchers] if vouchers else list(new)
        if mine := self.before.get(place):
            is_mine = frozenset(mine).__contains__
            taken = [each for each in taken if not is_mine(each)]
        for each in taken:
            vouchers[each] = vouchers.get(each, 0) + 1
        if taken:
            self.before[place] = [*(mine or ()), *taken]

    def reuse(self, place: int, *, unknown_blocks: float) -> int | None:
        """The engine has reused all up to a place without a name. Returns a place that is let go of to make room."""
        self.nameless.pop(place, None)
        self.nameless[place] = self.unknown_removals + unknown_blocks
        return next(iter(self.nameless)) if len(self.nameless) > MAX_NAMELESS else None

    def removed_unknown(self) -> int | None:
        """A block that nobody knows was removed. Returns the place without a name that goes with it, if one does."""
        self.unknown_removals += 1
        place = next(iter(self.nameless), None)
        return None if place is None or self.nameless[place] >= self.unknown_removals else place

    def named(self, place: int) -> bool:
        """A place has a name after all, and stands by itself. False if it was not taken over."""
        if place not in self:
            return False
        self.nameless.pop(place, None)
        self.vouchers.pop(place, None)
        return True

    def let_go(self, place: int) -> Sequence[int]:
        """A place is gone. Returns those that no other vouches for."""
        lost: list[int] = []
        gone = [place]
        while gone:
            place = gone.pop()
            self.nameless.pop(place, None)
            for each in self.before.pop(place, ()):
                if each in self.vouchers:
                    self.vouchers[each] -= 1
                    if not self.vouchers[each]:
                        del self.vouchers[each]
                        if each not in self.nameless:
                            lost.append(each)
                            gone.append(each)
        return lost
