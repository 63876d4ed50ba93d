"""The shim's metrics under vLLM's names, so that dashboards made for vLLM show it.

The engine's thread writes plain numbers; this module turns them into Prometheus families when somebody asks. A number
that is read while a step changes it is at most that step old.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine_shim.schedule.stats import Stats
from engine_shim.types import CacheLayout, FinishReason

# vLLM's buckets, in seconds, tokens and choices.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_CHOICES = (1, 2, 5, 10, 20)


def request_token_bounds(context_tokens: int) -> tuple[int, ...]:
    """vLLM's buckets for tokens of a request: 1, 2, 5, 10, ... up to the longest context."""
    bounds = (digit * 10**power for power in range(len(str(context_tokens))) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= context_tokens)


class Histogram:
    """Counts per bucket; one writer, any reader. ``observe`` is a bisection and two additions."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: (upper bound, count of values up to it)."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


@dataclass(slots=True)
class Latencies:
    """What one rank measured of its requests, in seconds and tokens, and how they ended. Written by the rank's thread.

    The parts of a request's time, of which only those are measured that it came to::

        arrival ---- queue ---- first scheduled ---- prefill ---- first token ---- decode ---- last token
                                |---------------------- inference ----------------------------|
    """

    context_tokens: InitVar[int]
    first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN))
    per_output_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN))
    end_to_end: Histogram = field(default_factory=lambda: Histogram(_REQUEST))
    queue: Histogram = field(default_factory=lambda: Histogram(_REQUEST))
    prefill: Histogram = field(default_factory=lambda: Histogram(_REQUEST))
    decode: Histogram = field(default_factory=lambda: Histogram(_REQUEST))
    inference: Histogram = field(default_factory=lambda: Histogram(_REQUEST))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS))
    choices: Histogram = field(default_factory=lambda: Histogram(_CHOICES))
    prompt_tokens: Histogram = field(init=False)
    prefilled_tokens: Histogram = field(init=False)
    output_tokens: Histogram = field(init=False)
    max_tokens: Histogram = field(init=False)
    generated_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def __post_init__(self, context_tokens: int) -> None:
        bounds = request_token_bounds(context_tokens)
        self.prompt_tokens, self.prefilled_tokens = Histogram(bounds), Histogram(bounds)
        self.output_tokens, self.max_tokens = Histogram(bounds), Histogram(bounds)


class MeasuredRank(Protocol):
    """What a rank shows to the metrics."""

    @property
    def rank(self) -> int: ...
    @property
    def layout(self) -> CacheLayout: ...
    @property
    def latencies(self) -> Latencies: ...
    def stats(self) -> Stats: ...


_Read = Callable[[Stats], float]


def _held_ratio(stats: Stats) -> float:
    """Share of full-attention pages that requests hold; what only the tree keeps is free to vLLM, too."""
    return (stats.used_pages[0] - stats.evictable_pages[0]) / max(1, stats.total_pages[0])


_GAUGES: Mapping[str, tuple[_Read, str]] = {
    "vllm:num_requests_running": (lambda stats: stats.running, "Requests in the running batch."),
    "vllm:num_requests_waiting": (lambda stats: stats.waiting, "Requests that wait to be admitted."),
    "vllm:kv_cache_usage_perc": (_held_ratio, "Share of full-attention pages that requests hold, 0 to 1."),
}
_COUNTERS: Mapping[str, tuple[_Read, str]] = {
    "vllm:prefix_cache_queries": (
        lambda stats: stats.queried_tokens,
        "Prompt tokens looked up in the prefix cache.",
    ),
    "vllm:prefix_cache_hits": (lambda stats: stats.cached_tokens, "Prompt tokens found in the prefix cache."),
    "vllm:prompt_tokens": (lambda stats: stats.queried_tokens, "Prompt tokens of admitted requests."),
    "vllm:prompt_tokens_cached": (lambda stats: stats.cached_tokens, "Prompt tokens not computed again."),
    "vllm:num_preemptions": (lambda stats: stats.preemptions, "Running requests put back for want of pages."),
    "vllm:spec_decode_num_drafts": (lambda stats: stats.drafts, "Steps of a request in which drafts were tried."),
    "vllm:spec_decode_num_draft_tokens": (lambda stats: stats.drafted_tokens, "Draft tokens tried."),
    "vllm:spec_decode_num_accepted_tokens": (
        lambda stats: sum(stats.accepted_tokens),
        "Draft tokens that held.",
    ),
}
_HISTOGRAMS: Mapping[str, tuple[Callable[[Latencies], Histogram], str]] = {
    "vllm:time_to_first_token_seconds": (lambda seen: seen.first_token, "Arrival to first token."),
    "vllm:inter_token_latency_seconds": (lambda seen: seen.inter_token, "Between tokens of one request."),
    "vllm:request_time_per_output_token_seconds": (
        lambda seen: seen.per_output_token,
        "Mean gap between a request's tokens.",
    ),
    "vllm:e2e_request_latency_seconds": (lambda seen: seen.end_to_end, "Arrival to end."),
    "vllm:request_queue_time_seconds": (lambda seen: seen.queue, "Arrival to first scheduling."),
    "vllm:request_prefill_time_seconds": (lambda seen: seen.prefill, "First scheduling to first token."),
    "vllm:request_decode_time_seconds": (lambda seen: seen.decode, "First to last token."),
    "vllm:request_inference_time_seconds": (lambda seen: seen.inference, "First scheduling to last token."),
    "vllm:request_prompt_tokens": (lambda seen: seen.prompt_tokens, "Prompt tokens of a request."),
    "vllm:request_prefill_kv_computed_tokens": (
        lambda seen: seen.prefilled_tokens,
        "Prompt tokens of a request that the cache did not have.",
    ),
    "vllm:request_generation_tokens": (lambda seen: seen.output_tokens, "Tokens generated for a request."),
    "vllm:request_max_num_generation_tokens": (
        lambda seen: seen.output_tokens,  # a request has one choice, which then is the longest
        "Tokens generated for the longest choice of a request.",
    ),
    "vllm:request_params_max_tokens": (lambda seen: seen.max_tokens, "The most tokens a request may have."),
    "vllm:request_params_n": (lambda seen: seen.choices, "Choices asked for."),
    "vllm:iteration_tokens_total": (lambda seen: seen.step_tokens, "Tokens computed by one step."),
}


class ShimCollector(Collector):
    """Reads every rank when Prometheus scrapes; nothing is kept between scrapes."""

    def __init__(self, ranks: Sequence[MeasuredRank], *, model_name: str) -> None:
        self._ranks = ranks
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: registering the collector must not ask the engines."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The families of all ranks, one sample per rank, labelled ``model_name`` and ``engine``."""
        labels = ("model_name", "engine")
        values = [((self._model_name, str(rank.rank)), rank) for rank in self._ranks]
        stats = [(label, rank.stats()) for label, rank in values]
        for name, (read, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for label, stat in stats:
                gauge.add_metric(label, read(stat))
            yield gauge
        for name, (read, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for label, stat in stats:
                counter.add_metric(label, read(stat))
            yield counter
        generated = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=labels)
        for label, rank in values:
            generated.add_metric(label, rank.latencies.generated_tokens)
        yield generated
        for name, (measured, text) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=labels)
            for label, rank in values:
                seen = measured(rank.latencies)
                histogram.add_metric(label, seen.cumulative(), seen.sum)
            yield histogram
        yield self._finished(values)
        yield self._by_source(stats)
        yield self._accepted(stats)
        yield self._cache_config()
        yield from self._below(stats)

    def _finished(self, values: Iterable[tuple[tuple[str, str], MeasuredRank]]) -> Metric:
        labels = ("model_name", "engine", "finished_reason")
        ended = CounterMetricFamily("vllm:request_success", "Requests that ended, by reason.", labels=labels)
        for label, rank in values:
            for reason, count in rank.latencies.finished.items():
                ended.add_metric((*label, reason.value), count)
        return ended

    def _by_source(self, stats: Iterable[tuple[tuple[str, str], Stats]]) -> Metric:
        labels = ("model_name", "engine", "source")
        text = "Prompt tokens of admitted requests, by where their keys and values came from."
        tokens = CounterMetricFamily("vllm:prompt_tokens_by_source", text, labels=labels)
        for label, stat in stats:
            tokens.add_metric((*label, "local_compute"), stat.queried_tokens - stat.cached_tokens)
            tokens.add_metric((*label, "local_cache_hit"), stat.cached_tokens - stat.loaded_tokens)
            tokens.add_metric((*label, "external_kv_transfer"), stat.loaded_tokens)
        return tokens

    def _accepted(self, stats: Iterable[tuple[tuple[str, str], Stats]]) -> Metric:
        labels = ("model_name", "engine", "position")
        text = "Draft tokens that held, by their place behind the last known token, the first being 0."
        accepted = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos", text, labels=labels)
        for label, stat in stats:
            for place, count in enumerate(stat.accepted_tokens):
                accepted.add_metric((*label, str(place)), count)
        return accepted

    def _below(self, stats: Iterable[tuple[tuple[str, str], Stats]]) -> Iterator[Metric]:
        """Copies in host memory and on disk; vLLM has no names for these. Nothing where there are none."""
        labels = ("model_name", "engine", "medium")
        used = GaugeMetricFamily("homing:copied_pages", "Pages of full attention with a copy there.", labels=labels)
        room = GaugeMetricFamily("homing:copied_pages_limit", "The most there is room for.", labels=labels)
        moved = CounterMetricFamily(
            "homing:moved_pages", "Pages moved, of all groups.", labels=("model_name", "engine", "source", "target")
        )
        failed = CounterMetricFamily("homing:failed_transfers", "Transfers whose pages were lost.", labels=labels[:2])
        refused = CounterMetricFamily(
            "homing:refused_pages", "Pages found on disk at the start and not used.", labels=(*labels[:2], "reason")
        )
        for label, stat in stats:
            if stat.below is None:
                continue
            for reason, pages in stat.below.refused_pages.items():
                refused.add_metric((*label, reason), pages)
            for place, pages in stat.below.used_pages.items():
                used.add_metric((*label, place.value), pages)
                room.add_metric((*label, place.value), stat.below.total_pages[place])
            for (source, target), pages in stat.below.moved_pages.items():
                moved.add_metric((*label, source.value, target.value), pages)
            failed.add_metric(label, stat.below.failed_transfers)
        for family in (used, room, moved, failed, refused):
            if family.samples:
                yield family

    def _cache_config(self) -> Metric:
        labels = ("engine", "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "sliding_window")
        info = GaugeMetricFamily("vllm:cache_config_info", "How the cache is cut.", labels=labels)
        for rank in self._ranks:
            layout = rank.layout
            usable = layout.pages[0] - 1
            window = layout.window.window_tokens if layout.window else None
            sizes = (layout.page_tokens, usable, usable * layout.page_tokens, window)
            info.add_metric((str(rank.rank), *map(str, sizes)), 1)
        return info
