"""Blocks that a rank is known to have though no event that could be placed has told of them (``core/adoption``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from router.core.adoption import Expected
from router.core.bounded import Bounded
from router.core.rank_state import RankState
from router.core.usable import Rule, resumed_behind
from router.wire.kv_events import BlockStored

#: Places of chains in flight that an event without a known parent is held against, those sent last first.
MOST_TRIED = 128


class TakingOver(Bounded):
    """What prompts in flight, engines' answers and later events show to be there."""

    def _adopt(self, rank: RankState, slot: int, event: BlockStored, chains: Iterable[Expected]) -> int | None:
        """Place the event's unknown parent, and what is before it: the rank has all of that."""
        if self.namespaces or event.parent is None:
            return None
        unit = self.block_tokens
        places = ((chain, end) for chain in chains for end in chain.ends(event, unit_tokens=unit))
        tried = ((chain, chain.before(event, unit_tokens=unit, end=end)) for chain, end in islice(places, MOST_TRIED))
        chain, units = next(((chain, units) for chain, units in tried if units), (None, ()))
        if chain is None:
            return None
        taken = self._take_over(rank, slot, units[rank.stride - 1 :: rank.stride])
        if taken is None:
            return None
        if chain.start is None:
            self._take_over_sparse(rank, slot, chain.keys, len(units))
        self._learn(rank, slot, (event.parent,), taken[:1], fresh=1)
        rank.adopted.named(taken[0])
        return taken[0]

    def _asked(self, rank: RankState, slot: int, event: BlockStored) -> tuple[Expected, int] | None:
        """The prompt in flight that an event is of, and how many of its units are before those that it covers."""
        unit, parent = self.block_tokens, None if event.parent is None else self._key(rank, event.parent)
        places = (
            (chain, at)
            for chain in self.provisional.expected(slot)
            for at in chain.starts(event, parent, unit_tokens=unit)
        )
        tried = islice(places, MOST_TRIED)
        return next(((chain, at) for chain, at in tried if chain.covers(event, at, unit_tokens=unit)), None)

    def _kept_places(
        self, rank: RankState, rule: Rule, event: BlockStored, chain: Expected, start: int
    ) -> list[int | None]:
        """Which blocks are kept of a prompt where an event covers those behind ``start`` units, but for forks."""
        step = math.lcm(rank.align, rank.stride)
        ends = resumed_behind(
            chain.tail // step, len(chain.keys) // step, is_eagle=rank.geometry.eagle, is_state=rule.is_state
        )
        end = start + len(event.token_ids) // self.block_tokens
        segment_tokens = rank.segment_tokens.get(event.group, 0)
        return list(rule.kept(start, end, ends={place * step for place in ends}, segment_tokens=segment_tokens))

    def reused(self, slot: int, keys: Sequence[int], *, tokens: int) -> None:
        """The engine says that it has reused so many tokens of a prompt."""
        rank = self._ranks[slot]
        units = tokens // self.block_tokens
        if self.namespaces or not units:
            return
        rank.adopted.resumed.append((keys, units))
        if rank.dense_group is not None and not rank.is_doubted:  # else nothing is known to be told of it
            self._resume(rank, slot, keys, units)

    def _resume(self, rank: RankState, slot: int, keys: Sequence[int], units: int) -> None:
        """The engine has gone on behind so many units of a prompt, and had what it computes again, too."""
        units -= units % rank.align
        ends = keys[: units + rank.recomputed_units][rank.stride - 1 :: rank.stride] if units else ()
        taken = self._take_over(rank, slot, ends) if ends else None
        if taken is None:
            return
        self._take_over_sparse(rank, slot, keys, units)
        place, is_new = taken
        if is_new or place in rank.adopted.nameless:
            pool_blocks = None if rank.pool is None else rank.pool.blocks
            unknown_blocks = math.inf if pool_blocks is None else max(0, pool_blocks - self._copies(slot))
            if (gone := rank.adopted.reuse(place, unknown_blocks=unknown_blocks)) is not None:
                self._let_go(rank, slot, gone, with_itself=True)

    def _heal(self, rank: RankState, slot: int, parent: int) -> None:
        """What is stored behind a block shows that all before it is there, whatever removals there were of copies."""
        run, at = self._runs.at(parent)
        pieces: list[Sequence[int]] = []
        is_whole = True
        while run is not None:
            is_whole = is_whole and run.device.holds_first(slot, at + 1)
            pieces.append(run.keys[: at + 1])
            run, at = (None, 0) if run.parent is None else (run.parent[0], run.parent[1] - 1)
        if not is_whole:
            self._take_over(rank, slot, [key for piece in reversed(pieces) for key in piece])
