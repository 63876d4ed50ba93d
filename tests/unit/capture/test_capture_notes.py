"""What notes of recorders say of an engine, in whatever words."""

from __future__ import annotations

from typing import Any

import pytest

from router.capture.notes import (
    adapters_of,
    block_tokens_of,
    geometry_of,
    max_running_of,
    merged,
    pool_tokens_of,
    retention_tokens_of,
)


@pytest.mark.parametrize(
    "geometry",
    [
        {"attention_chunk_size": 96},
        {"chunk": 96},
        {"text_config": {"attention_chunk_size": 96}},
        {"groups": [{"kind": "full_attention"}, {"kind": "chunked_local_attention", "local_chunk_tokens": 96}]},
    ],
)
def test_a_chunk_is_known_under_any_name(geometry: dict[str, Any]) -> None:
    """Among the settings, or beside its group."""
    assert geometry_of(merged([{"geometry": geometry}])).chunk_tokens == 96


def test_pieces_of_prompts_are_no_chunks_of_attention() -> None:
    """SGLang's setting, and vLLM's switch, are about something else."""
    geometry = {"chunked_prefill_size": 4096, "scheduler": {"chunked_prefill_tokens": 64}, "enable_chunks": True}
    note = {"geometry": geometry, "info": {"other_chunk": 7}}

    assert geometry_of(merged([note])).chunk_tokens is None


@pytest.mark.parametrize(
    "said",
    [
        {"lora_modules": {"a": "/x", "b": "/y"}},
        {"lora_modules": ["a=/x", "b=/y"]},
        {"lora_paths": [{"lora_name": "a", "lora_path": "/x"}, {"name": "b", "path": "/y"}]},
        {"lora": {"adapters": ["a", "b"]}},
        {"adapters": ["a", "b"], "enable_lora": True, "max_loras": 2},
    ],
)
def test_adapters_are_known_by_name(said: dict[str, Any]) -> None:
    """However they are listed."""
    assert adapters_of(merged([{"geometry": said}])) >= {"a", "b"}
    assert not adapters_of(merged([{"geometry": said}])) & {"/x", "/y", "True", "2"}


@pytest.mark.parametrize("name", ["hash_block_size", "match_unit", "prefix_match_unit", "prefix-match-unit"])
def test_units_within_a_block_are_known_under_any_name(name: str) -> None:
    """They go before the block."""
    assert block_tokens_of(merged([{"geometry": {"block_size": 96, name: 32}}]), []) == 32


def test_where_no_note_tells_the_block_vllms_metrics_do() -> None:
    """As a router that registers the worker asks for it."""
    metrics = 'vllm:cache_config_info{_block_size_resolved="True",block_size="64",prefix_match_unit="None",x="1"} 1.0'

    assert block_tokens_of({}, ["other", metrics]) == 64
    assert block_tokens_of({}, [metrics.replace('"None"', '"16"')]) == 16
    assert block_tokens_of({}, []) is None


def test_how_many_run_at_once_is_the_schedulers_word_before_the_settings() -> None:
    """SGLang's setting may be for all its ranks together."""
    info = {"max_running_requests": 96, "internal_states": [{"effective_max_running_requests_per_dp": 48}]}

    assert max_running_of(merged([{"info": info}])) == 48
    assert max_running_of(merged([{"geometry": {"max_running_requests": 96}}])) == 96
    assert max_running_of({}) is None


def test_what_no_note_tells_of_the_cache_vllms_metrics_do() -> None:
    """Its size, and how much windows keep; notes come first."""
    metrics = 'vllm:cache_config_info{kv_cache_size_tokens="1732",prefix_cache_retention_interval="None",x="1"} 1.0'

    assert (pool_tokens_of({}, [metrics]), retention_tokens_of({}, [metrics])) == (1732, 1)
    told = merged([{"geometry": {"pool_tokens": 64, "retention_tokens": 256}}])
    assert (pool_tokens_of(told, [metrics]), retention_tokens_of(told, [metrics])) == (64, 256)
    assert (pool_tokens_of({}, []), retention_tokens_of({}, [])) == (None, None)
