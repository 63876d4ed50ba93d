"""Traces, where an endpoint is configured: one span a request, whose context the worker continues.

OpenTelemetry comes with the extra ``otel`` and is imported only when it is asked for. Attribute names are those of its
semantic conventions for HTTP and generative AI, and ``homing.*`` for what the router decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from router.core.types import Decision
from router.errors import ConfigError
from router.settings import TracingSettings
from router.wire.headers import TRACEPARENT, TRACESTATE, Header
from router.wire.usage import Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_SERVICE: Final = "homing-router"


class Trace:
    """One request's span. ``end`` must be called once."""

    __slots__ = ("_span", "_tracing")

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span

    def lines(self) -> bytes:
        """The context to continue, as header lines for the worker."""
        return self._tracing.lines(self._span)

    def decided(self, decision: Decision, *, model: str, attempt: int) -> None:
        """An attempt begins; the last one's attributes stay."""
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "homing.worker": decision.id.worker,
                "homing.rank": decision.id.rank,
                "homing.reason": decision.reason.value,
                "homing.expected_cached_tokens": decision.expected_cached_tokens,
                "homing.best_cached_tokens": decision.best_cached_tokens,
                "homing.attempts": attempt,
            }
        )
        if decision.prefill is not None:
            self._span.set_attribute("homing.prefill_rank", str(decision.prefill.id))

    def first_byte(self) -> None:
        """The answer's body begins."""
        self._span.add_event("first_byte")

    def used(self, usage: Usage) -> None:
        """What the worker reported."""
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
        )
        if usage.cached_tokens is not None:
            self._span.set_attribute("homing.cached_tokens", usage.cached_tokens)

    def failed(self, code: str) -> None:
        """The client was told of an error with this code."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", code)
        self._span.set_status(StatusCode.ERROR, code)

    def end(self, status: int) -> None:
        """The request is over."""
        self._span.set_attribute("http.response.status_code", status)
        self._span.end()


class Tracing:
    """Starts spans and sends them off in the background."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(_SERVICE)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, path: str, headers: Iterable[Header], *, request_id: bytes) -> Trace:
        """A span for a request, a child of the caller's if its headers say so. ``path`` is a known one."""
        from opentelemetry.trace import SpanKind

        carrier = {
            name.decode(): value.decode("latin-1") for name, value in headers if name in (TRACEPARENT, TRACESTATE)
        }
        span = self._tracer.start_span(
            f"{method} {path}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "http.route": path,
                "homing.request_id": request_id.decode("ascii"),
            },
        )
        return Trace(self, span)

    def lines(self, span: Span) -> bytes:
        """A span's context as header lines."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return "".join(f"{name}: {value}\r\n" for name, value in carrier.items()).encode("latin-1")

    def close(self) -> None:
        """Send what is left; blocks, for seconds where nobody listens."""
        self._provider.shutdown()


def make_tracing(settings: TracingSettings, *, version: str) -> Tracing | None:
    """Spans go to ``settings.endpoint`` by OTLP over HTTP; None without one. Raises ``ConfigError``."""
    if settings.endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ModuleNotFoundError as error:
        raise ConfigError("tracing.endpoint needs OpenTelemetry: pip install 'homing[otel]'") from error
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        resource=Resource.create({"service.name": _SERVICE, "service.version": version}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint)))
    return Tracing(provider)
