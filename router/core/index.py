"""How much of a prompt each rank can reuse: by what it holds, and by what requests in flight will leave behind.

Groups are judged at the end of the dense prefix by the rules of ``core/usable``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import nlargest
from itertools import islice

from router.core.adoption import Expected
from router.core.chains import Chains, Step
from router.core.forecast import Pool
from router.core.pairs import Pairs
from router.core.provisional import DENSE, Ticket
from router.core.radix_pool import RadixPool
from router.core.radix_requests import Want
from router.core.rank_state import RankState
from router.core.residency import TAILS, Residency
from router.core.shared_forecast import SharedForecast
from router.core.shared_pool import SharedPool
from router.core.sharing import shared_blocks
from router.core.usable import Mask, Rule, boundary, resumed_behind, slots_of

#: Events that wait for their parent are looked at again for each new prompt, no more than so many.
_RETRIED_ORPHANS = 16
#: For so many ranks a prompt's fate in a full pool is foretold.
MOST_FORETOLD = 8
#: So many forecasts of pools that groups share are made anew for a prompt; of others what was last foretold holds.
MOST_MADE = 2


class PrefixIndex(Residency):
    """The blocks of one model, in units of ``block_tokens``. Mutated by its owner, on one thread."""

    # --- what requests will leave behind ------------------------------------------------------------------

    def promise(self, slot: int, keys: Sequence[int], *, prompt_tokens: int) -> Ticket:
        """Count a prompt's blocks as resident from now on; events, or ``provisional.drop``, end that.

        Window groups keep what lies before two places (vLLM's retention): where this very prompt could be resumed, and
        where the dense group alone had known it up to (a junction, which others may share). Only blocks that the
        request computes are kept by it.
        """
        rank = self._ranks[slot]
        if rank.pairs is not None:
            keys = keys[: rank.paired_units(prompt_tokens, unit_tokens=self.block_tokens)]
        ends = keys[rank.stride - 1 :: rank.stride]
        held = rank.chains.depths(rank.chains.path(ends, limit=len(ends))).get(slot, 0)
        if rank.pairs is not None:  # the last of them may stand before another token
            held = max(0, held - 1)
        promised: dict[int, Sequence[int]] = {DENSE: () if rank.is_lone else ends[held:]}
        again = rank.recomputed_units
        limit = (
            prompt_tokens // self.block_tokens if again and rank.has_tails else (prompt_tokens - 1) // self.block_tokens
        )
        if rank.rules:
            known = self._depths(keys, prompt_tokens, is_whole=True).get(slot, 0)
            usable = self._boundary(rank, keys, known)
            step = math.lcm(rank.align, rank.stride)
            forks = (
                {known - again - (known - again) % step} if known - again > usable and not rank.is_lone else set[int]()
            )
            if rank.has_tails and limit % rank.stride:
                forks.add(limit - again)
                promised[DENSE] = (*ends[held:], keys[limit - 1])
            block_tokens = step * self.block_tokens
            same, longer = (prompt_tokens - 1) // block_tokens, prompt_tokens // block_tokens
            for group, rule in rank.rules.items():
                places = resumed_behind(same, longer, is_eagle=again > 0, is_state=rule.is_state)
                kept = forks.union(place * step for place in places)
                promised[group] = self._promised(rank, group, rule, keys, start=usable, ends=kept)
        return self._expect(rank, slot, promised, Expected(keys, limit))

    def promise_more(self, slot: int, keys: Sequence[int], *, start: int, behind: Ticket | None = None) -> Ticket:
        """Count the units from ``start`` on as resident, too: what a request has generated, ``behind`` what was
        promised of it before.
        """
        rank = self._ranks[slot]
        start -= start % rank.stride
        ends = keys[rank.stride - 1 :: rank.stride]
        path = rank.chains.path(ends, limit=len(ends))
        lacking = [at for at in range(start // rank.stride, len(ends)) if not rank.chains.holds_at(path, slot, at)]
        promised: dict[int, Sequence[int]] = {DENSE: () if rank.is_lone else [ends[at] for at in lacking]}
        for group, rule in rank.rules.items():
            promised[group] = self._promised(rank, group, rule, keys, start=start, ends=set())
        earlier = None if behind is None else self.provisional.outgrown(behind)
        if earlier is not None and earlier.start is not None:
            start = earlier.start
        return self._expect(rank, slot, promised, Expected(keys, start=start))

    def _expect(self, rank: RankState, slot: int, promised: dict[int, Sequence[int]], expected: Expected) -> Ticket:
        ticket = self.provisional.add(slot, promised, expected=expected)
        if rank.orphans:  # its events may have been quicker
            self._place_orphans(rank, slot, expected)
        return ticket

    def _place_orphans(self, rank: RankState, slot: int, chain: Expected) -> None:
        """See whether those that came last are of a chain that has become known since."""
        for parent, events in [*islice(reversed(rank.orphans.items()), _RETRIED_ORPHANS)]:
            if parent in rank.orphans and self._adopt(rank, slot, events[0], (chain,)) is not None:
                for event in rank.take_orphans(parent):
                    self._store_dense(rank, slot, event)

    def _promised(
        self, rank: RankState, group: int, rule: Rule, keys: Sequence[int], *, start: int, ends: set[int]
    ) -> Sequence[int]:
        held = self._sparse[group].masks
        blocks = rule.kept(start, len(keys), ends=ends, segment_tokens=rank.segment_tokens.get(group, 0))
        names = [keys[(block + 1) * rule.stride - 1] for block in blocks]
        return [key for key in names if not held.get(key, 0) & rank.bit]

    # --- lookup ---------------------------------------------------------------------------------------

    def reusable_tokens(
        self,
        keys: Sequence[int],
        *,
        prompt_tokens: int,
        want: Want | None = None,
        tokens: Sequence[int] | None = None,
    ) -> dict[int, int]:
        """Usable cached tokens of a prompt, on the device, for each slot that has any.

        ``keys`` are the chain keys of the prompt's whole units. The last token is always computed. ``want`` is all that
        the request takes, which may have to wait for room. ``tokens`` are the prompt's, where a block of it may be
        another by what is behind it.
        """
        reusable: dict[int, int] = {}
        depths = self._depths(keys, prompt_tokens, is_whole=True)
        for slot in self._radix_slots.difference(depths):  # what others compute may be there when it is let in
            pool, stride = self._ranks[slot].pool, self._ranks[slot].stride
            if isinstance(pool, RadixPool) and len(keys) >= stride and pool.may_bring(keys[stride - 1]):
                depths[slot] = 0
        foretold = self._foretell(depths, keys, want)
        limit = (prompt_tokens - 1) // self.block_tokens
        for slot, depth in depths.items():
            rank = self._ranks[slot]
            units = min(limit, foretold[slot]) if slot in foretold else self._usable(rank, keys, depth)
            if rank.pairs is not None:
                found = (rank.pairs,)
                units = self._found_paired(rank, found, keys, units, prompt_tokens=prompt_tokens, tokens=tokens)
            if units > 0:
                reusable[slot] = units * self.block_tokens
        return reusable

    def _found_paired(
        self,
        rank: RankState,
        pairs: Sequence[Pairs],
        keys: Sequence[int],
        units: int,
        *,
        prompt_tokens: int,
        tokens: Sequence[int] | None,
    ) -> int:
        """Units up to the last block that stands before the prompt's next token on the rank, too, or is due there."""
        units = min(units, rank.paired_units(prompt_tokens - 1, unit_tokens=self.block_tokens))
        if not units or tokens is None or rank.adopted.is_used:
            return units
        last, behind = keys[units - 1], tokens[units * self.block_tokens]
        is_there = any(each.has(last, behind) for each in pairs) or self.provisional.dense.get(last, 0) & rank.bit
        return units if is_there else units - rank.stride

    def _foretell(self, depths: Mapping[int, int], keys: Sequence[int], want: Want | None) -> dict[int, int]:
        """Usable units of ranks whose pool may have given up some of a prompt when the request comes to it.

        Of many such ranks only those with most of the prompt are looked at: the others are not chosen for it. Of one
        where this fails nothing is foretold until it is cleared.
        """
        ranks = self._ranks
        slots = [
            slot
            for slot in depths
            if (pool := ranks[slot].pool) is not None
            and not pool.guard.has_failed
            and (pool.pending or (type(pool) is not Pool and pool.is_moving))
        ]
        if len(slots) > MOST_MADE:
            slots = nlargest(MOST_FORETOLD, slots, key=depths.__getitem__)
        foretold: dict[int, int] = {}
        made = 0
        for slot in slots:
            rank, pool = ranks[slot], ranks[slot].pool
            assert pool is not None, "it was looked at above"
            before = pool.forecasts_made if isinstance(pool, SharedPool) else 0
            units = pool.guard.attempt(
                self._usable_then, rank, slot, keys, depths[slot], want, is_spared=made >= MOST_MADE
            )
            if units is not None:
                foretold[slot] = units
            if isinstance(pool, SharedPool):
                made += pool.forecasts_made - before
        return foretold

    def _usable_then(
        self, rank: RankState, slot: int, keys: Sequence[int], depth: int, want: Want | None, *, is_spared: bool
    ) -> int:
        """How much will be usable of a prompt of which a rank has so many dense units now."""
        stride, pool, copies = rank.stride, rank.pool, self._copies(slot)
        ends = keys if stride == 1 else keys[stride - 1 :: stride]
        if isinstance(pool, SharedPool):
            forecast = pool.forecast(copies=copies, is_spared=is_spared)
            while forecast is not None:
                kept = forecast.depth(ends, depth // stride) * stride
                units = self._usable(rank, keys, kept, forecast)
                later = pool.step_after(forecast) if forecast.comes_too_soon(ends, units // stride) else None
                if later is None:
                    return units
                forecast = later
            return self._usable(rank, keys, depth)
        if isinstance(pool, RadixPool):
            return self._usable(rank, keys, pool.kept(ends, depth // stride, copies=copies, want=want) * stride)
        assert pool is not None, "it has requests pending"
        return self._usable(rank, keys, pool.kept(ends, depth // stride, copies=copies) * stride)

    def _usable(self, rank: RankState, keys: Sequence[int], depth: int, forecast: SharedForecast | None = None) -> int:
        """Units of a prompt's first ``depth`` that all groups of a rank accept."""
        if rank.rules:
            return self._boundary(rank, keys, depth, forecast)
        return depth - rank.recomputed_units if rank.geometry.eagle else depth

    def loadable_tokens(
        self, keys: Sequence[int], *, prompt_tokens: int, tokens: Sequence[int] | None = None
    ) -> dict[int, int]:
        """Tokens of a prompt that lie on the device *or* below it, for each slot; empty if nothing lies below."""
        if not any(chains.has_lower for chains in self._chains.values()):
            return {}
        found = self._depths(keys, prompt_tokens, below=True)
        for slot, depth in found.items():
            rank = self._ranks[slot]
            if rank.pairs is not None:
                pairs = (rank.pairs, rank.pairs_below)
                found[slot] = self._found_paired(rank, pairs, keys, depth, prompt_tokens=prompt_tokens, tokens=tokens)
        return {slot: depth * self.block_tokens for slot, depth in found.items()}

    def stored_tokens(self, keys: Sequence[int], *, prompt_tokens: int) -> dict[int, int]:
        """Tokens of a prompt that full attention finds on each slot, whatever other layers accept; empty if no rank has
        layers of other kinds.
        """
        if not any(rank.rules for rank in self._ranks.values()):
            return {}
        return {slot: depth * self.block_tokens for slot, depth in self._depths(keys, prompt_tokens).items()}

    def shared_tokens(self, keys: Sequence[int], *, prompt_tokens: int) -> int:
        """Tokens from the start of a prompt that belong to other conversations as well, as far as blocks tell."""
        limit = min(len(keys), (prompt_tokens - 1) // self.block_tokens)
        shared = 0
        for stride, chains in self._chains.items():
            path = chains.path(keys[stride - 1 :: stride], limit=limit // stride)
            block_tokens = stride * self.block_tokens
            shared = max(shared, shared_blocks(path, block_tokens=block_tokens) * block_tokens)
        return shared

    def _depths(
        self, keys: Sequence[int], prompt_tokens: int, *, below: bool = False, is_whole: bool = False
    ) -> dict[int, int]:
        """Dense units from the start that each rank holds, or will. ``below``: on whatever tier. ``is_whole``: with
        those that are looked at behind the last token but one.
        """
        most = (prompt_tokens - 1) // self.block_tokens
        behind = {slot: self._ranks[slot].units_behind for slot in self._eagle_slots} if is_whole else {}
        limit = min(len(keys), most + max(behind.values(), default=0))
        found: dict[int, int] = {}
        for stride, chains in self._chains.items():
            if chains.members and limit >= stride:
                ends = keys if stride == 1 else keys[stride - 1 :: stride]
                path = chains.path(ends, limit=limit // stride)
                blocks = chains.depths(path, below=below)
                if self.provisional.dense:
                    self._add_promised(blocks, chains, path, ends, limit // stride, below=below)
                found.update(blocks if stride == 1 else {slot: count * stride for slot, count in blocks.items()})
        if self._sparse.get(TAILS):
            self._add_tails(found, keys, limit)
        if self._lone and not below:
            self._add_lone(found, keys, limit)
        if behind:
            return {slot: min(depth, most + behind.get(slot, 0)) for slot, depth in found.items()}
        return found

    def _add_tails(self, found: dict[int, int], keys: Sequence[int], limit: int) -> None:
        """Lengthen the prefix of ranks whose prompts' ends are found inside a block, up to such an end."""
        tails, promised = self._sparse[TAILS].masks, self.provisional.dense
        for slot, rank in self._ranks.items():
            if rank.has_tails:
                depth = found.get(slot, 0)
                inside = range(min(limit, depth + rank.stride - 1), depth, -1)
                ends = (at for at in inside if (tails.get(keys[at - 1], 0) | promised.get(keys[at - 1], 0)) & rank.bit)
                if end := next(ends, 0):
                    found[slot] = end

    def _add_promised(
        self,
        blocks: dict[int, int],
        chains: Chains,
        path: Sequence[Step],
        keys: Sequence[int],
        limit: int,
        *,
        below: bool,
    ) -> None:
        """Lengthen each rank's prefix by what is promised behind it, and by what it holds behind that."""
        promised = self.provisional.dense
        for slot in slots_of(promised.get(keys[0], 0) & chains.members):
            blocks.setdefault(slot, 0)
        for slot, depth in blocks.items():
            if depth == limit or not promised.get(keys[depth], 0) >> slot & 1:
                continue

            def lacks(at: int, slot: int = slot) -> bool:
                return not (promised.get(keys[at], 0) >> slot & 1 or chains.holds_at(path, slot, at, below=below))

            blocks[slot] = bisect_left(range(limit), True, lo=depth + 1, key=lacks)

    def _boundary(
        self, rank: RankState, keys: Sequence[int], depth: int, forecast: SharedForecast | None = None
    ) -> int:
        def mask_of(group: int) -> Mask:
            now, promised = self._sparse[group].masks, self.provisional.sparse.get(group, {})
            if forecast is None:
                return (lambda key: now.get(key, 0) | promised.get(key, 0)) if promised else now.get
            unkept = forecast.unkept(keys[rank.stride - 1 :: rank.stride], depth // rank.stride, promised.get)
            return forecast.mask(group, now.get, unkept, bit=rank.bit)

        groups = {group: mask_of(group) for group in rank.rules}
        again = rank.recomputed_units
        return boundary(keys, depth, bit=rank.bit, groups=groups, rules=rank.rules, align=rank.align, recomputed=again)

    # --- what others show -----------------------------------------------------------------------------

    def blocks(self, slot: int) -> int:
        """Blocks believed resident on a rank, in its dense group."""
        return self._ranks[slot].blocks

    def applied_blocks(self, slot: int) -> int:
        """Blocks that events have brought in so far, or told of again, whether or not they are still there."""
        return self._ranks[slot].applied_blocks

    def stride(self, slot: int) -> int:
        """Units in a dense block of the rank."""
        return self._ranks[slot].stride

    def has_gaps(self, slot: int) -> bool:
        """Whether a rank is known to have had blocks that no event told of, or has not told of any yet."""
        rank = self._ranks[slot]
        return rank.dense_group is None or rank.is_doubted or bool(rank.orphans) or rank.adopted.has_gaps

    def orphans(self, slot: int) -> int:
        """Blocks a rank has announced whose parent is not known."""
        return self._ranks[slot].orphan_blocks

    def residency(self, slot: int) -> dict[int, frozenset[int]]:
        """For tests and consistency checks: keys held by a rank, per sparse group (-1: the dense group)."""
        return {
            -1: self._ranks[slot].chains.keys_of(slot),
            **{group: table.keys_of(slot) for group, table in self._sparse.items()},
        }

    def pool(self, slot: int) -> Pool | SharedPool | None:
        """The rank's pool, to be told of requests; None where nothing is known of it, or nobody gave it."""
        return self._ranks[slot].pool
