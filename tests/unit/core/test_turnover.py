"""How long a queue is expected to take."""

from __future__ import annotations

from router.core.turnover import Turnover


def test_a_queue_takes_as_long_as_those_before_took() -> None:
    """One let go every two seconds: ten take twenty; the idle hour between two queues does not count."""
    turnover = Turnover()
    turnover.begin(now=100.0)
    for place in range(1, 6):
        turnover.passed(now=100.0 + 2 * place)
    assert turnover.wait_seconds(10, now=110.0) == 20

    turnover.begin(now=3700.0)
    turnover.passed(now=3702.0)
    assert turnover.wait_seconds(10, now=3702.0) == 20


def test_a_queue_that_stands_still_takes_ever_longer() -> None:
    """Nobody was let go for a minute, so the first of three takes as long again; but nobody is sent away for hours."""
    turnover = Turnover()
    turnover.begin(now=0.0)
    assert turnover.wait_seconds(1, now=0.0) == 1
    assert turnover.wait_seconds(3, now=60.0) == 180
    assert turnover.wait_seconds(1000, now=60.0) == 600


def test_where_nobody_ever_waits_nothing_is_known() -> None:
    """A door without a queue refuses at once: come again in a second, whatever the clock says."""
    assert Turnover().wait_seconds(1, now=1_000_000.0) == 1
