"""Window groups whose blocks are smaller than the dense group's, or end elsewhere: no dense event names all of them.

Such an event covers all tokens that a step has computed and names, in their order, the blocks that are kept: runs that
end where all groups have a block's end, or with EAGLE one block behind. There the dense group has the same name. So the
named ones tell where those beside them lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from router.core.lone_groups import LoneGroups
from router.core.rank_state import RankState, keys_of_event
from router.wire.kv_events import BlockStored


class FinerGroups(LoneGroups):
    """Blocks that lie between those of the dense group."""

    def end_batch(self, slot: int) -> None:
        """A batch of a rank's events has been applied whole."""
        rank = self._ranks[slot]
        if rank.between:
            events, rank.between = rank.between, []
            for event in events:
                self._store_between(rank, slot, event)
        super().end_batch(slot)

    def _wait_between(self, rank: RankState, event: BlockStored) -> None:
        """Some of its blocks are without a name. With the batch all that the dense group stored is known."""
        if rank.rules[event.group].stride % rank.stride:
            rank.between.append(event)

    def _store_between(self, rank: RankState, slot: int, event: BlockStored) -> None:
        group, rule = event.group, rank.rules[event.group]
        asked = self._asked(rank, slot, event)
        units = self._covered(rank, event) if asked is None else asked[0].keys
        keys = units[rule.stride - 1 :: rule.stride]
        places = [] if asked is None else self._kept_places(rank, rule, event, *asked)
        if len(places) != len(event.hashes):
            known = [self._key(rank, name) for name in event.hashes]
            places = places_between(keys, known, behind=rule.behind)
        for name, at in zip(event.hashes, places, strict=True):
            if at is not None and group in rank.unnamed.get(name, ()):
                rank.drop_unnamed(name, group)
                self._note_stray(rank, name, keys[at])
                self._gain_sparse(rank, slot, keys[at], group)
                self.provisional.confirm(slot, group, (keys[at],))

    def _covered(self, rank: RankState, event: BlockStored) -> Sequence[int]:
        """The keys of all units that an event covers."""
        parent = None if event.parent is None else self._key(rank, event.parent)
        if parent is None and event.parent is not None:
            return ()
        if not event.is_dense:
            event = replace(event, extra_keys=None)  # nothing tells which blocks they are of
        return keys_of_event(replace(event, block_tokens=self.block_tokens), parent, unit_tokens=self.block_tokens)


def places_between(keys: Sequence[int], known: Sequence[int | None], *, behind: int) -> list[int | None]:
    """Which of ``keys`` each of some kept blocks is, of which the ``known`` ones have theirs; None where it is unknown.

    What is kept lies in runs that end with a known block or ``behind`` blocks after one.
    """
    if len(known) == len(keys):
        return list(range(len(keys)))
    at = {key: place for place, key in enumerate(keys)}
    places = [None if key is None else at.get(key) for key in known]
    anchors = [place is not None for place in places]
    for number in range(1, len(places)):
        if behind and anchors[number - 1] and places[number] is None:
            places[number] = _within(keys, places[number - 1], 1)
    for number in range(len(places) - 2, -1, -1):
        if places[number] is None:
            places[number] = _within(keys, places[number + 1], -1)
    return places


def _within(keys: Sequence[int], place: int | None, step: int) -> int | None:
    return place + step if place is not None and 0 <= place + step < len(keys) else None
