"""Admission with a clock in hand; pools of 1,000 tokens, of which charges may fill 900: sums can be read off."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.core.admission import (
    Admission,
    AdmissionParameters,
    Admit,
    Hold,
    Released,
    Visit,
)
from router.core.admission_guard import Guard
from router.core.load import LoadBook
from router.core.types import FleetView, RouteRequest, SessionKey
from tests.fakes.rank_views import rank_view


def fleet(ranks: int, *, pool_tokens: int = 1000) -> FleetView:
    book = LoadBook()
    return FleetView(
        tuple(
            rank_view(
                slot,
                load=book.load(slot),
                pool_tokens=pool_tokens,
            )
            for slot in range(ranks)
        )
    )


def ask(
    name: str,
    tokens: int,
    *,
    agent: str = "",
    cached: dict[int, int] | None = None,
    loadable: dict[int, int] | None = None,
) -> RouteRequest:
    return RouteRequest(
        model="m",
        prompt_tokens=tokens,
        output_tokens=0,
        reusable_tokens=cached or {},
        loadable_tokens=loadable or {},
        session=SessionKey("", name, agent),
    )


def teach(guard: Guard, model: str, *, comes_back: bool, now: float) -> None:
    """Four hundred conversations of the model leave at ``now``, and come back at once or not at all."""
    for number in range(400):
        conversation = (model, SessionKey("", f"{model}{number}"))
        guard.left(conversation, now=now)
        if comes_back:
            guard.arrived(conversation, now=now)


class AlwaysHold(Guard):
    """A guard that is never persuaded."""

    def decide(self, model: str, *, now: float) -> bool:
        return True


class Desk:
    """An admission with the steps that a data plane takes."""

    def __init__(self, view: FleetView, guard: Guard | None = None) -> None:
        self.view = view
        self.admission = Admission(
            AdmissionParameters(budget_ratio=0.9, least_idle_seconds=60.0, most_idle_seconds=60.0), guard
        )

    def offer(self, request: RouteRequest, *, now: float = 0.0) -> Admit | Hold:
        return self.admission.offer(request, self.view, now=now)

    def send(self, request: RouteRequest, *, now: float = 0.0) -> Visit:
        """Offered, admitted, and sent to the first slot that is open to it."""
        admit = self.offer(request, now=now)
        assert isinstance(admit, Admit), admit
        return self.start(request, min(admit.slots or {0}), allowed=admit.slots, now=now)

    def start(
        self, request: RouteRequest, slot: int, *, allowed: frozenset[int] | None = None, now: float = 0.0
    ) -> Visit:
        """Sent there, as the data plane does it: with the slots that were left open."""
        return self.admission.start(msgspec.structs.replace(request, allowed=allowed), slot, self.view, now=now)

    def turn(self, request: RouteRequest, *, now: float = 0.0) -> None:
        """Sent, and over at once."""
        visit = self.send(request, now=now)
        self.admission.finish(visit, now=now)

    def release(self, *, now: float) -> Released | None:
        return self.admission.release(self.view, now=now)


class Ledger:
    """What an engine would have to hold, kept from the admissions alone: a list a conversation and rank."""

    def __init__(self) -> None:
        self.flying: dict[tuple[str, int], list[tuple[int, int]]] = {}  # whole, and found in those before
        self.left: dict[tuple[str, int], list[int]] = {}
        self.since: dict[tuple[str, int], float] = {}

    def tokens(self, slot: int, *, now: float, but: str = "") -> int:
        """Of all that fly or have been idle for a minute at most."""
        keys = {*self.flying, *self.left}
        return sum(
            max(self._flying_tokens(key), *self.left.get(key, [0])[-4:], 0)
            for key in keys
            if key[1] == slot and key[0] != but and (self.flying.get(key) or now - self.since.get(key, -1e9) <= 60)
        )

    def _flying_tokens(self, key: tuple[str, int]) -> int:
        total = 0
        for tokens, found in self.flying.get(key, ()):
            total += max(tokens - found, tokens - total)
        return total

    def sent(self, name: str, slots: Sequence[int], tokens: int, *, now: float, found: Sequence[int] = ()) -> None:
        """To one rank, or to a pair; so many are ``found`` in what flies there."""
        for slot in slots:
            if not self.flying.get((name, slot)) and now - self.since.get((name, slot), now) > 60:
                self.left.pop((name, slot), None)  # who comes back later may have lost its place
        for key in [key for key in self.left if key[0] == name and key[1] not in slots and not self.flying.get(key)]:
            if tokens >= 0.7 * max(self.left[key][-4:]):
                del self.left[key]
        for number, slot in enumerate(slots):
            self.flying.setdefault((name, slot), []).append((tokens, found[number] if found else 0))

    def ended(self, name: str, slot: int, tokens: int, *, now: float, is_kept: bool, found: int = 0) -> None:
        self.flying[name, slot].remove((tokens, found))
        if is_kept:
            self.left.setdefault((name, slot), []).append(tokens)
        self.since[name, slot] = now
