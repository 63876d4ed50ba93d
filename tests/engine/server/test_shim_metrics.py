"""The metrics of a running shim: vLLM's names, moved by what a request did."""

from __future__ import annotations

import httpx
import pytest
from shim_process import metric
from test_shim_http import ask

from engine_shim.metrics import request_token_bounds


def test_metrics_under_vllm_names(client: httpx.Client) -> None:
    """Counters move by what a request did, per rank, under vLLM's names and labels."""
    names = {
        "vllm:prompt_tokens_total": 40,
        "vllm:prefix_cache_queries_total": 40,
        "vllm:prefix_cache_hits_total": 0,
        "vllm:generation_tokens_total": 5,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 4,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_prefill_time_seconds_count": 1,
        "vllm:request_decode_time_seconds_count": 1,
        "vllm:request_inference_time_seconds_count": 1,
        "vllm:request_prompt_tokens_sum": 40,
        "vllm:request_prompt_tokens_count": 1,
        "vllm:request_prefill_kv_computed_tokens_sum": 40,
        "vllm:request_generation_tokens_sum": 5,
        "vllm:request_generation_tokens_count": 1,
        "vllm:request_max_num_generation_tokens_sum": 5,
        "vllm:request_max_num_generation_tokens_count": 1,
        "vllm:request_params_max_tokens_sum": 5,
        "vllm:request_params_max_tokens_count": 1,
        "vllm:request_params_n_sum": 1,
        "vllm:request_params_n_count": 1,
        # One step for the prompt, which makes the first token, and one for each of the other four.
        "vllm:iteration_tokens_total_sum": 44,
        "vllm:iteration_tokens_total_count": 5,
    }

    def read() -> dict[str, float]:
        return {name: metric(client, name, engine="1", model_name="needle") for name in names}

    def lengths() -> float:
        return metric(client, "vllm:request_success_total", engine="1", finished_reason="length")

    before, ended = read(), lengths()
    ask(client, list(range(500, 540)), max_tokens=5, routed_dp_rank=1)
    after = read()
    assert {name: after[name] - before[name] for name in names} == names
    assert lengths() - ended == 1
    assert metric(client, "vllm:cache_config_info", engine="0", block_size="16") == 1


def test_metrics_tell_cached_prompt_tokens_apart(client: httpx.Client) -> None:
    """A prompt of 40 that is sent again is computed but for its two whole pages; sources add up to all tokens."""

    def read() -> list[float]:
        sources = [
            metric(client, "vllm:prompt_tokens_by_source_total", engine="0", source=source)
            for source in ("local_compute", "local_cache_hit")
        ]
        return [*sources, metric(client, "vllm:request_prefill_kv_computed_tokens_sum", engine="0")]

    before = read()
    for _ in range(2):
        ask(client, list(range(500, 540)), max_tokens=1, routed_dp_rank=0)
    moved = [after - early for after, early in zip(read(), before, strict=True)]
    assert moved == [40 + 8, 32, 40 + 8]


@pytest.mark.parametrize(
    ("context_tokens", "bounds"),
    [(1, (1,)), (100, (1, 2, 5, 10, 20, 50, 100)), (4999, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000))],
)
def test_token_buckets_reach_to_the_context(context_tokens: int, bounds: tuple[int, ...]) -> None:
    """vLLM's 1-2-5 series, as its documentation shows it for 100."""
    assert request_token_bounds(context_tokens) == bounds
