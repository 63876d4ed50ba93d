"""How many requests are under way at once, and who waits for a place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from router.core.fair_queue import FairQueue, Priority
from router.core.turnover import Turnover
from router.errors import TooManyRequests


class Waiter:
    """One who waits for a place. ``go`` or ``late`` is called once, ``leave`` ends the waiting without either."""

    __slots__ = ("_gate", "_go", "_late", "_ticket", "_timer")

    def __init__(self, gate: Gate, go: Callable[[], None], late: Callable[[TooManyRequests], None]) -> None:
        self._gate = gate
        self._go = go
        self._late = late
        self._ticket = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, ticket: int, loop: asyncio.AbstractEventLoop, *, seconds: float) -> None:
        """The waiting begins."""
        self._ticket = ticket
        self._timer = loop.call_later(seconds, self._expire)

    def go(self) -> None:
        """A place has been taken for this one."""
        self._stop()
        self._go()

    def leave(self) -> None:
        """Wait no longer."""
        self._stop()
        self._gate.forget(self._ticket)

    def give_way(self, error: TooManyRequests) -> None:
        """This one is out of the queue, for another who has a better claim."""
        self._stop()
        self._late(error)

    def _expire(self) -> None:
        self.leave()
        seconds = self._gate.wait_seconds()
        self._late(refusal("The request waited too long for its turn.", code="queue_timeout", seconds=seconds))

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Gate:
    """Places for ``max_inflight`` requests and a queue of ``max_queued`` before them."""

    def __init__(
        self,
        *,
        max_inflight: int,
        max_queued: int,
        queue_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_inflight = max_inflight
        self._max_queued = max_queued
        self._queue_seconds = queue_seconds
        self._clock = clock
        self._inflight = 0
        self._queue: FairQueue[Waiter] = FairQueue()
        self._turnover = Turnover()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def enter(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        tenant: str,
        priority: Priority,
        go: Callable[[], None],
        late: Callable[[TooManyRequests], None],
    ) -> Waiter | None:
        """Take a place: None. Or wait for one: ``go`` is called with the place taken, ``late`` if it takes too long.

        Whoever has a place gives it up by ``leave``. When the queue is full, one who waits gives way to who is more
        urgent, or of a tenant that has fewer there; else this raises ``TooManyRequests``.
        """
        if self._inflight < self._max_inflight:
            self._inflight += 1
            return None
        yielding: Waiter | None = None
        if len(self._queue) >= self._max_queued:
            yielding = self._queue.give_way(tenant=tenant, priority=priority)
            if yielding is None:
                raise self._full()
        if not self._queue:
            self._turnover.begin(now=self._clock())
        waiter = Waiter(self, go, late)
        waiter.begin(self._queue.add(waiter, tenant=tenant, priority=priority), loop, seconds=self._queue_seconds)
        if yielding is not None:
            yielding.give_way(self._full())
        return waiter

    def _full(self) -> TooManyRequests:
        message = "The router has as many requests as it may have."
        return refusal(message, code="queue_full", seconds=self.wait_seconds())

    def leave(self) -> None:
        """A place is free: the next one has it, unless more than should have come back."""
        waiter = self._queue.pop() if self._inflight <= self._max_inflight else None
        if waiter is None:
            self._inflight -= 1
        else:
            self._turnover.passed(now=self._clock())
            waiter.go()

    def come_back(self) -> None:
        """Who gave its place up while it could not use it has one again: it has waited its turn."""
        self._inflight += 1

    def wait_seconds(self) -> int:
        """What one who comes now would wait."""
        return self._turnover.wait_seconds(len(self._queue) + 1, now=self._clock())

    def forget(self, ticket: int) -> None:
        """This one waits no longer."""
        self._queue.remove(ticket)


def refusal(message: str, *, code: str, seconds: int) -> TooManyRequests:
    """A 429 that says after how many seconds to come again."""
    error = TooManyRequests(message, code=code)
    error.retry_after_seconds = seconds
    return error
