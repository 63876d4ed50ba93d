"""Promises against a set of tickets for each block, without anything clever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.provisional import DENSE, Provisional, Ticket

KEYS = st.lists(st.integers(0, 5), max_size=4, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 1), KEYS, KEYS),
        st.tuples(st.just("confirm"), st.integers(0, 1), st.sampled_from([DENSE, 3]), KEYS),
        st.tuples(st.just("drop"), st.integers(0, 30), st.none(), st.none()),
        st.tuples(st.just("end"), st.integers(0, 30), st.none(), st.none()),
        st.tuples(st.just("settle"), st.none(), st.none(), st.none()),
    ),
    max_size=30,
)


class Plain:
    """Who promises what."""

    def __init__(self) -> None:
        self.owners: defaultdict[tuple[int, int, int], set[Ticket]] = defaultdict(set)
        self.last: dict[Ticket, int] = {}
        self.ended: set[Ticket] = set()
        self.fulfilled: set[Ticket] = set()

    def add(self, ticket: Ticket, promised: dict[int, Sequence[int]]) -> None:
        for group, keys in promised.items():
            for key in keys:
                self.owners[ticket.slot, group, key].add(ticket)
        if promised[DENSE]:
            self.last[ticket] = promised[DENSE][-1]

    def confirm(self, slot: int, group: int, keys: Sequence[int]) -> None:
        """With a promise's last block at the end of an event it is fulfilled; inside one if its request has ended."""
        waiting = {ticket: last for ticket, last in self.last.items() if group == DENSE and ticket.slot == slot}
        for at, key in enumerate(keys, 1):
            was_promised = self.owners.pop((slot, group, key), set())
            self.fulfilled |= {
                ticket
                for ticket, last in waiting.items()
                if last == key and (at == len(keys) or (was_promised and ticket in self.ended))
            }

    def settle(self) -> None:
        for ticket in self.fulfilled:
            self.drop(ticket)
        self.fulfilled.clear()

    def drop(self, ticket: Ticket) -> None:
        self.last.pop(ticket, None)
        for owners in self.owners.values():
            owners.discard(ticket)

    def mask(self, group: int) -> dict[int, int]:
        masks: defaultdict[int, int] = defaultdict(int)
        for (slot, owned, key), owners in self.owners.items():
            if owned == group and owners:
                masks[key] |= 1 << slot
        return dict(masks)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_a_block_is_promised_as_long_as_one_ticket_promises_it(steps: list[Any]) -> None:
    """However many share it, whatever is confirmed between, and in whichever order they are dropped."""
    provisional, plain = Provisional(), Plain()
    tickets: list[Ticket] = []
    for what, slot, other, keys in steps:
        match what:
            case "add":
                promised: dict[int, Sequence[int]] = {DENSE: other, 3: keys}
                tickets.append(provisional.add(slot, promised))
                plain.add(tickets[-1], promised)
            case "confirm":
                provisional.confirm(slot, other, keys)
                plain.confirm(slot, other, keys)
            case "drop" if slot < len(tickets):
                provisional.drop(tickets[slot])
                plain.drop(tickets[slot])
            case "end" if slot < len(tickets):
                provisional.end(tickets[slot])
                plain.ended.add(tickets[slot])
            case "settle":
                provisional.settle()
                plain.settle()
        assert provisional.dense == plain.mask(DENSE)
        assert provisional.sparse.get(3, {}) == plain.mask(3)
