"""Blocks that a dispatched request will leave behind, before any event says so.

Engines' events come up to a second late. From dispatch until some time after its end a request's blocks count as
resident on its rank, so that a second request for the same prompt, in the same instant, finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one request has entered: to be dropped as it was added. ``epoch`` tells a slot's ranks apart."""

    slot: int
    epoch: int
    keys: tuple[int, ...]
    tail: tuple[int, ...]


class Provisional:
    """Two tables of slot bits, read by the index: ``dense`` (all blocks) and ``tails`` (window groups)."""

    def __init__(self) -> None:
        self.dense: dict[int, int] = {}
        self.tails: dict[int, int] = {}
        self._more: dict[tuple[int, int, bool], int] = {}
        self._epochs: dict[int, int] = {}

    def add(self, slot: int, keys: Sequence[int], *, tail_blocks: int, held_blocks: int = 0) -> Ticket:
        """Enter the blocks of a prompt after those that the rank holds; the last ``tail_blocks`` also as window.

        Blocks that count as held only because another request promised them are promised again, since that
        request may fail.
        """
        bit = 1 << slot
        while held_blocks and self.dense.get(keys[held_blocks - 1], 0) & bit:
            held_blocks -= 1
        tail = tuple(keys[max(0, len(keys) - tail_blocks) :])
        ticket = Ticket(slot=slot, epoch=self._epochs.get(slot, 0), keys=tuple(keys[held_blocks:]), tail=tail)
        self._enter(self.dense, slot, ticket.keys, in_tail=False)
        self._enter(self.tails, slot, ticket.tail, in_tail=True)
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Take back what ``add`` entered, unless the slot was forgotten since."""
        if ticket.epoch != self._epochs.get(ticket.slot, 0):
            return
        self._leave(self.dense, ticket.slot, ticket.keys, in_tail=False)
        self._leave(self.tails, ticket.slot, ticket.tail, in_tail=True)

    def forget(self, slot: int) -> None:
        """The rank is gone or lost its cache: nothing is promised of the slot, and open tickets are void."""
        bit = 1 << slot
        for table in (self.dense, self.tails):
            for key in [key for key, mask in table.items() if mask & bit]:
                _clear_bit(table, key, bit)
        for entry in [entry for entry in self._more if entry[0] == slot]:
            del self._more[entry]
        self._epochs[slot] = self._epochs.get(slot, 0) + 1

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
                _clear_bit(table, key, bit)
            elif more == 1:
                del self._more[entry]
            else:
                self._more[entry] = more - 1


def _clear_bit(table: dict[int, int], key: int, bit: int) -> None:
    mask = table.get(key, 0) & ~bit
    if mask:
        table[key] = mask
    else:
        table.pop(key, None)
