"""Which rank holds how much of which chain of blocks: the dense groups of the index.

Blocks that follow one another are kept as *runs*, not one by one. A chain key stands for its block and all before it,
so one comparison tells whether a whole stretch of two chains is the same, and a run needs no more than its first key to
be found. What a rank holds of a run nearly always is its beginning: one number. Where it is not (an inner block left
before the ones behind it), the rank's blocks of that run stand in a bit set instead.

A *place* is one number for a run and a position in it. Engines' names for blocks are mapped onto places. A place never
comes to mean another block: a run that has lost its end is not continued, what follows it begins a run of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from router.core.holders import Holdings, joint_cuts
from router.core.runs import RUN_BLOCKS, Run, Runs
from router.wire.kv_events import GPU

_FEW_RUNS = 256
#: So many runs get another turn before one is forgotten all the same.
_MOST_TURNS = 256

#: A stretch of a chain that a run has: where it begins in the chain, the run, and how many of the run's first blocks.
Step = tuple[int, Run, int]


class Chains:
    """All runs of ranks whose blocks are equally long. Slots are numbers of ranks; one thread."""

    def __init__(self, runs: Runs) -> None:
        """``runs`` are shared with the chains of other block lengths. ``members`` are the ranks' slots, as bits."""
        self._runs = runs
        self._firsts: dict[int, Run] = {}
        self._turns: deque[Run] = deque()  # whose it is to be forgotten, some of them gone
        self._copies: dict[int, dict[tuple[str, int], int]] = {}  # beyond the first, by slot, tier and place
        self._own = Holdings[Run](lambda slot, run: any(holders.has(slot) for holders in run.all_holders()))
        self._twins: Counter[int] = Counter()
        self.members = 0
        self.has_lower = False

    def has(self, place: int) -> bool:
        """Whether a place is of these chains: ranks whose blocks are of another length may go by the same names."""
        run, at = self._runs.at(place)
        return run is not None and at < len(run.keys) and self._firsts.get(run.keys[0]) is run

    # --- what ranks store and lose --------------------------------------------------------------------

    def extend(
        self, slot: int, parent: int | None, keys: Sequence[int], *, tier: str = GPU
    ) -> tuple[int, Iterator[int]]:
        """A rank stored blocks one behind the other after the place ``parent`` (None: at a chain's start).

        Returns how many of them are new to the rank, and the places of all.
        """
        self.has_lower = self.has_lower or tier != GPU
        spans: list[tuple[Run, int, int]] = []
        run, stop, at = None, 0, 0
        if parent is not None and self.has(parent):
            run, stop = self._runs.at(parent)
            stop += 1
            if run is not None and stop < len(run.keys) and (at := _shared(run.keys, stop, keys, 0, len(keys))):
                spans.append((run, stop, stop + at))
                stop += at
        for start, run, shared in self._path(keys, at, len(keys)):
            spans.append((run, 0, shared))
            at, stop = start + shared, shared
        if at < len(keys):
            spans.append(self._append(run, stop, keys[at:] if at else keys))
        new = sum([self._gain(run, slot, start, stop, tier) for run, start, stop in spans])
        return new, chain.from_iterable([run.places(start, stop) for run, start, stop in spans])

    def _append(self, run: Run | None, stop: int, keys: Sequence[int]) -> tuple[Run, int, int]:
        """Blocks nobody had, behind the first ``stop`` of a run."""
        self._runs.blocks += len(keys)
        fits = run is not None and stop + len(keys) <= RUN_BLOCKS
        if run is not None and fits and stop == len(run.keys) and not run.has_lost_its_end:
            run.keys.extend(keys)
            return run, stop, stop + len(keys)
        added = self._runs.add(keys, None if run is None else (run, stop))
        if run is not None:
            run.branches.setdefault(stop, {})[added] = None
            run.floor = max(run.floor, stop)
        self._firsts[keys[0]] = added
        self._turns.append(added)
        if len(self._turns) > 2 * len(self._firsts) + _FEW_RUNS:
            self._turns = deque(each for each in self._turns if each.number in self._runs.by_number)
        return added, 0, len(keys)

    def gain(self, slot: int, place: int, *, tier: str = GPU) -> bool:
        """A rank has one more copy of a known block; True if it is its first there."""
        self.has_lower = self.has_lower or tier != GPU
        run, at = self._runs.at(place)
        return run is not None and self.has(place) and bool(self._gain(run, slot, at, at + 1, tier))

    def _gain(self, run: Run, slot: int, start: int, stop: int, tier: str) -> int:
        holders = run.holders(tier)
        if not holders.has(slot):
            self._own.add(slot, run)
        twins = holders.gain(slot, start, stop)
        if twins:
            for offset, place in enumerate(run.places(start, stop)):
                if twins >> offset & 1:
                    self._count_copy(slot, tier, place, 1)
        return stop - start - twins.bit_count()

    def lose(self, slot: int, place: int, *, tier: str = GPU) -> bool:
        """Take a copy away; True if it was the rank's last there."""
        if (copies := self._copies.get(slot)) and (tier, place) in copies:
            self._count_copy(slot, tier, place, -1)
            return False
        run, at = self._runs.at(place)
        if run is None or (holders := run.on(tier)) is None or not holders.lose(slot, at):
            return False
        self._trim(run)
        return True

    def lose_all(self, slot: int, places: Iterable[int]) -> list[int]:
        """Take a copy of each away, on the device. Returns the places of those that were the rank's last there."""
        lost: list[int] = []
        by_run: dict[Run, list[int]] = {}
        for place in places:
            run, at = self._runs.at(place)
            if (copies := self._copies.get(slot)) and (GPU, place) in copies:
                self._count_copy(slot, GPU, place, -1)
            elif run is not None and run.device.holds(slot, at):
                by_run.setdefault(run, []).append(at)
                lost.append(place)
        for run, gone in by_run.items():
            run.device.lose_all(slot, gone)
            self._trim(run)
        return lost

    def _count_copy(self, slot: int, tier: str, place: int, change: int) -> None:
        copies = self._copies.setdefault(slot, {})
        copies[tier, place] = copies.get((tier, place), 0) + change
        if not copies[tier, place]:
            del copies[tier, place]
            if not copies:
                del self._copies[slot]
        if tier == GPU:
            self._twins[slot] += change

    def has_twin(self, slot: int, place: int) -> bool:
        """Whether a rank has more than one copy of a block on its device."""
        return (GPU, place) in self._copies.get(slot, ())

    def twins(self, slot: int) -> int:
        """Copies beyond the first that a rank has on its device, of all its blocks."""
        return self._twins[slot]

    def extra_copies(self) -> int:
        """How often one rank has a block more than once on one tier."""
        return sum(map(len, self._copies.values()))

    def clear(self, slot: int) -> list[Run]:
        """Forget all a rank held. Takes time in the number of runs that was of, and returns these: ``trim`` lets go of
        what nobody holds then.
        """
        runs = self._own.take(slot)
        for run in runs:
            run.device.drop(slot)
            for holders in run.lower.values():
                holders.drop(slot)
        self._copies.pop(slot, None)
        self._twins.pop(slot, None)
        return runs

    def runs(self) -> list[Run]:
        """All of them, those begun first first."""
        return list(self._firsts.values())

    def trim(self, runs: Iterable[Run]) -> None:
        """Let go of blocks at the ends of runs that nobody holds. What sparse groups hold stays: their events name
        places.
        """
        for run in runs:
            if run.number in self._runs.by_number:
                self._trim(run)

    def trim_at(self, place: int) -> None:
        """The same, where a place is of these chains."""
        run, _ = self._runs.at(place)
        if run is not None and self.has(place):
            self._trim(run)

    def _trim(self, run: Run) -> None:
        length = max(run.floor, *[holders.length() for holders in run.all_holders()])
        if length < len(run.keys):
            length += self._runs.sparse_end(run.keys[length:])
        if length < len(run.keys):
            self._shorten(run, length)

    def _shorten(self, run: Run, length: int) -> None:
        self._runs.blocks -= len(run.keys) - length
        first = run.keys[0]
        del run.keys[length:]  # of a run that is gone as well: it is still in lists
        if length:
            run.has_lost_its_end = True
            return
        del self._firsts[first], self._runs.by_number[run.number]
        if run.parent is not None:
            parent, stop = run.parent
            del parent.branches[stop][run]
            if not parent.branches[stop]:
                del parent.branches[stop]
                parent.floor = max(parent.branches, default=0)
                self._trim(parent)

    def evict(self, count: int) -> Iterator[tuple[Sequence[int], dict[int, int]]]:
        """Forget up to ``count`` blocks: of runs that nobody asks for first, the last branch from its end, so that no
        block is left without the ones before it.

        Yields the keys of each stretch, and which of them each slot held on its device, as bits.
        """
        while count > 0 and self._firsts:
            run = self._next_to_go()
            length = max(run.floor, len(run.keys) - count)
            keys = run.keys[length:]
            count -= len(keys)
            lost = dict(run.device.cut_to(length))
            copies = [(slot, GPU) for slot in lost]
            copies += [(slot, tier) for tier, holders in run.lower.items() for slot, _ in holders.cut_to(length)]
            if self._copies:
                for place in run.places(length, length + len(keys)):
                    for slot, tier in copies:
                        if more := self._copies.get(slot, {}).get((tier, place)):
                            self._count_copy(slot, tier, place, -more)
            self._shorten(run, length)
            if length:
                self._trim(run)
            yield keys, lost

    def _next_to_go(self) -> Run:
        """The oldest run that was not used since its last turn, or what is behind it; those that were used get another
        turn (second chance), as far as they are looked at now.
        """
        turns = 0
        while True:
            first = run = self._turns[0]
            if run.number not in self._runs.by_number:
                self._turns.popleft()
                continue
            while run.floor == len(run.keys):
                run = next(iter(run.branches[run.floor]))
            if turns == _MOST_TURNS or not (run.is_used or first.is_used):
                return run
            turns += 1
            first.is_used = False
            self._turns.rotate(-1)

    # --- lookup ---------------------------------------------------------------------------------------

    def path(self, keys: Sequence[int], *, limit: int) -> list[Step]:
        """The runs along the first ``limit`` blocks of a chain, as far as anybody knows it."""
        return list(self._path(keys, 0, limit))

    def _path(self, keys: Sequence[int], at: int, limit: int) -> Iterator[Step]:
        while at < limit and (run := self._firsts.get(keys[at])) is not None:
            shared = _shared(run.keys, 0, keys, at, limit)
            run.is_used = True
            yield at, run, shared
            at += shared

    def depths(self, path: Sequence[Step], *, below: bool = False) -> dict[int, int]:
        """How many blocks from the start of a chain each slot holds without a gap; slots that hold none are left out.

        ``below``: on the device or under it.
        """
        found: dict[int, int] = {}
        for start, run, shared in path:
            cuts = joint_cuts(run.all_holders()) if below and run.lower else run.device.cuts
            if not start:
                is_whole = shared == len(run.keys)
                found = dict(cuts) if is_whole else {slot: min(cut, shared) for slot, cut in cuts.items()}
                continue
            end = start + shared
            reached = {
                slot: start + cut if cut < shared else end for slot, cut in cuts.items() if found.get(slot) == start
            }
            found.update(reached)
        return found

    def places(self, path: Sequence[Step], count: int) -> list[int]:
        """The places of a chain's first ``count`` blocks, as far as its path goes."""
        return [
            place for start, run, shared in path if start < count for place in run.places(0, min(shared, count - start))
        ]

    def holds_at(self, path: Sequence[Step], slot: int, at: int, *, below: bool = False) -> bool:
        """Whether a rank holds one block of a chain, gaps before it or not. ``below``: on the device or under it."""
        for start, run, shared in path:
            if at < start + shared:
                tiers = run.all_holders() if below else (run.device,)
                return any(holders.holds(slot, at - start) for holders in tiers)
        return False

    def keys_of(self, slot: int) -> frozenset[int]:
        """For tests and consistency checks: what a rank holds on its device."""
        held = set[int]()
        for run in self._firsts.values():
            bits = run.device.bits(slot)
            held.update(key for at, key in enumerate(run.keys) if bits >> at & 1)
        return frozenset(held)

    def all_keys(self) -> set[int]:
        """Every block that is known."""
        return set(chain.from_iterable(run.keys for run in self._firsts.values()))


def _shared(run: Sequence[int], offset: int, keys: Sequence[int], at: int, limit: int) -> int:
    """How many blocks a run from ``offset`` on and a chain from ``at`` on have in common, up to the chain's limit."""
    most = min(len(run) - offset, limit - at)
    if run[offset + most - 1] == keys[at + most - 1]:
        return most
    return bisect_left(range(most - 1), True, key=lambda block: run[offset + block] != keys[at + block])
