"""Blocks that are found by their own tokens and the one behind them."""

from __future__ import annotations

import pytest

from router.core import pairs as module
from router.core.index import PrefixIndex
from router.core.pairs import Pairs
from router.core.usable import Geometry
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockRemoved, BlockStored

PROMPT = [1, 2, 3, 4, 5]


def keys_of(prompt: list[int]) -> list[int]:
    return block_keys(prompt, block_tokens=2, parent=namespace_seed("", ""))


def stored(name: int, *, parent: int | None, tokens: list[int], behind: int) -> BlockStored:
    return BlockStored((name,), parent, tokens, 2, next_tokens=[behind])


def found(index: PrefixIndex, prompt: list[int]) -> int:
    return index.reusable_tokens(keys_of(prompt), prompt_tokens=len(prompt), tokens=prompt).get(0, 0)


@pytest.fixture
def index() -> PrefixIndex:
    """A rank with two pages of pairs, of the tokens 1 to 5."""
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine", geometry=Geometry(eagle=True))
    index.apply(0, stored(1, parent=None, tokens=[1, 2], behind=3))
    index.apply(0, stored(2, parent=1, tokens=[3, 4], behind=5))
    return index


def test_a_block_is_another_before_another_token(index: PrefixIndex) -> None:
    """What forks behind a page finds one less, and so does what ends there: the last token is no part of a pair."""
    assert found(index, [*PROMPT, 6]) == 4
    assert found(index, [1, 2, 3, 4, 6, 6]) == 2
    assert found(index, PROMPT) == 2


def test_of_two_such_blocks_one_goes(index: PrefixIndex) -> None:
    """A page stored before two tokens is found before the one that is left."""
    index.apply(0, stored(3, parent=1, tokens=[3, 4], behind=6))
    assert found(index, [1, 2, 3, 4, 6, 6]) == 4
    index.apply(0, BlockRemoved((2,)))
    assert found(index, [*PROMPT, 6]) == 2
    assert found(index, [1, 2, 3, 4, 6, 6]) == 4


def test_what_is_promised_is_found_whole(index: PrefixIndex) -> None:
    """A prompt in flight leaves the pages of its pairs, and a longer one that begins with it finds them."""
    prompt = [1, 2, 3, 4, 7, 7]
    index.promise(0, keys_of(prompt), prompt_tokens=len(prompt))
    assert found(index, [*prompt, 7, 7]) == 4


def test_no_more_is_kept_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten; of one name, the first that came goes first."""
    monkeypatch.setattr(module, "_MAX_NAMES", 2)
    pairs = Pairs()
    pairs.store([1, 1, 2], [10, 11, 12], [0, 0, 0])
    pairs.remove([1, 5])
    assert (pairs.has(10, 0), pairs.has(11, 0)) == (False, True)
    pairs.store([3], [13], [0])
    assert (pairs.has(11, 0), pairs.has(12, 0), pairs.has(13, 0)) == (False, True, True)
    pairs.clear()
    assert not pairs.has(13, 0)
