"""Who holds what of one run of blocks (``core/chains``): nearly always its beginning, which is one number a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

#: Of things that a slot began to hold so many are noted before it is looked at which of them it still holds.
_FEW = 256
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Holders:
    """Who holds what of a run: ``cuts[slot]`` blocks from its start; ``odd[slot]`` are bits, where that is not all."""

    cuts: dict[int, int] = field(default_factory=dict)
    odd: dict[int, int] = field(default_factory=dict)
    _longest: int | None = None

    def __bool__(self) -> bool:
        return bool(self.cuts or self.odd)

    def bits(self, slot: int) -> int:
        """What a slot holds, block 0 in the lowest bit."""
        return self.odd.get(slot) or (1 << self.cuts.get(slot, 0)) - 1

    def holds(self, slot: int, at: int) -> bool:
        """Whether a slot holds one block."""
        return at < self.cuts.get(slot, 0) or bool(self.odd.get(slot, 0) >> at & 1)

    def has(self, slot: int) -> bool:
        """Whether a slot holds anything."""
        return slot in self.cuts or slot in self.odd

    def holds_first(self, slot: int, count: int) -> bool:
        """Whether a slot holds the first so many blocks."""
        return self.cuts.get(slot, 0) >= count

    def gain(self, slot: int, start: int, stop: int) -> int:
        """A slot stores the blocks from ``start`` on. Returns, as bits from ``start``, which of them it had already."""
        if slot not in self.odd and self.cuts.get(slot, 0) == start:
            self._set_cut(slot, stop)
            return 0
        bits = self.bits(slot)
        span = (1 << stop - start) - 1
        self._set_bits(slot, bits | span << start)
        return bits >> start & span

    def add(self, slot: int, bits: int) -> None:
        """A slot has these blocks, too."""
        self._set_bits(slot, self.bits(slot) | bits)

    def lose(self, slot: int, at: int) -> bool:
        """A slot loses a block; False if it did not hold it."""
        if not self.holds(slot, at):
            return False
        if slot not in self.odd and self.cuts[slot] == at + 1:
            self._set_cut(slot, at)
        else:
            self._set_bits(slot, self.bits(slot) & ~(1 << at))
        return True

    def lose_all(self, slot: int, places: Iterable[int]) -> None:
        """A slot loses blocks that it holds."""
        gone = 0
        for at in places:
            gone |= 1 << at
        self._set_bits(slot, self.bits(slot) & ~gone)

    def drop(self, slot: int) -> None:
        """A slot holds nothing of the run any more."""
        self.odd.pop(slot, None)
        if self.cuts.pop(slot, None) is not None and slot == self._longest:
            self._longest = None

    def cut_to(self, length: int) -> Iterator[tuple[int, int]]:
        """Nobody holds anything from ``length`` on. Yields each slot that did, with those blocks as bits."""
        for slot in [slot for slot, cut in self.cuts.items() if cut > length] + list(self.odd):
            bits = self.bits(slot)
            if lost := bits >> length:
                self._set_bits(slot, bits & (1 << length) - 1)
                yield slot, lost

    def length(self) -> int:
        """The least length that has all that anybody holds."""
        if self._longest is None and self.cuts:
            self._longest = max(self.cuts, key=self.cuts.__getitem__)
        longest = 0 if self._longest is None else self.cuts[self._longest]
        return max(longest, *(bits.bit_length() for bits in self.odd.values())) if self.odd else longest

    def any_holds(self, at: int, *, beside: int | None = None) -> bool:
        """Whether anybody holds one block, ``beside`` some slot."""
        if at >= self.length():
            return False
        if beside is None and not self.odd:
            return True
        return any(self.holds(slot, at) for slot in (*self.cuts, *self.odd) if slot != beside)

    def _set_bits(self, slot: int, bits: int) -> None:
        cut = (bits + 1 & ~bits).bit_length() - 1
        if bits >> cut:
            self.odd[slot] = bits
        else:
            self.odd.pop(slot, None)
        self._set_cut(slot, cut)

    def _set_cut(self, slot: int, cut: int) -> None:
        before = self.cuts.get(slot, 0)
        if cut:
            self.cuts[slot] = cut
        elif before:
            del self.cuts[slot]
        if cut < before and slot == self._longest:
            self._longest = None
        elif self._longest is not None and cut > self.cuts[self._longest]:
            self._longest = slot


def joint_cuts(tiers: Iterable[Holders]) -> dict[int, int]:
    """Blocks from a run's start that each slot holds on one tier or another."""
    joint = Holders()
    for holders in tiers:
        for slot in {*holders.cuts, *holders.odd}:
            joint.add(slot, holders.bits(slot))
    return joint.cuts


class Holdings(Generic[_T]):
    """What each slot may hold something of: runs, or keys. So that a slot can be cleared in the time that its own take.

    A slot's list has all that it holds, perhaps some twice, and some of what it has held.
    """

    def __init__(self, is_held: Callable[[int, _T], bool]) -> None:
        """``is_held``: whether a slot still holds something."""
        self._is_held = is_held
        self._held: dict[int, list[_T]] = {}
        self._most: dict[int, int] = {}

    def add(self, slot: int, each: _T) -> None:
        """A slot begins to hold something."""
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = []
        if len(held) >= _FEW and len(held) >= self._most.get(slot, 0):
            held[:] = [one for one in dict.fromkeys(held) if self._is_held(slot, one)]
            self._most[slot] = 2 * len(held)
        held.append(each)  # which need not be held yet

    def take(self, slot: int) -> list[_T]:
        """A slot holds nothing any more. Returns what it may have held."""
        self._most.pop(slot, None)
        return list(dict.fromkeys(self._held.pop(slot, ())))
