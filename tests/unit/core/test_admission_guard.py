"""When holding is of use, as the guard learns it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from router.core.admission import (
    Admit,
    Hold,
    Passage,
)
from router.core.admission_guard import Guard
from router.core.by_model import ByModel
from router.core.returns import Returns
from router.core.types import FleetView, RouteRequest, SessionKey
from tests.fakes.admission_desk import Desk, ask, fleet, teach


def test_traffic_that_does_not_come_back_is_not_held() -> None:
    """Forty conversations of one request each, one a second: the guard gives up on them after half a minute."""
    desk = Desk(fleet(1, pool_tokens=100_000))
    for second in range(60):
        desk.turn(ask(f"once{second}", 1000), now=float(second))

    assert desk.admission.guard.return_ratio("m") < Guard.RETURN_OFF
    assert not desk.admission.guard.is_on("m")
    assert not desk.admission.guard.is_any_on
    desk.turn(ask("large", 89_000), now=60.0)
    assert desk.offer(ask("beside", 89_000), now=60.0) == Admit(Passage.OFF)


def test_conversations_that_come_back_keep_the_guard_on() -> None:
    """Ten conversations that ask every ten seconds for ten minutes."""
    guard = Guard()
    for second in range(600):
        conversation = ("m", SessionKey("", f"s{second % 10}"))
        guard.arrived(conversation, now=float(second))
        guard.left(conversation, now=second + 0.5)

    assert guard.decide("m", now=600.0)
    assert guard.return_ratio("m") == 1.0


def test_the_guard_waits_for_evictions_and_forgets_them() -> None:
    """No verdict before the pools were filled once, nor while requests are held; then 2 % is little, 20 % enough."""
    guard = Guard()
    learn = {"tokens": 100, "pool_tokens": 1000, "now": 0.0}
    for _ in range(10):
        guard.computed("m", **learn, evicted_tokens=0, is_holding=False)  # type: ignore[arg-type]
    guard.computed("m", **learn, evicted_tokens=0, is_holding=True)  # type: ignore[arg-type]
    assert guard.evicted_ratio("m") == 1.0
    assert guard.decide("m", now=0.0)

    guard.computed("m", **learn, evicted_tokens=2, is_holding=False)  # type: ignore[arg-type]
    assert guard.evicted_ratio("m") == 0.02
    assert not guard.decide("m", now=0.0)
    guard.computed("m", **learn, evicted_tokens=38, is_holding=False)  # type: ignore[arg-type]
    assert guard.evicted_ratio("m") == 0.2
    assert guard.decide("m", now=0.0)
    guard.computed("m", tokens=100, evicted_tokens=0, pool_tokens=1000, is_holding=False, now=120.0)
    assert guard.evicted_ratio("m") == 20 / (100 + 100)


def test_what_outgrew_the_ranks_while_the_guard_was_off_is_shed() -> None:
    """Off, 600 idle, then 500 and 400 in flight, are charged to 900: the idle one and the newest lose their place."""
    guard = Guard()
    teach(guard, "m", comes_back=False, now=-20.0)
    assert not guard.decide("m", now=0.0)
    desk = Desk(fleet(1), guard)
    desk.turn(ask("idle", 600))
    desk.send(ask("older", 500))
    desk.send(ask("newer", 450))
    teach(guard, "m", comes_back=True, now=0.0)

    assert isinstance(desk.offer(ask("idle", 600), now=1.0), Hold)
    assert desk.admission.charged_tokens(0) == 500
    assert isinstance(desk.offer(ask("older", 500), now=1.0), Admit)
    assert isinstance(desk.offer(ask("newer", 450), now=1.0), Hold)


def chat(returns: Returns, names: list[str], *, since: float, seconds: int, period: int) -> None:
    """Each asks every ``period`` seconds, for half a second."""
    for second in range(0, seconds, period):
        for name in names:
            conversation = ("m", SessionKey("", name))
            returns.arrived(conversation, now=since + second)
            returns.left(conversation, now=since + second + 0.5)


def ask_once(returns: Returns, *, since: float, seconds: int, rate: int, agents: int = 0) -> None:
    """So many different questions a second, beside so many agents that ask every four seconds."""
    for second in range(seconds):
        now = since + second
        if second % 4 == 0:
            chat(returns, [f"agent{number}" for number in range(agents)], since=now, seconds=1, period=1)
        for number in range(rate):
            returns.left(("m", SessionKey("", f"once{now}-{number}")), now=now + 0.5)


def test_questions_asked_once_say_nothing_of_the_agents_beside_them() -> None:
    """Four agents ask once a second together, beside twenty questions a second: one of 21 comes back, and each agent.
    A quarter of an hour after the last agent holding is of no use any more."""
    returns = Returns()
    guard = Guard(returns)
    ask_once(returns, since=0.0, seconds=600, rate=20, agents=4)
    assert guard.decide("m", now=600.0)
    assert returns.ratio("m") < 0.06
    assert guard.return_ratio("m") > 0.9

    ask_once(returns, since=600.0, seconds=900, rate=20)
    assert not guard.decide("m", now=1500.0)


def test_who_always_comes_back_late_does_not_come_back_soon() -> None:
    """Thirty readers with a minute between their messages: known as such, and of no use to hold for."""
    returns = Returns()
    guard = Guard(returns)
    chat(returns, [f"reader{number}" for number in range(30)], since=0.0, seconds=600, period=60)

    assert not guard.decide("m", now=620.0)
    assert guard.return_ratio("m") < 0.05


def test_few_agents_are_not_believed_at_once() -> None:
    """Of forty questions none comes back; one conversation does, thrice within seconds, and then never again: of its
    second, third and last departure two were followed by more, beside 5 at 10 fading returns of as many and 41 more."""
    returns = Returns()
    for number in range(40):
        returns.left(("m", SessionKey("", f"once{number}")), now=0.0)
    returns.give_up(now=20.0)
    chat(returns, ["agent"], since=20.0, seconds=4, period=1)
    returns.give_up(now=40.0)

    fade = 0.5 ** (1 / 200)
    returned = departed = 10.0
    for came in [0] * 40 + [1, 1, 1, 0]:
        returned, departed = returned * fade + came, departed * fade + 1
    faded = [0.5 ** ((40.0 - at) / 120.0) for at in (22.0, 23.0, 40.0)]
    again = (faded[0] + faded[1] + 5 * returned / departed) / (sum(faded) + 5)
    assert returns.ratio("m") == pytest.approx(returned / departed)
    assert returns.again_ratio("m") == pytest.approx(again)


def test_of_very_many_conversations_those_that_left_first_are_not_known_again() -> None:
    """Three are remembered: b, which left before c, a and d last did, comes back as a new one, and its next departure
    is like any; a is known."""

    class Few(Returns):
        MOST_REMEMBERED = 3

    returns = Few()
    a, b, c, d = (("m", SessionKey("", name)) for name in "abcd")
    for conversation in (a, b, c, a, d):
        returns.left(conversation, now=0.0)
    returns.give_up(now=20.0)
    returns.arrived(b, now=20.0)
    returns.left(b, now=20.0)
    returns.arrived(a, now=20.0)
    returns.give_up(now=40.0)
    assert returns.again_ratio("m") == returns.ratio("m") < 1.0

    returns.left(a, now=40.0)
    returns.arrived(a, now=40.0)
    assert returns.again_ratio("m") > returns.ratio("m")


def of(model: str, name: str, tokens: int) -> RouteRequest:
    return msgspec.structs.replace(ask(name, tokens), model=model)


@pytest.mark.parametrize("rate", [0, 1, 10])
def test_what_does_not_come_back_at_one_model_holds_no_agents_of_another_back(rate: int) -> None:
    """Eight agents of 60,000 tokens share a pool of 100,000 on a's rank, b has room for all of ``rate`` new requests a
    second: holding goes off for b alone, and a is never filled beyond the one that takes the rank for itself."""
    view = fleet(2, pool_tokens=100_000)
    ranks = [replace(rank, models=frozenset({model})) for rank, model in zip(view.ranks, "ab", strict=True)]
    desk = Desk(FleetView(tuple(ranks)))
    guard, most_tokens = desk.admission.guard, 0
    for second in range(120):
        for number in range(rate):
            once = of("b", f"once{second}-{number}", 100)
            if isinstance(offered := desk.offer(once, now=float(second)), Hold):
                desk.admission.cancel(offered.ticket)
            else:
                desk.admission.finish(desk.start(once, 1, now=float(second)), now=float(second))
        for agent in (f"agent{number}" for number in range(8) if second % 4 == 0):
            if isinstance(offered := desk.offer(of("a", agent, 60_000), now=float(second)), Hold):
                desk.admission.cancel(offered.ticket)
                continue
            desk.admission.finish(desk.start(of("a", agent, 60_000), 0, now=float(second)), now=second + 0.5)
            most_tokens = max(most_tokens, desk.admission.charged_tokens(0))

    assert guard.is_on("a")
    assert guard.is_on("b") == (not rate)
    assert guard.is_any_on
    assert most_tokens == 60_000


def test_requests_held_for_one_model_hide_nothing_of_another() -> None:
    """While a request for a waits, 1,000 tokens are computed on each rank, of which half had been before: that tells of
    b, whose rank of 950 serves b alone; of a it does not, nor of c, which shares a's rank."""
    view = fleet(2)
    ranks = [
        replace(rank, models=frozenset(models), pool_tokens=pool_tokens)
        for rank, models, pool_tokens in zip(view.ranks, ("ac", "b"), (100, 950), strict=True)
    ]
    desk = Desk(FleetView(tuple(ranks)))
    desk.start(of("a", "full", 90), 0)
    assert isinstance(desk.offer(of("a", "waits", 90)), Hold)
    for model, slot in (("a", 0), ("b", 1), ("c", 0)):
        visit = desk.start(of(model, f"{model}1", 1000), slot)
        desk.admission.finish(visit, now=1.0, cached_tokens=0, ideal_tokens=500)

    assert [desk.admission.guard.evicted_ratio(model) for model in "abc"] == [1.0, 0.5, 1.0]


def test_what_outgrew_the_ranks_of_other_models_is_left() -> None:
    """Off for both models each rank of 1,000 was charged to 1,200. Holding begins for a, whose newest loses its place;
    b's keeps it."""
    guard = Guard()
    view = fleet(2)
    ranks = [replace(rank, models=frozenset({model})) for rank, model in zip(view.ranks, "ab", strict=True)]
    desk = Desk(FleetView(tuple(ranks)), guard)
    for slot, model in enumerate("ab"):
        teach(guard, model, comes_back=False, now=-20.0)
        assert not guard.decide(model, now=0.0)
        for name in ("older", "newer"):
            desk.start(of(model, name, 600), slot)
    teach(guard, "a", comes_back=True, now=0.0)

    assert isinstance(desk.offer(of("a", "next", 600), now=1.0), Hold)
    assert [desk.admission.charged_tokens(slot) for slot in (0, 1)] == [600, 1200]


def test_models_that_are_gone_are_forgotten() -> None:
    """One of which nothing was heard for an hour, and of very many the one heard of longest ago."""
    returns = Returns()
    guard = Guard(returns)
    for model in ("stays", "gone"):
        teach(guard, model, comes_back=False, now=0.0)
        assert not guard.decide(model, now=20.0)
    teach(guard, "stays", comes_back=False, now=2000.0)
    assert not guard.decide("stays", now=2020.0)
    teach(guard, "stays", comes_back=False, now=3700.0)
    assert not guard.decide("stays", now=3720.0)
    assert (guard.is_on("gone"), guard.is_on("stays")) == (True, False)
    assert returns.ratio("gone") == 1.0 > 0.1 > returns.ratio("stays")

    for number in range(ByModel.MOST_MODELS):
        teach_one = (f"model{number}", SessionKey("", "s"))
        guard.left(teach_one, now=3721.0)
        guard.decide(f"model{number}", now=3732.0)
    assert guard.is_on("stays")
    assert returns.ratio("stays") == 1.0
