"""Places of blocks: no two blocks ever share one, and copies at them end with what they are of."""

from __future__ import annotations

import random

import pytest

from router.core.chains import Chains
from router.core.runs import Runs
from router.wire.block_keys import block_keys

GPU, CPU = "GPU", "CPU"


def keys_of(text: str) -> list[int]:
    return block_keys([ord(letter) for letter in text], block_tokens=1, parent=7)


def test_a_run_that_is_full_is_continued_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a run is of four blocks, so that the fifth would have the place of another run's first."""
    for module in ("chains", "runs"):
        monkeypatch.setattr(f"router.core.{module}.RUN_BLOCKS", 4)
    runs = Runs()
    chains = Chains(runs)
    text = "abcdefghij"
    found: list[int] = []
    for end in (3, 6, 7, 8, 10):
        parent = found[-1] if found else None
        _, places = chains.extend(0, parent, keys_of(text)[len(found) : end])
        found += places
        chains.extend(1, None, keys_of("z" * len(found)))  # numbers of runs that lie between
    assert len(set(found)) == len(text)
    assert [runs.key(place) for place in found] == keys_of(text)
    assert chains.depths(chains.path(keys_of(text), limit=len(text))) == {0: len(text)}


@pytest.mark.parametrize("tier", [GPU, CPU])
def test_copies_end_with_their_rank(tier: str) -> None:
    """A rank that was cleared has none, whatever it had on any tier; another keeps its own."""
    chains = Chains(Runs())
    for slot in (0, 1):
        for _ in range(3):
            places = [*chains.extend(slot, None, keys_of("ab"), tier=tier)[1]]
    assert [chains.twins(slot) for slot in (0, 1)] == ([4, 4] if tier == GPU else [0, 0])

    chains.clear(0)
    assert [chains.twins(slot) for slot in (0, 1)] == ([0, 4] if tier == GPU else [0, 0])
    assert [chains.has_twin(slot, places[0]) for slot in (0, 1)] == [False, tier == GPU]
    chains.extend(0, None, keys_of("ab"), tier=tier)
    assert [chains.lose(slot, places[1], tier=tier) for slot in (0, 1)] == [True, False]


def test_many_places_are_looked_up_as_each_by_itself() -> None:
    """Beginnings, gaps, a lower tier and runs that are gone, in whatever order."""
    rng = random.Random(1)
    runs = Runs()
    chains = Chains(runs)
    places = [place for text in "abcd" for place in chains.extend(0, None, keys_of(text * 6))[1]]
    chains.extend(1, None, keys_of("aaa"))
    chains.gain(1, places[22], tier=CPU)
    for place in [*places[3:6], *places[8:10], *places[12:]]:
        chains.lose(0, place)
    for _ in range(50):
        asked = rng.choices([*places, 1 << 60], k=10)
        assert runs.unheld(asked) == {place for place in asked if not runs.is_held(place)}
    assert len(runs.unheld(places)) == 3 + 2 + 11
