"""Runs: blocks that follow one another, kept by chain key, and who holds what of them (``core/chains``)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from router.core.holders import Holders
from router.wire.kv_events import GPU

#: Positions in a run: its longest length, and the factor between the numbers of two runs.
RUN_BLOCKS = 1 << 22


@dataclass(slots=True, eq=False)
class Run:
    """Blocks one behind the other, by chain key. ``parent`` is where it begins: behind a block of another run.

    ``device`` are its holders in accelerator memory, ``lower`` those of each tier under it. ``floor`` is the length up
    to which other runs need it; ``branches`` are these by where they begin, those stored first first. ``is_used``: it
    was asked for, or stored again, since its turn to be forgotten came last.
    """

    number: int
    keys: array[int]
    parent: tuple[Run, int] | None
    device: Holders = field(default_factory=Holders)
    lower: dict[str, Holders] = field(default_factory=dict)
    branches: dict[int, dict[Run, None]] = field(default_factory=dict)
    floor: int = 0
    has_lost_its_end: bool = False
    is_used: bool = False

    def holders(self, tier: str) -> Holders:
        """Those of one tier."""
        return self.device if tier == GPU else self.lower.setdefault(tier, Holders())

    def on(self, tier: str) -> Holders | None:
        """Those of one tier, if anybody ever was."""
        return self.device if tier == GPU else self.lower.get(tier)

    def all_holders(self) -> Iterable[Holders]:
        """Those of each tier."""
        return (self.device, *self.lower.values())

    def places(self, start: int, stop: int) -> range:
        """The names of a stretch of its blocks."""
        base = self.number * RUN_BLOCKS
        return range(base + start, base + stop)


class Runs:
    """All runs by their numbers, whatever the length of their blocks: what a place means."""

    def __init__(self, *, sparse_end: Callable[[Sequence[int]], int] = lambda _keys: 0) -> None:
        """``sparse_end``: how many of the first of some blocks there are up to the last that a sparse group holds."""
        self.by_number: dict[int, Run] = {}
        self.blocks = 0
        self.sparse_end = sparse_end
        self._next = 0

    def add(self, keys: Sequence[int], parent: tuple[Run, int] | None) -> Run:
        """Begin a run."""
        run = self.by_number[self._next] = Run(self._next, array("Q", keys), parent)
        self._next += 1
        return run

    def at(self, place: int) -> tuple[Run | None, int]:
        """A place's run, if it is still known, and position."""
        number, at = divmod(place, RUN_BLOCKS)
        return self.by_number.get(number), at

    def key(self, place: int) -> int | None:
        """The chain key of a block; None if it is not known any more."""
        run, at = self.at(place)
        return None if run is None or at >= len(run.keys) else run.keys[at]

    def holds(self, slot: int, place: int, *, tier: str = GPU) -> bool:
        """Whether a rank holds a block."""
        run, at = self.at(place)
        holders = None if run is None else run.on(tier)
        return holders is not None and holders.holds(slot, at)

    def has(self, slot: int, place: int) -> bool:
        """The same, on whatever tier."""
        run, at = self.at(place)
        return run is not None and any(holders.holds(slot, at) for holders in run.all_holders())

    def follows(self, place: int, before: int) -> bool:
        """Whether a block is the one right behind another."""
        run, at = self.at(place)
        if run is None or at or run.parent is None:
            return run is not None and at > 0 and place == before + 1
        parent, stop = run.parent
        return before == parent.places(stop - 1, stop)[0]

    def is_held_beside(self, slot: int, place: int) -> bool:
        """Whether a rank other than this one holds a block, on whatever tier."""
        run, at = self.at(place)
        return run is not None and any(holders.any_holds(at, beside=slot) for holders in run.all_holders())

    def unheld(self, places: Iterable[int]) -> set[int]:
        """Those that no rank holds, on whatever tier. Neighbours in one run are looked up together."""
        gone: set[int] = set()
        number, run, sure = -1, None, 0
        for place in places:
            its, at = divmod(place, RUN_BLOCKS)
            if its != number:
                number, run = its, self.by_number.get(its)
                sure = 0 if run is None or run.device.odd else run.device.length()
            if at >= sure and not (run and any(holders.any_holds(at) for holders in run.all_holders())):
                gone.add(place)
        return gone

    def is_held(self, place: int) -> bool:
        """Whether any rank holds a block, on whatever tier."""
        run, at = self.at(place)
        return run is not None and any(holders.any_holds(at) for holders in run.all_holders())
