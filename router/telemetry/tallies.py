"""Counters and histograms for one thread, cheap enough for every request.

The Prometheus client's own take a lock and several calls for each change: about thirty of these a request. Here a
change is an addition on a cell, which is kept by whoever counts often; families are made of the cells at a scrape.
Everything that counts runs on the event loop, and so does the scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class CounterCell:
    """One count. ``value`` only ever grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count."""
        self.value += amount


class HistogramCell:
    """How often values fell into each bucket, and their sum. A value at a bound belongs below it."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


Cell = TypeVar("Cell", CounterCell, HistogramCell)


class _Tally(Collector, Generic[Cell]):
    """Cells by the values of their labels. One without labels has its only cell from the start."""

    def __init__(
        self, name: str, documentation: str, label_names: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self.name = name
        self.documentation = documentation
        self.label_names = tuple(label_names)
        self._cells: dict[tuple[str, ...], Cell] = {}
        if not label_names:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Cell:
        """The cell of these labels, made when first asked for. Raises ``ValueError`` for a wrong number of them."""
        cell = self._cells.get(values)
        if cell is None:
            if len(values) != len(self.label_names):
                raise ValueError(f"{self.name} has the labels {self.label_names}, not {values}")
            cell = self._cells[values] = self._new_cell()
        return cell

    def _new_cell(self) -> Cell:
        raise NotImplementedError

    def describe(self) -> Iterator[Metric]:
        """The family without its samples, which is all that the registry needs to know at registration."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        raise NotImplementedError


class Counter(_Tally[CounterCell]):
    """A counter in the sense of Prometheus; samples end in ``_total``."""

    def _new_cell(self) -> CounterCell:
        return CounterCell()

    def inc(self, amount: float = 1.0) -> None:
        """Count on the only cell. Raises ``ValueError`` where there are labels."""
        self.labels().inc(amount)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self.name, self.documentation, labels=self.label_names)
        for values, cell in self._cells.items():
            family.add_metric(values, cell.value)
        yield family


class Histogram(_Tally[HistogramCell]):
    """A histogram in the sense of Prometheus. ``buckets`` are upper bounds, rising, without infinity."""

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self.buckets = tuple(map(float, buckets))
        super().__init__(name, documentation, label_names, registry=registry)

    def _new_cell(self) -> HistogramCell:
        return HistogramCell(self.buckets)

    def observe(self, value: float) -> None:
        """Count a value in the only cell. Raises ``ValueError`` where there are labels."""
        self.labels().observe(value)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.documentation, labels=self.label_names)
        names = [*map(str, self.buckets), "+Inf"]
        for values, cell in self._cells.items():
            total, rising = 0, []
            for name, count in zip(names, cell.counts, strict=True):
                total += count
                rising.append((name, total))
            family.add_metric(values, rising, sum_value=cell.sum)
        yield family
