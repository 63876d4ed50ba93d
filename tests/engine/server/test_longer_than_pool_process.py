"""A shim whose host has more room than its device, or less: what it promises it serves, and the rest it refuses."""

from __future__ import annotations

import httpx
import pytest
from shim_process import SIM, running_shim

from engine_shim.model.needle_text import facts, haystack

FACTS = facts(8, seed=1)


def model_limit(client: httpx.Client) -> int:
    return client.get("/v1/models").json()["data"][0]["max_model_len"]


def test_answers_from_what_only_the_host_holds() -> None:
    """Facts from the whole of a text that is longer than the device's pool, cold and warm."""
    pytest.importorskip("torch")
    text = haystack(1500, FACTS, seed=2)
    options = ("--pool-tokens", "512", "--host-pool-tokens", "4096")
    with running_shim(*options) as shim, httpx.Client(base_url=shim.url, timeout=60) as client:
        assert model_limit(client) == 4097
        for number, fact in enumerate(FACTS):
            body = {"model": "needle", "prompt": text + fact.question, "max_tokens": 4}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"].strip() == fact.value
            assert number == 0 or answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 1400


def test_a_small_host_leaves_the_limit_to_the_device() -> None:
    """A prompt up to the stated limit is served, one beyond it refused with that limit, and the rank lives."""
    options = (*SIM, "--pool-tokens", "1024", "--host-pool-tokens", "512")
    with running_shim(*options) as shim, httpx.Client(base_url=shim.url, timeout=60) as client:
        assert model_limit(client) == 1025
        for tokens, status in ((1024, 200), (1025, 400), (1024, 200)):
            prompt = [5 + i % 200 for i in range(tokens)]
            answer = client.post("/v1/completions", json={"model": "needle", "prompt": prompt, "max_tokens": 1})
            assert answer.status_code == status
            assert status == 200 or "maximum context length is 1025 tokens" in answer.text
