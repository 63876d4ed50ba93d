"""When holding is of use, as the guard learns it."""

from __future__ import annotations

from router.core.admission import (
    Admit,
    Hold,
    Passage,
)
from router.core.admission_guard import Guard
from router.core.types import SessionKey
from tests.fakes.admission_desk import Desk, ask, fleet


def test_traffic_that_does_not_come_back_is_not_held() -> None:
    """Forty conversations of one request each, one a second: the guard gives up on them after half a minute."""
    desk = Desk(fleet(1, pool_tokens=100_000))
    for second in range(60):
        desk.turn(ask(f"once{second}", 1000), now=float(second))

    assert desk.admission.guard.return_ratio < Guard.RETURN_OFF
    assert not desk.admission.guard.on
    desk.turn(ask("large", 89_000), now=60.0)
    assert desk.offer(ask("beside", 89_000), now=60.0) == Admit(Passage.OFF)


def test_conversations_that_come_back_keep_the_guard_on() -> None:
    """Ten conversations that ask every ten seconds for ten minutes."""
    guard = Guard()
    for second in range(600):
        conversation = ("m", SessionKey("", f"s{second % 10}"))
        guard.arrived(conversation, now=float(second))
        guard.left(conversation, now=second + 0.5)

    assert guard.decide(now=600.0)
    assert guard.return_ratio == 1.0


def test_the_guard_waits_for_evictions_and_forgets_them() -> None:
    """No verdict before the pools were filled once, nor while requests are held; then 2 % is little, 20 % enough."""
    guard = Guard()
    learn = {"tokens": 100, "pool_tokens": 1000, "now": 0.0}
    for _ in range(10):
        guard.computed(**learn, evicted_tokens=0, is_holding=False)  # type: ignore[arg-type]
    guard.computed(**learn, evicted_tokens=0, is_holding=True)  # type: ignore[arg-type]
    assert guard.evicted_ratio == 1.0
    assert guard.decide(now=0.0)

    guard.computed(**learn, evicted_tokens=2, is_holding=False)  # type: ignore[arg-type]
    assert guard.evicted_ratio == 0.02
    assert not guard.decide(now=0.0)
    guard.computed(**learn, evicted_tokens=38, is_holding=False)  # type: ignore[arg-type]
    assert guard.evicted_ratio == 0.2
    assert guard.decide(now=0.0)
    guard.computed(tokens=100, evicted_tokens=0, pool_tokens=1000, is_holding=False, now=120.0)
    assert guard.evicted_ratio == 20 / (100 + 100)


def test_what_outgrew_the_ranks_while_the_guard_was_off_is_shed() -> None:
    """Off, 600 idle, then 500 and 400 in flight, are charged to 900: the idle one and the newest lose their place."""
    guard = Guard()
    guard.on = False
    guard._returns._departed = 1000.0
    desk = Desk(fleet(1), guard)
    desk.turn(ask("idle", 600))
    desk.send(ask("older", 500))
    desk.send(ask("newer", 450))
    guard._returns._departed = guard._returns._returned = 1000.0

    assert isinstance(desk.offer(ask("idle", 600), now=1.0), Hold)
    assert desk.admission.charged_tokens(0) == 500
    assert isinstance(desk.offer(ask("older", 500), now=1.0), Admit)
    assert isinstance(desk.offer(ask("newer", 450), now=1.0), Hold)
