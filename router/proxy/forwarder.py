"""What all requests share on their way to a worker: connections, heads, retries, and who decides."""

from __future__ import annotations

import random
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from router.core.retry import RetryBudget
from router.core.types import RankId
from router.proxy.exchange import Exchange
from router.proxy.instruments import Instruments
from router.proxy.outbound import Outbound, Writer
from router.proxy.types import Brain, Outcome, Prepared
from router.proxy.upstream import UpstreamPool
from router.settings import UpstreamSettings


class Forwarder:
    """What all requests share on their way to a worker."""

    def __init__(
        self,
        brain: Brain,
        pool: UpstreamPool,
        *,
        settings: UpstreamSettings,
        instruments: Instruments,
        log: FilteringBoundLogger,
        own_lines: Callable[[], bytes] | None = None,
    ) -> None:
        self.brain = brain
        self.pool = pool
        self.settings = settings
        self.instruments = instruments
        self.log = log
        self.writer = Writer(own_lines)
        #: No two routers may name the same room, so these draws are not seeded.
        self.rooms = random.SystemRandom()
        #: Whether a request that failed where it had room must wait for room elsewhere; then it is told.
        self.hold_again: Callable[[Exchange, Prepared, Outbound, frozenset[int], Callable[[], None]], bool] = (
            lambda *_: False
        )
        self.retries = RetryBudget(ratio=settings.retry_ratio, reserve=settings.retry_reserve)

    def log_failure(self, exchange: Exchange, rank: RankId, outcome: Outcome, *, cause: str) -> None:
        """An attempt brought nothing, or broke off."""
        request_id = exchange.request_id.decode()
        self.log.warning("attempt failed", request_id=request_id, rank=str(rank), outcome=outcome.value, cause=cause)
