"""Requests that wait to be admitted, in the order in which they came.

Those that may go to the same ranks stand in one line. The first of each line has a claim to its ranks before all who
came later, whatever line these stand in; ranks that no older one wants are open to whoever comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.core.types import FleetView, Handover, RouteRequest
from router.core.ways import Ways

#: What decides to which ranks a request may go, but for a home that is drained.
_Kind = tuple[str, frozenset[Handover], frozenset[int]]


@dataclass(slots=True, eq=False)
class Line:
    """By ticket. ``overtaken_tokens``: what of the room that its first waits for has been given to later ones."""

    waiting: OrderedDict[int, RouteRequest] = field(default_factory=OrderedDict)
    overtaken_tokens: int = 0

    @property
    def head(self) -> int:
        """The ticket of its first."""
        return next(iter(self.waiting))


class Claim(NamedTuple):
    """What the first of a line waits for."""

    ticket: int
    line: Line
    ways: Ways
    slots: frozenset[int]


class Queue:
    """All lines."""

    def __init__(self) -> None:
        self._lines: dict[_Kind, Line] = {}
        self._line_of: OrderedDict[int, Line] = OrderedDict()
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._line_of)

    @property
    def heads(self) -> Sequence[int]:
        """The tickets of the first of each line."""
        return [line.head for line in self._lines.values()]

    @property
    def models(self) -> frozenset[str]:
        """For which somebody waits."""
        return frozenset(model for model, *_ in self._lines)

    def requests(self) -> Iterator[RouteRequest]:
        """All that wait."""
        return (request for line in self._lines.values() for request in line.waiting.values())

    def position(self, ticket: int) -> int | None:
        """Place among all who wait, 1 for the oldest; None if it does not wait."""
        return next((place for place, queued in enumerate(self._line_of, start=1) if queued == ticket), None)

    def join(self, request: RouteRequest) -> int:
        """It waits from now on, under the ticket returned."""
        self._tickets += 1
        line = self._lines.setdefault(_kind(request), Line())
        line.waiting[self._tickets] = request
        self._line_of[self._tickets] = line
        return self._tickets

    def renew(self, ticket: int, request: RouteRequest) -> None:
        """The same request as of now. Unknown tickets are no error."""
        if (line := self._line_of.get(ticket)) is not None:
            line.waiting[ticket] = request

    def leave(self, ticket: int) -> None:
        """It waits no longer. Unknown tickets are no error."""
        line = self._line_of.pop(ticket, None)
        if line is None:
            return
        if ticket == line.head:
            line.overtaken_tokens = 0
        request = line.waiting.pop(ticket)
        if not line.waiting:
            del self._lines[_kind(request)]

    def claims(self, view: FleetView, *, closed: frozenset[int]) -> Sequence[Claim]:
        """One for each line, the oldest first; ranks that are ``closed`` as in ``Ways``."""
        found = []
        for line in self._lines.values():
            ticket, request = next(iter(line.waiting.items()))
            ways = Ways.open(view, request, closed=closed)
            found.append(Claim(ticket, line, ways, ways.slots))
        return sorted(found, key=lambda claim: claim.ticket)


def wanted(claims: Iterable[Claim]) -> frozenset[int]:
    """The ranks that somebody claims."""
    return frozenset().union(*(claim.slots for claim in claims))


def _kind(request: RouteRequest) -> _Kind:
    return request.model, request.handovers, request.exclude
