"""How many connections clients may hold, in all and from one address. Counts only; who refuses is ``plane``."""

from __future__ import annotations

import resource
from collections import Counter
from typing import Final

from router.errors import NoWorker, RequestError, TooManyRequests

#: Open files that are not connections of clients or to workers: listeners, probes, event streams.
_OTHER_FILES: Final = 128


def connections_allowed() -> int:
    """As many as there may be open files for, each with one to a worker: beyond that, workers would seem dead."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (files - _OTHER_FILES) // 2) if files != resource.RLIM_INFINITY else 0


class ConnectionLimits:
    """Zero means no limit. ``release`` what was admitted, once."""

    __slots__ = ("_addresses", "_count", "_max_per_address", "_max_total")

    def __init__(self, *, total: int, per_address: int) -> None:
        self._max_total = total
        self._max_per_address = per_address
        self._count = 0
        self._addresses: Counter[str] = Counter()

    def admit(self, address: str) -> RequestError | None:
        """Count a connection from ``address``, or say why it may not stay."""
        if self._max_total and self._count >= self._max_total:
            return NoWorker("The router has as many connections as it may have.", code="too_many_connections")
        if self._max_per_address:
            if self._addresses[address] >= self._max_per_address:
                return TooManyRequests(
                    "This address has as many connections as it may have.", code="too_many_connections"
                )
            self._addresses[address] += 1
        self._count += 1
        return None

    def release(self, address: str) -> None:
        """A connection that was admitted has gone."""
        self._count -= 1
        if self._max_per_address:
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]
