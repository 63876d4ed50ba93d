"""The data plane's share of the metrics, with each labelled child looked up once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.core.types import RankId
from router.proxy.types import Outcome
from router.telemetry.metrics import Metrics
from router.telemetry.tallies import CounterCell, HistogramCell


class Instruments:
    """What the data plane counts. Labels are endpoints, statuses, error codes, ranks and known models."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        endpoints: Mapping[bytes, str],
        connections: Callable[[], int],
    ) -> None:
        """``endpoints`` names the known paths. Gauges are asked for when scraped, so they cannot drift."""
        self._metrics = metrics
        self._endpoints = endpoints
        metrics.connections.set_function(connections)
        #: Requests being served. Written by ``Exchange`` alone.
        self.inflight = 0
        metrics.inflight.set_function(lambda: self.inflight)
        self.retries_denied = metrics.retries_denied.labels()
        self.disconnects = metrics.client_disconnects.labels()
        self._requests: dict[tuple[bytes, int], tuple[CounterCell, HistogramCell]] = {}
        self._first_token: dict[str, HistogramCell] = {}
        self._inter_token: dict[str, HistogramCell] = {}
        self._attempts: dict[tuple[RankId, Outcome], CounterCell] = {}

    def request(self, path: bytes, status: int, *, seconds: float) -> None:
        """A request has been answered. All unknown paths are one endpoint, ``other``."""
        cells = self._requests.get((path, status))
        if cells is None:
            endpoint = self._endpoints.get(path, "other")
            counter = self._metrics.requests.labels(endpoint, str(status))
            cells = self._requests[path, status] = (counter, self._metrics.request_seconds.labels(endpoint))
        cells[0].inc()
        cells[1].observe(seconds)

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
