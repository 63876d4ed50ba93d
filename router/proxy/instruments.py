"""The data plane's share of the metrics, with each labelled child looked up once."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Counter, Histogram

from router.core.types import RankId
from router.proxy.types import Outcome
from router.telemetry.metrics import Metrics


class Instruments:
    """What the data plane counts. Labels are endpoints, statuses, error codes, ranks and known models."""

    def __init__(self, metrics: Metrics, *, connections: Callable[[], int], inflight: Callable[[], int]) -> None:
        """The two gauges are asked for when scraped, so they cannot drift from what is."""
        self._metrics = metrics
        metrics.connections.set_function(connections)
        metrics.inflight.set_function(inflight)
        self.disconnects = metrics.client_disconnects
        self._requests: dict[tuple[str, int], Counter] = {}
        self._request_seconds: dict[str, Histogram] = {}
        self._first_token: dict[str, Histogram] = {}
        self._inter_token: dict[str, Histogram] = {}
        self._attempts: dict[tuple[RankId, Outcome], Counter] = {}

    def request(self, endpoint: str, status: int, *, seconds: float) -> None:
        """A request has been answered."""
        counter = self._requests.get((endpoint, status))
        if counter is None:
            counter = self._requests[endpoint, status] = self._metrics.requests.labels(endpoint, str(status))
        counter.inc()
        histogram = self._request_seconds.get(endpoint)
        if histogram is None:
            histogram = self._request_seconds[endpoint] = self._metrics.request_seconds.labels(endpoint)
        histogram.observe(seconds)

    def error(self, code: str) -> None:
        """The router answered with an error of its own."""
        self._metrics.errors.labels(code).inc()

    def attempt(self, rank: RankId, outcome: Outcome) -> None:
        """An attempt is over."""
        counter = self._attempts.get((rank, outcome))
        if counter is None:
            child = self._metrics.attempts.labels(rank.worker, str(rank.rank), outcome.value)
            counter = self._attempts[rank, outcome] = child
        counter.inc()

    def first_token(self, model: str, *, seconds: float) -> None:
        """A streamed answer's first byte has come."""
        histogram = self._first_token.get(model)
        if histogram is None:
            histogram = self._first_token[model] = self._metrics.first_token_seconds.labels(model)
        histogram.observe(seconds)

    def inter_token(self, model: str, *, seconds: float) -> None:
        """A streamed answer has ended; ``seconds`` lay between two of its events on average."""
        histogram = self._inter_token.get(model)
        if histogram is None:
            histogram = self._inter_token[model] = self._metrics.inter_token_seconds.labels(model)
        histogram.observe(seconds)
