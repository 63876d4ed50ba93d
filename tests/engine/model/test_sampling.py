"""Sampling: the kept distribution by exact enumeration, and draws that only the request names."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.sampling import Draw, sample, uniform
from engine_shim.types import Chunk, Request, Sampling

GRID = 2000


def top_p_by_hand(logits: list[float], temperature: float, top_p: float) -> dict[int, float]:
    """The fewest likeliest tokens that together reach ``top_p``, renormalised."""
    weights = torch.tensor(logits, dtype=torch.float64).div(temperature).exp().tolist()
    ranked = sorted(((w / sum(weights), -i) for i, w in enumerate(weights)), reverse=True)
    kept: dict[int, float] = {}
    for probability, minus_id in ranked:
        if sum(kept.values()) >= top_p:
            break
        kept[-minus_id] = probability
    return {token: probability / sum(kept.values()) for token, probability in kept.items()}


@given(
    logits=st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=12),
    temperature=st.floats(0.3, 2.0),
    top_p=st.floats(0.05, 1.0),
)
@settings(max_examples=40, deadline=None)
def test_every_token_is_drawn_as_often_as_its_probability(
    logits: list[float], temperature: float, top_p: float
) -> None:
    """Over an even grid of uniform numbers each token comes up in proportion, and no other comes up at all."""
    draws = [Draw(temperature, top_p, (i + 0.5) / GRID) for i in range(GRID)]
    tokens = sample(torch.tensor([logits]).expand(GRID, -1), draws).tolist()
    # The edge of the kept set may fall either way where it lies within rounding of top_p.
    nearby = [top_p_by_hand(logits, temperature, top_p + shift) for shift in (-1e-9, 0.0, 1e-9)]
    counts = Counter(tokens)
    assert any(
        set(counts) <= set(expected) and all(abs(counts[token] / GRID - p) <= 2 / GRID for token, p in expected.items())
        for expected in nearby
    )


def test_greedy_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    """Temperature 0 is the argmax; equal logits go to the lowest id."""
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 1.0]])
    assert sample(logits, [Draw(0.0, 1.0, 0.0)] * 2).tolist() == [1, 0]


def test_a_row_does_not_depend_on_the_others() -> None:
    """Greedy and random rows mixed in one batch choose what each chooses alone."""
    torch.manual_seed(0)
    logits = torch.randn(20, 50)
    draws = [Draw(0.0 if i % 3 == 0 else 1.0, 0.9, uniform("seed 7", i)) for i in range(20)]
    alone = [sample(logits[i : i + 1], [draws[i]]).item() for i in range(20)]
    assert sample(logits, draws).tolist() == alone
    assert len(set(alone)) > 5


def chunk(request_id: str, *, seed: int | None, draws: int) -> Chunk:
    sampling = Sampling(max_tokens=9, temperature=1.0, seed=seed)
    request = Request(id=request_id, prompt=(1, 2), sampling=sampling)
    return Chunk(request, start=1, count=1, tables=(), samples=True, draws=draws)


def test_a_draw_is_named_by_seed_and_number() -> None:
    """The same seed and number give the same draw whoever asks; another seed or number gives another."""
    assert Draw.of(chunk("a", seed=5, draws=3)) == Draw.of(chunk("b", seed=5, draws=3))
    different = {Draw.of(chunk("a", seed=seed, draws=draws)).uniform for seed in (5, 6) for draws in (3, 4)}
    assert len(different) == 4


def test_without_a_seed_the_request_id_is_one() -> None:
    """Two unseeded requests draw differently, the same one the same again after preemption."""
    first = Draw.of(chunk("a", seed=None, draws=0))
    assert first == Draw.of(chunk("a", seed=None, draws=0))
    assert first != Draw.of(chunk("b", seed=None, draws=0))


def test_draws_are_uniform() -> None:
    """10,000 draws of one seed fill ten equal bins evenly: each within five standard deviations (30) of 1,000."""
    bins = Counter(int(10 * uniform("seed 1", n)) for n in range(10_000))
    assert set(bins) == set(range(10))
    assert all(abs(count - 1000) < 150 for count in bins.values())


@pytest.mark.parametrize("edge", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_unit_interval_are_safe(edge: float) -> None:
    """The smallest and the largest uniform number pick the first and the last kept token."""
    logits = torch.tensor([[3.0, 1.0, 2.0, -9.0]])
    expected = 0 if edge == 0.0 else 1
    # Probabilities .66, .09, .24, 4e-6: top-p .95 keeps the ids 0, 2 and 1, in this order.
    assert sample(logits, [Draw(1.0, 0.95, edge)]).tolist() == [expected]
