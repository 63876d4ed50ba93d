"""Tallies expose what the Prometheus client's own metrics expose after the same changes."""

from __future__ import annotations

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from router.telemetry.tallies import Counter, Histogram

BUCKETS = (0.005, 0.1, 1.0, 2.5)
values = st.lists(st.one_of(st.sampled_from([0.0, *BUCKETS]), st.floats(0, 10)))


def exposed(registry: CollectorRegistry) -> list[str]:
    """The exposition without the client's own notes of when a series began."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 10))), values)
def test_exposition_is_the_clients_own(counts: list[tuple[str, float]], observed: list[float]) -> None:
    """Any sequence of changes gives the same exposition, bounds and infinity included."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = Counter("asked", "Asked.", ("who",), registry=ours)
    plain = Counter("plain", "Plain.", registry=ours)
    histogram = Histogram("took_seconds", "Took.", ("who",), buckets=BUCKETS, registry=ours)
    peer_counter = prometheus_client.Counter("asked", "Asked.", ("who",), registry=theirs)
    peer_plain = prometheus_client.Counter("plain", "Plain.", registry=theirs)
    peer_histogram = prometheus_client.Histogram("took_seconds", "Took.", ("who",), buckets=BUCKETS, registry=theirs)
    for who, amount in counts:
        counter.labels(who).inc(amount)
        peer_counter.labels(who).inc(amount)
        plain.inc()
        peer_plain.inc()
    for value in observed:
        histogram.labels("x").observe(value)
        peer_histogram.labels("x").observe(value)
    assert exposed(ours) == exposed(theirs)


def test_wrong_labels() -> None:
    """A wrong number of labels is refused, since the series would be another one."""
    counter = Counter("asked", "Asked.", ("who",), registry=CollectorRegistry())
    with pytest.raises(ValueError, match="asked"):
        counter.inc()
    with pytest.raises(ValueError, match="asked"):
        counter.labels("a", "b")
