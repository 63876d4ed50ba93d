"""A whole rank that attends by FlashInfer, whose place a stand-in takes: it says what a rank with torch's says."""

from __future__ import annotations

import sys

import pytest
import torch
from overlapped_rank import OverlappedRank
from tiny_models import VOCAB, make_tiny_model

from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.types import Request, Sampling
from tests.fakes import flashinfer_stand_in


@pytest.fixture(scope="module", params=["gemma3", "qwen3_next"])  # windows; recurrent states
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    tiny = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return load_decoder(read_card(str(tiny.folder)), dtype=torch.float64)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)


def requests() -> list[Request]:
    """Two of them are asked again behind the others, when pages are short."""
    prompts = [tuple((17 * n + 5 * i * (1 + i % 3)) % (VOCAB - 3) + 3 for i in range(9 + 11 * n)) for n in range(5)]
    return [Request(str(n), prompt, Sampling(10, ignore_eos=True)) for n, prompt in enumerate([*prompts, *prompts[3:]])]


@pytest.mark.parametrize("overlaps", [False, True])
def test_answers(decoder: Decoder, *, overlaps: bool) -> None:
    """Over pages that are used again, with chunks beside decodes, one by one and launched ahead."""
    expected = OverlappedRank(decoder, overlaps=False).finish(requests())
    rank = OverlappedRank(decoder, overlaps=overlaps, flashinfer=True)
    assert rank.finish(requests()) == expected
    assert (rank.ahead > 10) is overlaps
