"""Who is next: the most urgent first, among equals one of each tenant in turn, each tenant's own in order."""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum
from typing import Generic, TypeVar

T = TypeVar("T")


class Priority(IntEnum):
    """How urgent a request is; the lowest goes first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class FairQueue(Generic[T]):
    """Items that wait. A tenant that has just been served goes behind all others of its priority."""

    def __init__(self) -> None:
        self._lines: dict[Priority, OrderedDict[str, OrderedDict[int, T]]] = {
            priority: OrderedDict() for priority in Priority
        }
        self._places: dict[int, tuple[Priority, str]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, item: T, *, tenant: str, priority: Priority) -> int:
        """Join the queue. The ticket is for ``remove``."""
        self._tickets += 1
        self._lines[priority].setdefault(tenant, OrderedDict())[self._tickets] = item
        self._places[self._tickets] = (priority, tenant)
        return self._tickets

    def pop(self) -> T | None:
        """The next one, None when nobody waits."""
        for line in self._lines.values():
            if line:
                tenant, items = line.popitem(last=False)
                ticket, item = items.popitem(last=False)
                del self._places[ticket]
                if items:
                    line[tenant] = items
                return item
        return None

    def give_way(self, *, tenant: str, priority: Priority) -> T | None:
        """Who leaves a full queue for one who comes: the last of the least urgent, of the tenant that has most of them.

        Taken from the queue; None where nobody is less urgent, nor any tenant two ahead among equals.
        """
        lowest = max((urgency for urgency, line in self._lines.items() if line), default=priority)
        if lowest < priority:
            return None
        line = self._lines[lowest]
        most = max(line, key=lambda name: len(line[name]), default=None)
        if most is None or (lowest == priority and len(line[most]) < len(line.get(tenant, ())) + 2):
            return None
        ticket = next(reversed(line[most]))
        item = line[most][ticket]
        self.remove(ticket)
        return item

    def remove(self, ticket: int) -> None:
        """Wait no longer. A ticket that waits no more is no error."""
        place = self._places.pop(ticket, None)
        if place is not None:
            priority, tenant = place
            items = self._lines[priority][tenant]
            del items[ticket]
            if not items:
                del self._lines[priority][tenant]
