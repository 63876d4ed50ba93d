"""A thread that does transfers one after the other, in the order they were given to it. No torch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import structlog

from engine_shim.cache.transfers import Transfer

log = structlog.get_logger(__name__)
#: After a failure has been told, those that follow are counted for so long before the next one is.
QUIET_SECONDS = 60.0


class Lane:
    """``work`` does a transfer inside ``around``; if it raises, that is logged and ``broke`` is called.

    A full disk fails at every piece: a line of the log tells the last failure and how many there were since the line
    before, at most once in ``QUIET_SECONDS``.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Transfer], None],
        *,
        broke: Callable[[Transfer], None],
        around: Callable[[Transfer], AbstractContextManager[object]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._broke = broke
        self._around = around
        self._clock = clock
        self._untold = 0
        self._quiet_until = float("-inf")
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"pages-{name}", daemon=True)
        self._thread.start()

    def put(self, transfer: Transfer) -> None:
        """Queue a transfer."""
        self._queue.put(transfer)

    def close(self) -> None:
        """End after what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            try:
                with self._around(transfer):
                    self._work(transfer)
            except Exception as error:  # noqa: BLE001 - whatever a device or a disk raises: pages are computed instead
                self._tell(transfer, error)
                self._broke(transfer)

    def _tell(self, transfer: Transfer, error: Exception) -> None:
        self._untold += 1
        now = self._clock()
        if now < self._quiet_until:
            return
        # What the system says of a disk is enough; anything else is a fault of ours, and where it lies is needed, too.
        where = None if isinstance(error, OSError) else error
        failed = {"source": transfer.source, "target": transfer.target, "count": self._untold, "error": str(error)}
        log.error("transfer_failed", **failed, exc_info=where)
        self._untold, self._quiet_until = 0, now + QUIET_SECONDS
