"""A rank that is drained: who leaves it with a turn, and who stays for one more."""

from __future__ import annotations

from router.core.draining import Departures
from router.core.load import Claim, LoadBook
from router.core.types import FleetView, RankId, RankPace, RankStatus, RankView, RouteRequest, Trust

BOOK = LoadBook()


def fleet(*statuses: RankStatus) -> FleetView:
    pace = RankPace(token_seconds=0.001, attention_seconds=0.0)
    return FleetView(
        tuple(
            RankView(slot, RankId("w", slot), frozenset({"m"}), status, BOOK.load(slot), pace, Trust())
            for slot, status in enumerate(statuses)
        )
    )


def sent(slot: int) -> Claim:
    return BOOK.open(slot, prompt_tokens=10, prefill_tokens=10, seconds=1.0, now=0.0)


def at(home: int | None, *, prefill_home: int | None = None) -> RouteRequest:
    return RouteRequest(model="m", prompt_tokens=10, output_tokens=1, home=home, prefill_home=prefill_home)


VIEW = fleet(RankStatus.READY, RankStatus.DRAINING, RankStatus.DRAINING)


def test_only_a_draining_rank_is_left() -> None:
    """Who is at home elsewhere, or nowhere, goes as ever."""
    assert Departures().leaving(at(0), VIEW) is None
    assert Departures().leaving(at(None), VIEW) is None
    assert Departures().leaving(at(1), VIEW) == at(None)


def test_one_after_another() -> None:
    """While one waits for its first token elsewhere, others stay; those of another rank do not wait for it."""
    departures = Departures()
    claim = sent(0)
    departures.left(at(1), at(None), claim)

    assert departures.leaving(at(1), VIEW) is None
    assert departures.leaving(at(2), VIEW) == at(None)
    BOOK.first_byte(claim, now=1.0)
    assert departures.leaving(at(1), VIEW) == at(None)


def test_one_that_fails_holds_nobody_up() -> None:
    """It ended without a first token."""
    departures = Departures()
    claim = sent(0)
    departures.left(at(1), at(None), claim)
    BOOK.close(claim, now=1.0)

    assert departures.leaving(at(1), VIEW) == at(None)


def test_either_rank_of_a_pair_may_be_left() -> None:
    """The prefill rank drains, the decode rank does not; the other is kept."""
    departures = Departures()
    before = at(0, prefill_home=1)
    after = departures.leaving(before, VIEW)

    assert after == at(0)
    departures.left(before, after, sent(0))
    assert departures.leaving(before, VIEW) is None
    assert departures.leaving(at(0, prefill_home=2), VIEW) == at(0)
