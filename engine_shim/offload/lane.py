"""A thread that does transfers one after the other, in the order they were given to it. No torch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import structlog

from engine_shim.cache.transfers import Transfer
from engine_shim.offload.quiet import Quiet

log = structlog.get_logger(__name__)


class Lane:
    """``work`` does a transfer inside ``around``; if it raises, that is logged and ``broke`` is called.

    A line of the log tells the last failure and how many there were since the line before; see ``Quiet``.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Transfer], None],
        *,
        broke: Callable[[Transfer], None],
        around: Callable[[Transfer], AbstractContextManager[object]] = nullcontext,
        quiet: Quiet | None = None,
    ) -> None:
        self._work = work
        self._broke = broke
        self._around = around
        self._quiet = quiet or Quiet()
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
        count = self._quiet.failed()
        if not count:
            return
        # What the system says of a disk is enough; anything else is a fault of ours, and where it lies is needed, too.
        where = None if isinstance(error, OSError) else error
        failed = {"source": transfer.source, "target": transfer.target, "count": count, "error": str(error)}
        log.error("transfer_failed", **failed, exc_info=where)
