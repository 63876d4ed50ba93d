"""Where a chain begins: adapters, salts and other extra keys that are spelled alike are told apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored

TOKENS = [11, 12, 13, 14]
Extra = tuple[Sequence[str] | None, ...]


def reusable(extra: Extra, *, adapter: str | None, asked: tuple[str, ...]) -> int:
    """Tokens of the text that are promised to who asks with these roots, once it was stored with those extra keys."""
    index = PrefixIndex(block_tokens=2)
    index.add_rank(0, domain="engine")
    index.apply(0, BlockStored((1, 2), None, TOKENS, 2, lora_name=adapter, extra_keys=extra))
    keys = block_keys(TOKENS, block_tokens=2, parent=namespace_seed(*asked))
    return index.reusable_tokens(keys, prompt_tokens=5).get(0, 0)


@pytest.mark.parametrize(
    ("extra", "adapter", "asked", "tokens"),
    [
        ((["ad", "ad"], ["ad"]), "ad", ("ad", "ad"), 4),  # vLLM: adapter, then salt, in the first block's keys
        ((["ad", "ad"], ["ad"]), "ad", ("ad", ""), 0),
        ((["ad"], ["ad"]), "ad", ("ad", ""), 4),
        ((["ad"], ["ad"]), "ad", ("ad", "ad"), 0),
        ((["ad", "s"], ["ad"]), "ad", ("ad", "s"), 4),
        ((["a", "b"], None), None, ("", "a\0b"), 0),  # an image and a salt are no salt of both
        ((["a\0b"], None), None, ("", "a\0b"), 4),
        (([""], None), None, ("", ""), 4),
        ((None, None), None, ("", ""), 4),
        ((["\ud800"], None), None, ("", "\ud800"), 4),  # half a pair of UTF-16, as JSON may escape it
    ],
)
def test_what_is_spelled_alike_is_kept_apart(
    extra: Extra, adapter: str | None, asked: tuple[str, ...], tokens: int
) -> None:
    """Nobody is promised blocks of another adapter or salt."""
    assert reusable(extra, adapter=adapter, asked=asked) == tokens
