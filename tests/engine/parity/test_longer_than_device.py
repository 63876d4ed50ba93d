"""A context longer than the device's pool is computed as on a device that holds it, to the last bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from exact_arithmetic import exact_arithmetic  # noqa: F401 - a fixture
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from offload_rank import OffloadRank
from parity_rank import ParityRank
from test_offload_exact import ACTIONS, PAGE, Action, Conversations
from tiny_models import make_tiny_model

from engine_shim.cache.transfers import WritePolicy
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.types import WindowTails

#: Tokens on the device: half of the longest prompts.
DEVICE_TOKENS = 48


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_next"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Full attention alone, with sliding windows, with recurrent layers; float64."""
    tiny = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return load_decoder(read_card(str(tiny.folder)), dtype=torch.float64)


#: Two long ones and a short one at once, an abort on the way, a fork, and everybody again.
CROWD: list[Action] = [
    ("ask", 0, 9, 12),
    ("ask", 1, 9, 12),
    ("ask", 3, 1, 9),
    ("steps", 0, 0, 7),
    ("abort", 1, 0, 1),
    ("ask", 0, 3, 9),
    ("finish", 0, 0, 1),
    ("settle", 0, 0, 1),
    ("ask", 0, 9, 7),
    ("ask", 1, 9, 9),
    ("ask", 3, 9, 5),
    ("finish", 0, 0, 1),
]


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tails", WindowTails)
def test_cached_equals_cold(decoder: Decoder, tmp_path: Path, tails: WindowTails) -> None:
    """Under any schedule of long and short requests, forks, aborts and preemptions; cold ranks hold all they compute.

    Each run begins with what the one before has left on disk.
    """
    if tails is not WindowTails.STORED and not any(layer.window_tokens for layer in decoder.config.layers):
        pytest.skip("a model without windows, or with states, has nothing to rebuild")
    seen = Counter()

    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        actions=ACTIONS,
        policy=st.sampled_from(WritePolicy),
        piece=st.integers(1, 12),
        chunk=st.integers(9, 40),
        disk=st.booleans(),
    )
    @example(actions=CROWD, policy=WritePolicy.BACK, piece=2, chunk=24, disk=True)
    def run(actions: list[Action], policy: WritePolicy, piece: int, chunk: int, disk: bool) -> None:
        rank = OffloadRank(
            decoder,
            page_tokens=PAGE,
            pool_tokens=DEVICE_TOKENS,
            window_pool_tokens=120,
            state_slots=7,
            chunk_tokens=chunk,
            max_running=3,
            host_ratio=4.0 if disk else 12.0,
            disk_ratio=20.0 if disk else None,
            folder=tmp_path,
            policy=policy,
            piece_pages=piece,
            window_tails=tails,
        )
        try:
            talk = Conversations(decoder, rank, {}, tokens=85)
            opening = [step for n in (0, 1) for step in (("ask", n, 9, 3), ("finish", 0, 0, 1), ("settle", 0, 0, 1))]
            for action in [*opening, *actions, ("finish", 0, 0, 1)]:
                talk.do(action)
            rank.settle()
        finally:
            rank.close()
        stats = rank.scheduler.stats()
        seen.update(
            compared=talk.compared,
            read_below=rank.read_below_tokens,
            cached=stats.cached_tokens,
            loaded=stats.loaded_tokens,
            preempted=stats.preemptions,
            rebuilt=rank.rebuilt_positions,
        )
        assert rank.moved.failed_transfers == 0

    run()
    assert min(seen["compared"], seen["read_below"], seen["loaded"]) > 0, seen
    assert seen["rebuilt"] > 0 or tails is WindowTails.STORED, seen


@pytest.mark.parametrize("kind", ["fp8", "kernels"])
def test_other_kinds_of_attention(kind: str, tmp_path: Path) -> None:
    """A cache of eight bits sinks as it is; where kernels attend, torch does in steps that read on the host."""
    if kind == "kernels":
        pytest.importorskip("triton", reason="triton is not installed: pip install 'homing[kernels]'")
    decoder = load_decoder(read_card(str(make_tiny_model("gemma3", tmp_path).folder)))
    prompt = [3 + (7 * i) % 90 for i in range(110)]
    options = {kind: True, "page_tokens": PAGE, "chunk_tokens": 32}
    expected = ParityRank(decoder, **options).generate({"whole": prompt}, max_tokens=6)["whole"].output
    rank = OffloadRank(decoder, pool_tokens=DEVICE_TOKENS, host_ratio=6.0, record=False, **options)
    try:
        for name in ("cold", "warm"):
            assert rank.generate({name: prompt}, max_tokens=6)[name].output == expected
            rank.settle()
        assert rank.read_below_tokens > 0
        assert rank.scheduler.stats().cached_tokens >= len(prompt) - 2 * PAGE
    finally:
        rank.close()
