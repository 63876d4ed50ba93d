"""How many requests are under way at once, and who waits for a place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.core.fair_queue import FairQueue, Priority
from router.errors import TooManyRequests

#: Told to those who are turned away: a place may be free by then.
_RETRY_AFTER_SECONDS = 1


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

    def _expire(self) -> None:
        self.leave()
        self._late(refusal("The request waited too long for its turn.", code="queue_timeout"))

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Gate:
    """Places for ``max_inflight`` requests and a queue of ``max_queued`` before them."""

    def __init__(self, *, max_inflight: int, max_queued: int, queue_seconds: float) -> None:
        self._max_inflight = max_inflight
        self._max_queued = max_queued
        self._queue_seconds = queue_seconds
        self._inflight = 0
        self._queue: FairQueue[Waiter] = FairQueue()

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

        Whoever has a place gives it up by ``leave``. Raises ``TooManyRequests`` when the queue is full.
        """
        if self._inflight < self._max_inflight:
            self._inflight += 1
            return None
        if len(self._queue) >= self._max_queued:
            raise refusal("The router has as many requests as it may have.", code="queue_full")
        waiter = Waiter(self, go, late)
        waiter.begin(self._queue.add(waiter, tenant=tenant, priority=priority), loop, seconds=self._queue_seconds)
        return waiter

    def leave(self) -> None:
        """A place is free: the next one has it."""
        waiter = self._queue.pop()
        if waiter is None:
            self._inflight -= 1
        else:
            waiter.go()

    def forget(self, ticket: int) -> None:
        """This one waits no longer."""
        self._queue.remove(ticket)


def refusal(message: str, *, code: str) -> TooManyRequests:
    """A 429 that says when to come again."""
    error = TooManyRequests(message, code=code)
    error.retry_after_seconds = _RETRY_AFTER_SECONDS
    return error
