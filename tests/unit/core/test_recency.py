"""The order of giving up, where removals come in any order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.recency import Recency
from router.wire.block_keys import block_keys

TEXTS = ("aaaa", "aabb", "abbb", "bbbb")


def keys_of(text: str) -> list[int]:
    return block_keys([ord(letter) for letter in text], block_tokens=1, parent=7)


STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from(TEXTS), st.integers(0, 3), st.integers(1, 4)), max_size=60)


@given(steps=STEPS, is_merged=st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_block_held_stands_in_one_stretch(steps: list[tuple[bool, str, int, int]], is_merged: bool) -> None:
    """Stores from anywhere on, with what is held already in front; removals of any block held."""
    recency = Recency(is_merged=is_merged)
    held: set[int] = set()
    for is_store, text, start, stop in steps:
        keys = keys_of(text)
        if not is_store and keys[start] in held:
            recency.remove(keys[start])
            held.remove(keys[start])
        elif is_store and start < stop and (not start or keys[start - 1] in held):
            stored = keys[start:stop]
            new = len(set(stored) - held)
            if set(stored[len(stored) - new :]) & held:
                continue  # engines store tails, not gaps
            recency.add(keys[start - 1] if start else None, stored, new=new)
            held.update(stored)
        places = [key for stretch in recency for key in stretch.keys]
        assert held <= set(places)
        assert len(places) == len(set(places))

    for key in list(held):
        recency.remove(key)
    assert not len(recency)


def test_what_stands_behind_a_block_that_went_out_of_turn_is_let_go_of_too() -> None:
    """A running request held on to four blocks in two stretches; the second block is given up all the same."""
    recency = Recency(is_merged=False)
    keys = keys_of("aabb")
    recency.add(None, keys[:2], new=2)
    recency.add(keys[1], keys[2:], new=2)
    recency.use(keys, pins=1)
    recency.remove(keys[1])

    recency.use(keys, pins=-1)
    assert [stretch.pins for stretch in recency] == [0, 0]
