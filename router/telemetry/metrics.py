"""Every metric of the router, each declared once. Nothing else creates a metric.

Labels hold names the router knows (worker ids, ranks, configured models), never a client's string.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Gauge

from router.telemetry.tallies import Counter, Histogram

RANK = ("worker", "rank")
#: Prefill of a long cold prompt takes minutes; the buckets reach ten of them.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DECISION_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class Metrics:
    """The router's metrics on one registry. Attributes are the metrics; shells call them directly."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"homing_{name}", documentation, labels, registry=registry)

        def gauge(name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"homing_{name}", documentation, labels, registry=registry)

        def histogram(
            name: str,
            documentation: str,
            labels: Sequence[str] = (),
            buckets: Sequence[float] = LATENCY_BUCKETS,
        ) -> Histogram:
            return Histogram(f"homing_{name}", documentation, labels, registry=registry, buckets=buckets)

        self.registry = registry
        self.build_info = gauge("build_info", "Constant 1; the version is a label.", ("version",))

        # Clients
        self.requests = counter("requests", "Client requests answered, by HTTP status.", ("endpoint", "status"))
        self.errors = counter("errors", "Requests the router itself answered with an error, by code.", ("code",))
        self.request_seconds = histogram("request_seconds", "From request read to last byte sent.", ("endpoint",))
        self.first_token_seconds = histogram(
            "first_token_seconds", "From request read to the first byte of the answer's body.", ("model",)
        )
        self.inter_token_seconds = histogram(
            "inter_token_seconds", "Mean time between streamed chunks of a request.", ("model",)
        )
        self.client_disconnects = counter("client_disconnects", "Clients that left before their answer ended.")
        self.connections = gauge("connections", "Open client connections.")
        self.queued = gauge("queued_requests", "Requests that wait for their turn at queue.max_inflight.")
        self.inflight = gauge("inflight_requests", "Requests being served now.")

        # Decisions
        self.decisions = counter("decisions", "Routing decisions by policy and reason.", ("policy", "reason"))
        self.decision_seconds = histogram(
            "decision_seconds", "Index lookup and decision of a request.", buckets=DECISION_BUCKETS
        )
        self.tokenize_seconds = histogram(
            "tokenize_seconds",
            "Template and tokenization of a request.",
            buckets=(*DECISION_BUCKETS, 0.1, 0.5, 1),
        )
        self.prompts = counter(
            "prompts",
            "Prompts by how they were keyed: engine tokens (exact), a worker's tokens, text (approximate), none.",
            ("keyed",),
        )
        self.admissions = counter(
            "admissions", "Requests by what working-set admission said of them: why they passed or were held.", ("why",)
        )
        self.held_requests = gauge("admission_held_requests", "Requests that wait for room in the caches.")
        self.held_tokens = gauge("admission_held_tokens", "Tokens of the contexts that wait for room in the caches.")
        self.oldest_hold_seconds = gauge("admission_oldest_hold_seconds", "How long the first in the queue has waited.")
        self.charged_tokens = gauge(
            "admission_charged_tokens", "Tokens that conversations are charged with, all ranks."
        )
        self.hold_seconds = histogram(
            "admission_hold_seconds",
            "How long requests waited for room, by how that ended: released, late, left or refused.",
            ("end",),
        )
        self.admission_on = gauge("admission_on", "1 while holding is judged to be of use.")
        self.sessions = gauge("sessions", "Sessions that are remembered.")

        # Cache reuse: the loop that compares what was promised with what was
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.", RANK)
        self.cached_tokens = counter(
            "cached_tokens", "Prompt tokens the rank reports as reused (usage.prompt_tokens_details).", RANK
        )
        self.predicted_tokens = counter(
            "predicted_cached_tokens",
            "Prompt tokens the router expected to be reused on the chosen rank.",
            RANK,
        )
        self.best_tokens = counter(
            "best_cached_tokens", "Prompt tokens reusable on the rank that held most, chosen or not.", RANK
        )
        self.ideal_tokens = counter(
            "ideal_cached_tokens",
            "Prompt tokens seen in any earlier prompt: what an endless cache would reuse.",
            RANK,
        )
        self.mispredicted = counter(
            "mispredicted_requests",
            "Finished requests whose reuse differed from the prediction.",
            (*RANK, "direction"),
        )
        self.trust = gauge("rank_trust_ratio", "How far a rank's predicted reuse is believed, 0 to 1.", RANK)

        # Ranks
        self.rank_up = gauge("rank_up", "1 while a rank is ready or draining, 0 while it is not.", RANK)
        self.rank_inflight = gauge("rank_inflight_requests", "Requests the router has open on a rank.", RANK)
        self.rank_waiting_tokens = gauge(
            "rank_waiting_tokens",
            "Uncached prompt tokens sent to a rank and still without a first token.",
            RANK,
        )
        self.rank_pace = gauge(
            "rank_prefill_tokens_per_second", "Prefill speed of a rank as learned from first tokens.", RANK
        )
        self.breaker_open = gauge("rank_breaker_open", "1 while a rank that kept failing is left alone.", RANK)
        self.retries_denied = counter("retries_denied", "Retries not made because the budget was spent.")
        self.attempts = counter("attempts", "Attempts on ranks by outcome.", (*RANK, "outcome"))
        self.parity = gauge("rank_parity", "Self-check at registration: 1 passed, 0 failed.", RANK)

        # Event streams and the index
        self.event_batches = counter("kv_event_batches", "Event messages received.", RANK)
        self.events = counter("kv_events", "Cache events by type.", (*RANK, "type"))
        self.event_damage = counter("kv_event_decode_errors", "Event messages not decoded or applied.", RANK)
        self.failed_forecasts = counter(
            "kv_forecast_failures", "Times what is foretold of a rank's full cache failed: off until cleared.", RANK
        )
        self.event_gaps = counter("kv_event_gaps", "Gaps in the sequence of a rank's messages.", RANK)
        self.replays = counter("kv_event_replays", "Replays asked of a rank, by result.", (*RANK, "result"))
        self.resyncs = counter("kv_resyncs", "Times a rank's picture was thrown away, by cause.", (*RANK, "cause"))
        self.event_lag = histogram(
            "kv_event_lag_seconds", "From an event's own time to its arrival.", buckets=LATENCY_BUCKETS
        )
        self.events_unapplied = gauge(
            "kv_events_unapplied", "1 while a rank's store events arrive and none of them can be applied.", RANK
        )
        self.index_blocks = gauge("index_blocks", "Blocks the index believes resident on a rank.", RANK)
        self.index_orphans = gauge("index_orphan_blocks", "Stored blocks whose parent has not been seen.", RANK)
        self.index_entries = gauge("index_entries", "Distinct blocks in the index.")
        self.index_used = gauge("index_used_blocks", "What the index holds of routing.max_index_blocks, in all.")
        self.index_evicted = gauge("index_evicted_blocks", "Blocks forgotten because the index was full.")

        # State shared by several routers
        self.shared_up = gauge(
            "shared_state_up",
            "1 while state is shared with the other routers, 0 while this one goes on by itself. Embedded: always 1.",
            ("backend",),
        )
        self.shared_replicas = gauge("shared_state_replicas", "Routers that share state now, this one included.")
        self.shared_errors = counter(
            "shared_state_errors", "Failures of the shared state, by operation and trouble.", ("operation", "trouble")
        )
        self.shared_lookups = counter(
            "shared_state_lookups", "Sessions unknown here that the store was asked for, by result.", ("result",)
        )
