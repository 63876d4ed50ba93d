"""Logits and greedy output equal transformers' at 16,000 tokens, cold and over a prefix from the cache."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from parity_rank import ParityRank
from tiny_models import VOCAB, TinyModel, make_tiny_model

from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.types import Request

CONTEXT_TOKENS = 16_000
TURN_TOKENS = 700
#: As at short lengths (``test_parity``).
TOLERANCES = {"gemma3": 2e-4, "llama": 2e-4, "qwen3_next": 2e-3}


def greatest_difference(rank: ParityRank, request: Request, tiny: TinyModel) -> float:
    """Of all logits that the request computed from transformers'; asserts that each token is transformers' too."""
    expected = tiny.logits(request.tokens)
    rows = range(request.cached_tokens, len(request.tokens) - 1)
    actual = torch.stack([rank.logits[request.id][row] for row in rows])
    assert request.output == expected[len(request.prompt) - 1 : -1].argmax(-1).tolist()
    return float((actual - expected[rows.start : -1]).abs().max())


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", sorted(TOLERANCES))
def test_16000_tokens(family: str, tmp_path: Path) -> None:
    """A prompt in chunks of 512, its answer, and the next turn, which computes what is new.

    The window pool of the model with windows has room for 40 pages.
    """
    tiny = make_tiny_model(family, tmp_path, max_positions=20_000)
    rank = ParityRank(
        load_decoder(read_card(str(tiny.folder))),
        page_tokens=16,
        pool_tokens=18_000,
        window_pool_tokens=640,
        chunk_tokens=512,
    )
    rng = random.Random(family)
    started = time.process_time()
    prompt = [rng.randrange(3, VOCAB) for _ in range(CONTEXT_TOKENS)]
    first = rank.generate({"first": prompt})["first"]
    turn = [*first.tokens, *(rng.randrange(3, VOCAB) for _ in range(TURN_TOKENS))]
    second = rank.generate({"second": turn})["second"]
    seconds = time.process_time() - started
    assert second.cached_tokens == (len(first.tokens) - 1) // 16 * 16
    differences = [greatest_difference(rank, request, tiny) for request in (first, second)]
    print(
        f"{family}: greatest difference of a logit {differences[0]:.1e} cold, {differences[1]:.1e} warm; "
        f"{seconds:.0f} s of processor, transformers {time.process_time() - started - seconds:.0f} s"
    )
    assert max(differences) < TOLERANCES[family]
    if family == "gemma3":
        assert rank.pages_filled[1] > 20 * rank.layout.pages[1]
