"""A prompt that comes a second time finds below the device what the device would have given it, at any length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from offload_rank import OffloadRank
from parity_rank import ParityRank
from tiny_models import make_tiny_model

from engine_shim.cache.transfers import WritePolicy
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.types import WindowTails

PAGE = 8


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_next"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Full attention alone, with sliding windows, with recurrent layers; float64."""
    tiny = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return load_decoder(read_card(str(tiny.folder)), dtype=torch.float64)


def start(decoder: Decoder, folder: Path, tails: WindowTails, *, with_disk: bool) -> OffloadRank:
    """Room for everything everywhere."""
    return OffloadRank(
        decoder,
        page_tokens=PAGE,
        pool_tokens=512,
        host_ratio=2.0,
        disk_ratio=4.0 if with_disk else None,
        folder=folder,
        policy=WritePolicy.THROUGH,
        window_tails=tails,
    )


def empty_device(rank: OffloadRank) -> None:
    """Others have pushed all of it out."""
    cache = rank.scheduler._memory.cache
    for group, pool in enumerate(cache.pools):
        cache.evict(group, pool.total)
        assert pool.used_pages == 0


@pytest.mark.parametrize("with_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("tokens", [88, 89, 95, 96, 97])
@pytest.mark.parametrize("tails", WindowTails)
def test_the_first_repeat_resumes_where_the_device_would_let_it(
    decoder: Decoder, tmp_path: Path, tails: WindowTails, tokens: int, *, with_disk: bool
) -> None:
    """Behind all whole pages before its last token, also where it ends on a page boundary; and its answer is right.

    To rebuild the windows of three layers, each of 24 tokens, computing begins so many pages earlier: 3 for the window
    itself, and 2 * 23 tokens for what two layers pass on, which is 6 pages.
    """
    has_windows = any(layer.window_tokens is not None for layer in decoder.config.layers)
    if tails is not WindowTails.STORED and not has_windows:
        pytest.skip("a model without windows has nothing to rebuild")
    prompt = [5 + 7 * i % 90 for i in range(tokens)]
    whole = (tokens - 1) // PAGE * PAGE
    rank = start(decoder, tmp_path, tails, with_disk=with_disk)
    cold = rank.generate({"cold": prompt}, max_tokens=2)["cold"]
    rank.settle()
    if with_disk:
        rank.close()
        rank = start(decoder, tmp_path, tails, with_disk=True)
    else:
        empty_device(rank)
    again = rank.generate({"again": prompt}, max_tokens=2)["again"]
    rank.settle()
    rank.close()
    assert again.cached_tokens == whole - (0 if tails is WindowTails.STORED else (3 + 6) * PAGE)
    assert again.output == cold.output
    alone = ParityRank(decoder)
    alone.generate({"alone": prompt}, max_tokens=2)
    position = tokens - 1
    torch.testing.assert_close(rank.logits["again"][position], alone.logits["alone"][position], atol=1e-6, rtol=1e-6)
