"""What a rank's groups of layers are: each one's first event tells.

What was learnt goes when events say otherwise, or when another process may have taken the worker's place: it may have
other groups, other windows, blocks of another size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from router.core.finer_groups import FinerGroups
from router.core.pairs import Pairs
from router.core.rank_state import RankState
from router.core.shared_pool import SharedPool
from router.core.usable import Kind, Rule, rule_of
from router.wire.kv_events import BlockStored

#: So many events in a row of blocks that no group of a rank has, and it is taken for another process.
MOST_ODD = 8
#: After so many prompts of which a window group keeps no more it is taken to have no draft's layers.
FEWEST_VOTES = 2


class Groups(FinerGroups):
    """The rules of each rank's groups, and which of them is the dense one that carries the chains."""

    def begin_anew(self, slot: int) -> None:
        """The rank may be another process: it holds nothing. What its groups were holds until it says what they are."""
        self.clear(slot)
        self._ranks[slot].is_doubted = True

    def met(self, slot: int) -> Sequence[BlockStored]:
        """What a rank's groups are, as events of no blocks."""
        rank = self._ranks[slot]
        return [] if rank.is_doubted else list(rank.met.values())

    def meet(self, slot: int, groups: Iterable[BlockStored]) -> None:
        """What a rank's groups are, where another index has met them. Of one whose prompts' ends are found inside a
        block the first event that is heard here may tell of such an end.
        """
        for event in groups:
            self._meet_group(self._ranks[slot], slot, event)

    def was_contradicted(self, slot: int) -> bool:
        """Whether a group has turned out to be another since this was last asked. What was told before that is lost."""
        rank = self._ranks[slot]
        found, rank.is_contradicted = rank.is_contradicted, False
        return found

    def fits(self, slot: int, event: BlockStored) -> bool:
        """Whether an event's blocks can be of the size that its group's are, or nothing is known of that.

        Smaller ones are prompts' ends inside a block, each told by itself; until several blocks were told at once,
        those that were heard of so far may have been such ends.
        """
        rank = self._ranks[slot]
        met = rank.met.get(event.group)
        if rank.is_doubted or met is None or event.block_tokens == met.block_tokens or not _is_alike(met, event):
            return True
        small, large = sorted((met.block_tokens, event.block_tokens))
        if large % small:
            return False
        return len(event.hashes) <= 1 if event.block_tokens == small else not rank.is_settled

    def _is_odd(self, rank: RankState, slot: int, event: BlockStored) -> bool:
        """Whether an event is to be passed over for the size of its blocks. One such event changes nothing; after many
        in a row all that is known of the rank is in doubt, and is asked for again.
        """
        if self.fits(slot, event) and event.block_tokens % self.block_tokens == 0:
            if (met := rank.met.get(event.group)) is not None and event.block_tokens == met.block_tokens:
                rank.odd_events = 0
            return False
        rank.odd_events += 1
        if rank.odd_events >= MOST_ODD:
            self.begin_anew(slot)
            rank.odd_events, rank.is_contradicted = 0, True
        return True

    def _forget_groups(self, rank: RankState, slot: int) -> None:
        """Of a rank that holds nothing, nothing is known of its groups either."""
        rank.forget_groups()
        self._lone &= ~rank.bit
        self._set_stride(slot, 1)
        if type(rank.pool) is not type(rank.given):
            self._renew_pool(slot)

    def _is_news(self, rank: RankState, event: BlockStored) -> bool:
        """Whether an event tells more of its group than is known, or otherwise."""
        met = rank.met.get(event.group)
        return met is None or event.block_tokens > met.block_tokens or not _is_alike(met, event)

    def _learn_group(self, rank: RankState, slot: int, event: BlockStored) -> None:
        met = rank.met.get(event.group)
        if met is None:
            self._meet_group(rank, slot, event)
        elif _is_alike(met, event):
            self._meet_anew(rank, slot, event)
        else:  # a process that has restarted unseen
            self.clear(slot)
            self._forget_groups(rank, slot)
            rank.is_contradicted = True
            self._meet_group(rank, slot, event)

    def _meet_anew(self, rank: RankState, slot: int, event: BlockStored) -> None:
        """What was heard of a group so far were prompts' ends inside its blocks: who begins to listen late hears those
        first. What they were taken for goes, of all groups that were alike.
        """
        before = rank.met[event.group].block_tokens
        met = [
            replace(each, block_tokens=event.block_tokens) if each.block_tokens == before else each
            for each in rank.met.values()
        ]
        if rank.rules:
            rank.pool = None
        self.clear(slot)
        rank.dense_group, rank.rules, rank.has_tails = None, {}, False
        rank.met.clear()
        self.meet(slot, met)

    def _meet_group(self, rank: RankState, slot: int, event: BlockStored) -> None:
        """The first dense one carries the chains."""
        rank.met[event.group] = replace(event, hashes=(), parent=None, token_ids=(), extra_keys=None)
        rule = self._rule(rank, event)
        rank.judged.pop(event.group, None)
        if rule.kind is Kind.DENSE and rank.dense_group is None:
            if rank.is_lone:
                self._end_lone(rank, slot)
            rank.dense_group = event.group
            rank.pairs = Pairs() if event.next_tokens else None
            self._set_stride(slot, rule.stride)
        else:
            rank.rules[event.group] = rule
        rank.align = math.lcm(
            rank.stride, *(rule.stride for rule in rank.rules.values() if rule.kind is not Kind.UNUSED)
        )
        self._share_pool(rank)
        if rank.dense_group is not None:
            for keys, units in rank.adopted.resumed:
                self._resume(rank, slot, keys, units)

    def _judge_drafts(self, rank: RankState, slot: int, event: BlockStored) -> None:
        """Learn whether a draft's layers are in a window group: one without them keeps a block less of a prompt, as MTP
        has them in one group alone.
        """
        rule, votes = rank.rules[event.group], rank.judged.get(event.group, 0)
        if not rule.behind or votes < 0 or event.is_dense:
            return
        if (asked := self._asked(rank, slot, event)) is None:
            return
        chain, start = asked
        if start + len(event.token_ids) // self.block_tokens <= len(chain.keys) - math.lcm(rank.align, rank.stride):
            return  # it may be of another prompt, which ends there
        without = replace(rule, needed=rule.needed - rule.behind, behind=0)
        most, fewest = (len(self._kept_places(rank, each, event, *asked)) for each in (rule, without))
        if fewest < most == len(event.hashes):
            rank.judged[event.group] = -1
        elif len(event.hashes) == fewest < most:
            rank.judged[event.group] = votes + 1
            if votes + 1 == FEWEST_VOTES:
                rank.rules[event.group] = without
                self._share_pool(rank)

    def _share_pool(self, rank: RankState) -> None:
        """Groups share the pool. Where blocks are not alike, or a chunk's size is unknown, nothing is foretold."""
        rules, pool = rank.rules.values(), rank.pool
        if pool is None or not rules:
            return
        if pool.is_radix or rank.has_tails or not all(rule.kind in (Kind.WINDOW, Kind.CHUNK) for rule in rules):
            rank.pool = None
        elif rank.dense_group is not None:
            if any(rule.stride != rank.stride for rule in rules):
                rank.pool = None
            elif isinstance(pool, SharedPool):
                pool.guard.attempt(pool.meet, rank.rules)
            else:
                rank.pool = pool.guard.attempt(
                    SharedPool,
                    rank.rules,
                    rank.segment_tokens,
                    dense_group=rank.dense_group,
                    block_tokens=rank.stride * self.block_tokens,
                    blocks=pool.all_blocks,
                    cached=pool.cached(),
                    guard=pool.guard,
                    recomputed_blocks=pool.recomputed_blocks,
                )

    def _rule(self, rank: RankState, event: BlockStored) -> Rule:
        return rule_of(
            event.kind,
            window_tokens=event.window_tokens,
            block_tokens=event.block_tokens,
            unit_tokens=self.block_tokens,
            geometry=rank.geometry,
        )


def _is_alike(met: BlockStored, event: BlockStored) -> bool:
    """Whether they may be of one group: what an event leaves out says nothing."""
    is_same_kind = event.kind == met.kind or event.kind is None or met.kind is None
    told, known = event.window_tokens, met.window_tokens
    return is_same_kind and (told == known or told is None or known is None)
