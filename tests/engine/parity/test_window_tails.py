"""Windows that are rebuilt: to the last bit what a cold rank computes, from exactly as far back as needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact_arithmetic import exact_arithmetic  # noqa: F401 - a fixture
from offload_rank import OffloadRank
from parity_rank import ParityRank
from tiny_models import WINDOW, make_tiny_model

from engine_shim.cache.transfers import Place
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.types import CacheLayout, WindowTails

pytestmark = pytest.mark.usefixtures("exact_arithmetic")
PAGE = 8
HEAD = [3 + 7 * i * i % 250 for i in range(160)]
WINDOW_LAYERS = 3


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    tiny = make_tiny_model("gemma3", tmp_path_factory.mktemp("gemma3"))
    return load_decoder(read_card(str(tiny.folder)), dtype=torch.float64)


def again(rank: ParityRank) -> dict[int, torch.Tensor]:
    """The logits of a prompt whose first 160 tokens were computed before, from there on."""
    rank.generate({"first": HEAD}, max_tokens=2)
    rank.rebuilt_positions = 0
    rank.generate({"again": [*HEAD, 9, 10, 11]}, max_tokens=6)
    return rank.logits["again"]


def cold(decoder: Decoder, rank: ParityRank) -> dict[int, torch.Tensor]:
    """All logits of the same sequence, computed at once."""
    reference = ParityRank(decoder, page_tokens=PAGE)
    reference.generate({"cold": [*HEAD, 9, 10, 11]}, max_tokens=6)
    return reference.logits["cold"]


def is_exact(decoder: Decoder, rank: ParityRank, rows: dict[int, torch.Tensor]) -> bool:
    expected = cold(decoder, rank)
    assert set(rows) == set(range(len(HEAD), len(HEAD) + 3 + 5))
    return all(torch.equal(row, expected[position]) for position, row in rows.items())


@pytest.mark.parametrize("chunk", [5, 24, 512])
def test_a_ring_rebuilds_what_it_needs_and_no_more(decoder: Decoder, chunk: int) -> None:
    """Of 160 known tokens those that reach the last window through three layers are run, in chunks of any size."""
    rank = ParityRank(decoder, page_tokens=PAGE, chunk_tokens=chunk, window_tails=WindowTails.RING)
    assert is_exact(decoder, rank, again(rank))
    window_pages = -(-(WINDOW - 1) // PAGE)
    reach = window_pages * PAGE + (WINDOW_LAYERS - 1) * (WINDOW - 1)
    assert reach <= rank.rebuilt_positions < reach + PAGE
    assert rank.scheduler.stats().cached_tokens == len(HEAD) - rank.rebuilt_positions


@pytest.mark.parametrize("late_pages", [1, 2])
def test_less_is_not_enough(decoder: Decoder, late_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what looks back through several layers is begun a page too late, or with the last window alone."""
    rebuild_tokens = CacheLayout.rebuild_tokens

    def late(self: CacheLayout, pages: int) -> int:
        if late_pages == 1:
            return rebuild_tokens(self, pages) + PAGE
        return max(0, pages - self.window_pages()) * PAGE

    monkeypatch.setattr(CacheLayout, "rebuild_tokens", late)
    rank = ParityRank(decoder, page_tokens=PAGE, window_tails=WindowTails.RING)
    assert not is_exact(decoder, rank, again(rank))


def test_a_load_rebuilds_what_was_not_copied(decoder: Decoder, tmp_path: Path) -> None:
    """Full pages come from the host, their window is computed, and no window page has ever been copied."""
    rank = OffloadRank(
        decoder,
        page_tokens=PAGE,
        pool_tokens=200,
        window_pool_tokens=200,
        host_ratio=4.0,
        window_tails=WindowTails.REBUILT,
    )
    rank.generate({"first": HEAD}, max_tokens=2)
    rank.settle()
    rank.generate({"another": HEAD[::-1]}, max_tokens=2)
    rank.settle()
    rank.rebuilt_positions = 0
    rank.generate({"again": [*HEAD, 9, 10, 11]}, max_tokens=6)
    rank.settle()
    rank.close()
    assert is_exact(decoder, rank, rank.logits["again"])
    assert rank.moved.loaded_pages > 0
    assert 0 < rank.rebuilt_positions < 120
    host = rank.scheduler._memory.offload.copies.shelves[Place.HOST]
    assert len(host.order[0]) > 0
    assert len(host.order[1]) == 0


def test_what_is_rebuilt_is_of_use_to_the_next(decoder: Decoder, tmp_path: Path) -> None:
    """Rebuilt windows go to the tree: the same prompt a third time computes its end only."""
    rank = OffloadRank(
        decoder,
        page_tokens=PAGE,
        pool_tokens=200,
        window_pool_tokens=200,
        host_ratio=4.0,
        window_tails=WindowTails.REBUILT,
    )
    for name, prompt in (("first", HEAD), ("another", HEAD[::-1]), ("again", [*HEAD, 9]), ("third", [*HEAD, 9])):
        rank.rebuilt_positions = 0
        rank.generate({name: prompt}, max_tokens=2)
        rank.settle()
    rank.close()
    assert rank.rebuilt_positions == 0
    assert len(rank.logits["third"]) <= PAGE + 2
