"""A deadline that moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.proxy.watchdog import LONG_READING_SECONDS, READING_SECONDS, Watchdog


class FakeHandle:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """Time that is turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None], FakeHandle]] = []
        self.made = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> FakeHandle:
        self.made += 1
        handle = FakeHandle()
        self.timers.append((when, callback, handle))
        return handle

    def turn(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= end and not timer[2].cancelled]:
            timer = min(due, key=lambda item: item[0])
            self.timers.remove(timer)
            self.now = max(self.now, timer[0])
            timer[1]()
        self.now = end


def watchdog(loop: FakeLoop, fired: list[float]) -> Watchdog:
    return Watchdog(loop, lambda: fired.append(loop.now))  # type: ignore[arg-type]


STEPS = st.lists(st.tuples(st.sampled_from(["set", "clear", "wait"]), st.integers(1, 20)), max_size=30)


@given(STEPS)
def test_fires_when_the_last_deadline_set_has_passed(steps: list[tuple[str, int]]) -> None:
    """However deadlines are moved, it fires a moment after those that were reached."""
    loop, fired = FakeLoop(), []
    it = watchdog(loop, fired)
    expected: list[float] = []
    deadline: float | None = None
    for step, seconds in [*steps, ("wait", 50)]:
        if step == "set":
            it.set(seconds)
            deadline = loop.now + seconds + READING_SECONDS
        elif step == "clear":
            it.clear()
            deadline = None
        else:
            if deadline is not None and deadline <= loop.now + seconds:
                expected.append(deadline)
                deadline = None
            loop.turn(seconds)
    assert fired == expected


@pytest.mark.parametrize(("late", "reading"), [(0.0, READING_SECONDS), (5.0, LONG_READING_SECONDS)])
def test_a_loop_that_did_not_run_looks_at_what_has_come_first(late: float, reading: float) -> None:
    """Once: what has not come by then is late."""
    loop, fired = FakeLoop(), []
    it = watchdog(loop, fired)
    for _ in range(2):
        it.set(10)
        loop.now += 10 + late
        loop.turn(0.9 * reading)
        assert fired == []
    loop.turn(0.2 * reading)
    assert len(fired) == 1


def test_moving_a_deadline_later_makes_no_timer() -> None:
    """A thousand requests on a connection cost one timer."""
    loop, fired = FakeLoop(), []
    it = watchdog(loop, fired)
    for _ in range(1000):
        it.set(10)
        loop.now += 0.001
    assert loop.made == 1


async def test_stopped_for_good() -> None:
    """After stop nothing fires and no timer is left."""
    fired: list[bool] = []
    it = Watchdog(asyncio.get_running_loop(), lambda: fired.append(True))
    it.set(0.01)
    it.stop()
    await asyncio.sleep(0.03)
    assert not fired
