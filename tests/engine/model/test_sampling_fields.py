"""Cuts and penalties against transformers' own, on random logits; what transformers lacks, by OpenAI's formula."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine_shim.sampling import Draw, Sampler, sample
from engine_shim.types import Chunk, Request, Sampling

GRID = 4000


def chunk_of(request: Request, *, room: int = 0) -> Chunk:
    start = len(request.tokens) - 1
    return Chunk(request, start, 1, ((),), samples=True, draws=len(request.output), room=room)


@pytest.mark.parametrize(
    ("cuts", "warpers"),
    [
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"top_k": 6, "top_p": 0.8}, [TopKLogitsWarper(6), TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1, "top_k": 8, "top_p": 0.7}, [MinPLogitsWarper(0.1), TopKLogitsWarper(8), TopPLogitsWarper(0.7)]),
    ],
    ids=["top_k", "top_1", "min_p", "top_k-top_p", "min_p-top_k-top_p"],
)
def test_cuts_are_those_of_transformers(cuts: dict, warpers: list) -> None:
    """Over an even grid of draws each token comes as often as transformers' warpers, in vLLM's order, say."""
    torch.manual_seed(3)
    logits = torch.randn(1, 20, dtype=torch.float64) * 2
    expected = logits
    for warp in (TemperatureLogitsWarper(0.8), *warpers):
        expected = warp(torch.zeros(1, 1), expected.clone())
    probabilities = expected.softmax(dim=-1)[0].tolist()
    draws = [Draw(0.8, uniform=(i + 0.5) / GRID, **{"top_p": 1.0, **cuts}) for i in range(GRID)]
    counts = Counter(sample(logits.expand(GRID, -1), draws).tolist())
    assert all(abs(counts[token] / GRID - p) <= 2 / GRID for token, p in enumerate(probabilities))


def test_repetition_is_penalised_as_in_transformers() -> None:
    """Tokens of prompt and output; greedily, over many random rows."""
    torch.manual_seed(4)
    sampler = Sampler()
    process = RepetitionPenaltyLogitsProcessor(1.7)
    request = Request("r", (3, 4, 4, 9), Sampling(99, repetition_penalty=1.7))
    for _ in range(40):
        logits = torch.randn(1, 12)
        expected = int(process(torch.tensor([request.tokens]), logits.clone()).argmax())
        ((token,),) = (result.tokens for result in sampler(logits.clone(), [chunk_of(request)], [()]).sampled())
        assert token == expected
        request.tokens.append(token)


def test_frequency_presence_and_bias_by_the_formula() -> None:
    """OpenAI: logit - count * frequency - (count > 0) * presence, over the output and drafts in it."""
    logits = torch.tensor([[5.0, 4.0, 3.1, 0.0]])
    request = Request(
        "r", (0, 0, 0), Sampling(99, frequency_penalty=0.75, presence_penalty=0.5, logit_bias=((3, 3.5),))
    )
    sampler = Sampler()
    tokens = []
    for _ in range(5):
        ((token,),) = (result.tokens for result in sampler(logits.clone(), [chunk_of(request)], [()]).sampled())
        request.tokens.append(token)
        tokens.append(token)
    # 5, 4, 3.1, 3.5 at first; token 0 falls to 3.75, token 1 to 2.75, token 0 to 3, token 3 to 2.25.
    assert tokens == [0, 1, 0, 3, 2]
    again = Request("s", (0, 0, 0), request.sampling)
    (result,) = Sampler()(logits.repeat(5, 1), [chunk_of(again, room=4)], [(0, 1, 0, 3)]).sampled()
    assert list(result.tokens) == tokens, "drafts are counted as output, place by place"
