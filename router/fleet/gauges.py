"""The gauges of one rank, which read its live cells at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import Gauge

from router.core.breaker import BreakerState
from router.core.types import RankStatus
from router.fleet.member import Member
from router.telemetry.metrics import Metrics

_SERVING = (RankStatus.READY, RankStatus.DRAINING)


def watch(member: Member, *, metrics: Metrics, breaker: Callable[[], BreakerState]) -> None:
    """Show the rank from now on."""
    labels = member.labels
    metrics.rank_up.labels(*labels).set_function(lambda: float(member.status in _SERVING))
    metrics.rank_inflight.labels(*labels).set_function(lambda: member.load.inflight)
    metrics.rank_waiting_tokens.labels(*labels).set_function(lambda: member.load.waiting_tokens)
    metrics.rank_pace.labels(*labels).set_function(lambda: 1.0 / (member.pace.factor * member.pace.token_seconds))
    metrics.trust.labels(*labels).set_function(lambda: member.trust.ratio)
    metrics.breaker_open.labels(*labels).set_function(lambda: float(breaker() is not BreakerState.CLOSED))
    metrics.index_blocks.labels(*labels).set_function(lambda: member.blocks)
    metrics.events_unapplied.labels(*labels).set_function(lambda: float(member.is_deaf))
    metrics.index_orphans.labels(*labels).set_function(
        lambda: member.index.orphans(member.slot) if member.index is not None else 0
    )


def unwatch(member: Member, *, metrics: Metrics) -> None:
    """It is gone."""
    for gauge in _gauges(metrics):
        gauge.remove(*member.labels)


def _gauges(metrics: Metrics) -> Sequence[Gauge]:
    return (
        metrics.rank_up,
        metrics.rank_inflight,
        metrics.rank_waiting_tokens,
        metrics.rank_pace,
        metrics.trust,
        metrics.breaker_open,
        metrics.index_blocks,
        metrics.index_orphans,
        metrics.events_unapplied,
    )
