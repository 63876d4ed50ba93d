"""Blocks that a request in flight is expected to leave behind, before any event says so.

Engines' events come up to a second late. What a dispatched request will store counts as resident on its rank at once,
so that a second request for the same prompt, in the same instant, finds it. Each promise ends in one of three ways:

- an event *confirms* a block: from then on the events alone speak of it;
- an event ends with the prompt's last block: what else the request had promised, and none brought, was promised wrongly
  (where that block lies inside an event, the event is of another prompt, which goes on behind this one);
- the request failed, or ended some time ago: its ticket is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from router.core.adoption import Expected

#: The dense group in a promise; other groups have the engine's own numbers.
DENSE = -1
_COUNT_BITS = 32
_COUNT = (1 << _COUNT_BITS) - 1


@dataclass(frozen=True, slots=True)
class Ticket:
    """One promise: to be dropped as it was added. Ranks that follow one another in a slot never share a ticket."""

    number: int
    slot: int


@dataclass(slots=True)
class _Entry:
    """What a ticket stands for. ``last`` is the dense block whose event ends the waiting."""

    slot: int
    keys: Mapping[int, Sequence[int]]
    last: int | None
    has_ended: bool = False


class Provisional:
    """Slot bits of promised blocks, read by the index: ``dense[key]`` and ``sparse[group][key]``."""

    def __init__(self) -> None:
        self.dense: dict[int, int] = {}
        self.sparse: dict[int, dict[int, int]] = {}
        self._entries: dict[int, _Entry] = {}
        self._by_slot: dict[int, set[int]] = {}
        # By slot and group, of each block how many tickets promise it, and above these bits the first of them: it was
        # promised by all that came since and name it, and by none of those before, whose promise has been confirmed.
        self._owners: dict[tuple[int, int], dict[int, int]] = {}
        self._waiting: dict[tuple[int, int], dict[int, None]] = {}  # tickets by slot and the block that they wait for
        self._fulfilled: list[int] = []
        self._expected: dict[int, dict[int, Expected]] = {}
        self._next = 0

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def add(self, slot: int, promised: Mapping[int, Sequence[int]], *, expected: Expected | None = None) -> Ticket:
        """Promise blocks of a rank: keys by group, ``DENSE`` for the chain itself, in the order of the prompt.

        Blocks that only another request has promised are promised again, since that one may fail. ``expected`` is the
        whole chain; it is remembered until the ticket is dropped.
        """
        ticket = Ticket(self._next, slot)
        self._next += 1
        dense = promised.get(DENSE, ())
        self._entries[ticket.number] = _Entry(slot, promised, dense[-1] if dense else None)
        if dense:
            self._waiting.setdefault((slot, dense[-1]), {})[ticket.number] = None
        self._by_slot.setdefault(slot, set()).add(ticket.number)
        if expected is not None:
            self._expected.setdefault(slot, {})[ticket.number] = expected
        bit, mine = 1 << slot, (ticket.number << _COUNT_BITS) + 1
        for group, keys in promised.items():
            table, owners = self._table(group), self._owners.setdefault((slot, group), {})
            if table.keys().isdisjoint(keys):  # what nobody else has promised goes in as a whole
                table.update(dict.fromkeys(keys, bit))
                owners.update(dict.fromkeys(keys, mine))
                continue
            for key in keys:
                table[key] = table.get(key, 0) | bit
                owners[key] = owners[key] + 1 if key in owners else mine
        return ticket

    def waits(self, slot: int) -> Callable[[int], bool]:
        """Whether a dense block is promised of a rank, as a function of its key."""
        promised, bit = self.dense, 1 << slot
        return lambda key: bool(promised.get(key, 0) & bit)

    def expected(self, slot: int) -> Iterator[Expected]:
        """The chains that a rank is to store, those promised last first."""
        return reversed(self._expected.get(slot, {}).values())

    def outgrown(self, ticket: Ticket) -> Expected | None:
        """Remember a ticket's chain no longer: another's, which begins with it, takes its place. Returns it."""
        return self._expected.get(ticket.slot, {}).pop(ticket.number, None)

    def ends_prompt(self, slot: int, key: int, *, stride: int) -> bool:
        """Whether a prompt in flight has this as its last whole block, of ``stride`` units."""
        prompts = (each.keys for each in self.expected(slot) if each.start is None and len(each.keys) >= stride)
        return any(keys[len(keys) - len(keys) % stride - 1] == key for keys in prompts)

    def confirm(self, slot: int, group: int, keys: Sequence[int]) -> None:
        """An event said that these blocks are resident."""
        if slot not in self._by_slot:
            return
        if group == DENSE and keys and (waiting := self._waiting.get((slot, keys[-1]))):
            self._fulfilled += waiting
        owned = self._owners.get((slot, group))
        if not owned:
            return
        table = self._table(group)
        for key in keys:
            owners = owned.pop(key, None)
            if owners is None:
                continue
            _clear_bit(table, key, 1 << slot)
            if group == DENSE and (waiting := self._waiting.get((slot, key))):  # of an answer cut off there may be more
                self._fulfilled += [number for number in waiting if self._entries[number].has_ended]

    def settle(self) -> None:
        """A batch of events has been applied whole: promises that it should have confirmed and did not are void."""
        for number in self._fulfilled:
            if number in self._entries:
                self._remove(number)
        self._fulfilled.clear()

    def end(self, ticket: Ticket) -> None:
        """The request has ended; its events may still be under way."""
        if ticket.number in self._entries:
            self._entries[ticket.number].has_ended = True

    def drop(self, ticket: Ticket) -> None:
        """Take back what ``add`` entered, as far as it still stands."""
        self.outgrown(ticket)
        if ticket.number in self._entries:
            self._remove(ticket.number)

    def forget_ended(self, slot: int) -> None:
        """The rank's cache was emptied: what ended requests left is gone, what running ones will store is not."""
        for number in [number for number in self._by_slot.get(slot, ()) if self._entries[number].has_ended]:
            self._remove(number)

    def forget(self, slot: int) -> None:
        """The rank is gone: nothing is promised of the slot, and open tickets are void."""
        self._expected.pop(slot, None)
        for number in list(self._by_slot.get(slot, ())):
            self._remove(number)

    def _remove(self, number: int) -> None:
        entry = self._entries.pop(number)
        siblings = self._by_slot[entry.slot]
        siblings.remove(number)
        if not siblings:
            del self._by_slot[entry.slot]
        if entry.last is not None:
            waiting = self._waiting[entry.slot, entry.last]
            del waiting[number]
            if not waiting:
                del self._waiting[entry.slot, entry.last]
        for group, keys in entry.keys.items():
            table, owned = self._table(group), self._owners[entry.slot, group]
            for key in keys:
                owners = owned.get(key)
                if owners is None or number < owners >> _COUNT_BITS:  # confirmed since
                    continue
                if owners & _COUNT > 1:
                    owned[key] = owners - 1
                else:
                    del owned[key]
                    _clear_bit(table, key, 1 << entry.slot)

    def _table(self, group: int) -> dict[int, int]:
        return self.dense if group == DENSE else self.sparse.setdefault(group, {})


def _clear_bit(table: dict[int, int], key: int, bit: int) -> None:
    mask = table.get(key, 0) & ~bit
    if mask:
        table[key] = mask
    else:
        table.pop(key, None)
