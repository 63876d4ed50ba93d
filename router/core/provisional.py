"""Blocks that a dispatched request will leave behind, before any event says so.

Engines' events come up to a second late. From dispatch until some time after its end a request's blocks count as
resident on its rank, so that a second request for the same prompt, in the same instant, finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one request has entered: to be dropped as it was added."""

    slot: int
    keys: tuple[int, ...]
    tail: tuple[int, ...]


class Provisional:
    """Two tables of slot bits, read by the index: ``dense`` (all blocks) and ``tails`` (window groups)."""

    def __init__(self) -> None:
        self.dense: dict[int, int] = {}
        self.tails: dict[int, int] = {}
        self._more: dict[tuple[int, int, bool], int] = {}

    def add(self, slot: int, keys: Sequence[int], *, tail_blocks: int) -> Ticket:
        """Enter the blocks of a prompt that the rank does not hold yet; the last ``tail_blocks`` also as window."""
        tail = tuple(keys[len(keys) - tail_blocks :]) if tail_blocks else ()
        ticket = Ticket(slot=slot, keys=tuple(keys), tail=tail)
        self._enter(self.dense, slot, ticket.keys, in_tail=False)
        self._enter(self.tails, slot, ticket.tail, in_tail=True)
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Take back what ``add`` entered."""
        self._leave(self.dense, ticket.slot, ticket.keys, in_tail=False)
        self._leave(self.tails, ticket.slot, ticket.tail, in_tail=True)

    def _enter(self, table: dict[int, int], slot: int, keys: Sequence[int], *, in_tail: bool) -> None:
        bit = 1 << slot
        for key in keys:
            mask = table.get(key, 0)
            if mask & bit:
                entry = (slot, key, in_tail)
                self._more[entry] = self._more.get(entry, 0) + 1
            else:
                table[key] = mask | bit

    def _leave(self, table: dict[int, int], slot: int, keys: Sequence[int], *, in_tail: bool) -> None:
        bit = 1 << slot
        for key in keys:
            entry = (slot, key, in_tail)
            more = self._more.get(entry)
            if more is None:
                mask = table.get(key, 0) & ~bit
                if mask:
                    table[key] = mask
                else:
                    table.pop(key, None)
            elif more == 1:
                del self._more[entry]
            else:
                self._more[entry] = more - 1
