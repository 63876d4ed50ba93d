"""What answers are expected to take, against sorting all of them."""

from __future__ import annotations

import random

from router.core.output_lengths import OutputLengths


def test_nine_of_ten_answers_are_no_longer_than_expected() -> None:
    """A thousand answers around 400 tokens: the ninth decile of the last ones, to a quarter of an octave."""
    rng = random.Random(3)
    lengths = OutputLengths()
    answers = [max(1, int(rng.lognormvariate(6.0, 1.0))) for _ in range(1000)]
    for tokens in answers:
        lengths.observe("m", tokens)

    decile = sorted(answers[-400:])[360]
    assert decile / 1.3 < lengths.expected("m", most_tokens=None) < decile * 1.3
    assert lengths.expected("m", most_tokens=32_000) == lengths.expected("m", most_tokens=None)
    assert lengths.expected("m", most_tokens=20) == 20


def test_models_are_told_apart_and_the_past_fades() -> None:
    """What one model answers says nothing of another; after long answers come short ones, and are expected soon."""
    lengths = OutputLengths()
    unknown = lengths.expected("other", most_tokens=None)
    for _ in range(300):
        lengths.observe("m", 8192)
    assert lengths.expected("m", most_tokens=None) == 8192
    assert lengths.expected("other", most_tokens=None) == unknown
    for _ in range(1000):
        lengths.observe("m", 64)
    assert lengths.expected("m", most_tokens=None) == 64
