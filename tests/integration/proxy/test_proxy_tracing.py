"""Trace context and spans: passed on as it came without tracing, continued by one span a request with it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from router.errors import ConfigError
from router.settings import TracingSettings
from router.telemetry.tracing import Tracing, make_tracing
from tests.fakes.fault_worker import OK, FaultWorker, Move, chunk, event, stream_head
from tests.fakes.proxy_rig import rig, target

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # the example of the W3C's document
CALLER = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=x", "baggage": "a=b"}


@pytest.fixture
def spans() -> Iterator[tuple[Tracing, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    yield tracing, exporter
    tracing.close()


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


async def test_without_tracing_the_context_passes_as_it_came() -> None:
    """The worker is a child of the caller."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        await it.ask(ASK, headers=CALLER)
        assert {name: worker.requests[0].header(name) for name in CALLER} == CALLER


async def test_a_request_is_one_span_between_caller_and_worker(
    spans: tuple[Tracing, InMemorySpanExporter],
) -> None:
    """It continues the caller's trace, says what was decided, and the worker is told to continue it."""
    tracing, exporter = spans
    async with FaultWorker() as worker, rig(target(worker.port, rank=2, dp_size=4), tracing=tracing) as it:
        await it.ask(ASK, headers={**CALLER, "x-request-id": "abc"})
        (received,) = worker.requests
    span = only(exporter)
    assert (span.name, span.kind) == ("POST /v1/chat/completions", SpanKind.SERVER)
    assert span.context is not None
    assert span.parent is not None
    assert format(span.context.trace_id, "032x") == TRACE_ID
    assert format(span.parent.span_id, "016x") == PARENT_ID
    assert received.header("traceparent") == f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
    assert received.header("tracestate") == "vendor=x"
    assert received.header("baggage") == "a=b"
    assert received.head.lower().count(b"traceparent:") == 1
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 2,
        "homing.request_id": "abc",
        "homing.worker": "w0",
        "homing.rank": 2,
        "homing.reason": "cold",
        "homing.attempts": 1,
        "homing.expected_cached_tokens": 0,
        "homing.best_cached_tokens": 0,
        "homing.cached_tokens": 32,
    }
    assert [happened.name for happened in span.events] == ["first_byte"]
    assert span.status.status_code is StatusCode.UNSET


async def test_a_request_without_a_context_begins_a_trace(spans: tuple[Tracing, InMemorySpanExporter]) -> None:
    """Also where what it sent is no context."""
    tracing, exporter = spans
    async with FaultWorker() as worker, rig(target(worker.port), tracing=tracing) as it:
        await it.ask(ASK, headers={"traceparent": "00-nonsense"})
        span = only(exporter)
        assert span.parent is None
        assert span.context is not None
        assert worker.requests[0].header("traceparent") == (
            f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"
        )


async def test_a_retry_shows_in_the_span(spans: tuple[Tracing, InMemorySpanExporter]) -> None:
    """The rank that answered, and how many attempts it took."""
    tracing, exporter = spans
    async with (
        FaultWorker([(Move.RESET,)]) as broken,
        FaultWorker([OK]) as worker,
        rig(target(broken.port), target(worker.port), tracing=tracing) as it,
    ):
        await it.ask(ASK)
    attributes = only(exporter).attributes or {}
    assert (attributes["homing.worker"], attributes["homing.attempts"]) == ("w1", 2)
    assert attributes["http.response.status_code"] == 200


async def test_failures_are_errors_with_their_code(spans: tuple[Tracing, InMemorySpanExporter]) -> None:
    """Before the first byte, in mid-stream, and by the request's own fault."""
    tracing, exporter = spans
    midway = (stream_head(), chunk(event({"choices": []})), 0.02, Move.RESET)
    async with (
        FaultWorker([(Move.RESET,), midway]) as worker,
        rig(target(worker.port), tracing=tracing) as it,
    ):
        await it.ask(ASK)
        await it.ask({**ASK, "stream": True})
        await it.ask({**ASK, "model": "x"})
        await it.ask({}, method="GET", path="/v1/models")
    told = [
        (
            span.status.status_code,
            (span.attributes or {})["error.type"],
            (span.attributes or {})["http.response.status_code"],
        )
        for span in exporter.get_finished_spans()
    ]
    assert told == [
        (StatusCode.ERROR, "upstream_failed", 502),
        (StatusCode.ERROR, "upstream_failed", 200),
        (StatusCode.ERROR, "model_not_found", 404),
    ]


async def test_a_client_that_leaves_ends_its_span(spans: tuple[Tracing, InMemorySpanExporter]) -> None:
    """499, as in the metrics."""
    tracing, exporter = spans
    async with FaultWorker([(Move.STALL,)]) as worker, rig(target(worker.port), tracing=tracing) as it:
        client = await it.connect()
        await client.send(ASK)
        await worker.until(open_connections=1)
        await client.close()
        await it.until_quiet()
        assert (only(exporter).attributes or {})["http.response.status_code"] == 499


async def test_spans_go_to_the_configured_endpoint() -> None:
    """By OTLP over HTTP, at the latest when the router stops; no endpoint, no tracing."""
    assert make_tracing(TracingSettings(), version="1") is None
    async with FaultWorker([(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",)]) as collector:
        endpoint = f"http://127.0.0.1:{collector.port}/v1/traces"
        tracing = make_tracing(TracingSettings(endpoint=endpoint), version="1.2.3")
        assert tracing is not None
        async with FaultWorker() as worker, rig(target(worker.port), tracing=tracing) as it:
            await it.ask(ASK)
        await asyncio.to_thread(tracing.close)
        (sent,) = collector.requests
        assert sent.head.startswith(b"POST /v1/traces ")
        assert b"POST /v1/chat/completions" in sent.body
        assert b"homing-router" in sent.body


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint without OpenTelemetry refuses to start and says what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'homing\[otel\]'"):
        make_tracing(TracingSettings(endpoint="http://127.0.0.1:1/v1/traces"), version="1")
