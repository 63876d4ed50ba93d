"""Rings of ranks are made once for each set of them, and no more are kept than are in use."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from router.core.policy import Places, SessionHash
from router.core.ring import Ring
from router.core.types import FleetView, RouteRequest, SessionKey
from tests.fakes.rank_views import rank_view


def request(*, session: SessionKey, model: str = "m") -> RouteRequest:
    return RouteRequest(model, prompt_tokens=1000, output_tokens=10, session=session)


def test_ranks_of_several_models_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To place ranks on a ring takes ten thousand times as long as to find a session there."""
    made: list[frozenset[str]] = []

    class Counted(Ring):
        def __init__(self, names: Iterable[str]) -> None:
            super().__init__(names)
            made.append(frozenset(names))

    monkeypatch.setattr("router.core.policy.Ring", Counted)
    ranks = [rank_view(slot, models=frozenset({"m", "adapter"} if slot < 4 else {"other"})) for slot in range(8)]
    view, policy = FleetView(ranks=tuple(ranks)), SessionHash()
    for number in range(100):
        session = SessionKey("t", f"s{number}")
        for model in ("m", "other", "adapter"):
            assert policy(view, request(model=model, session=session), random.Random(0), 0.0) is not None

    assert made == [{f"w/{slot}" for slot in range(4)}, {f"w/{slot}" for slot in range(4, 8)}]


def test_places_of_ranks_that_have_gone_are_forgotten() -> None:
    """However often the fleet changes."""
    places = Places()
    for gone in range(100):
        ranks = tuple(rank_view(slot) for slot in range(100) if slot != gone)
        places.first(FleetView(ranks=ranks), ranks, request(session=SessionKey("t", "s")))

    assert len(places) <= 16
