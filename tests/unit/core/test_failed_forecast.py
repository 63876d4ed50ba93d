"""A pool whose forecast raises: the index goes on without it, for that rank, until the rank's cache is cleared."""

from __future__ import annotations

from router.core.forecast import Forecast, Pool
from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockStored

PROMPT = [1, 2, 3, 4]
KEYS = block_keys(PROMPT, block_tokens=1, parent=namespace_seed("", ""))
OTHER = block_keys([9, 8, 7], block_tokens=1, parent=namespace_seed("", ""))


def test_a_forecast_that_raises_is_told_of_once_and_not_tried_again() -> None:
    """Of four blocks in a pool of five, a request of four takes three; without a forecast all four are answered."""
    index = PrefixIndex(block_tokens=1)
    pools = [Pool(5), Pool(5)]
    for slot, pool in enumerate(pools):
        index.add_rank(slot, domain="engine", pool=pool)
        index.apply(slot, BlockStored((1, 2, 3, 4), None, PROMPT, 1))
        pool.sent(OTHER, blocks=4)
    failed: list[tuple[int, str]] = []
    index.on_failed_forecast = lambda slot, error: failed.append((slot, repr(error)))
    assert index.reusable_tokens(KEYS, prompt_tokens=5) == {0: 1, 1: 1}

    pools[0]._forecast = Broken.__new__(Broken)
    for _ in range(2):
        assert index.reusable_tokens(KEYS, prompt_tokens=5) == {0: 4, 1: 1}
    assert failed == [(0, "KeyError('lost')")]

    index.apply(0, AllBlocksCleared())
    index.apply(0, BlockStored((1, 2, 3, 4), None, PROMPT, 1))
    assert index.reusable_tokens(KEYS, prompt_tokens=5) == {0: 1, 1: 1}


class Broken(Forecast):
    """What a defect would leave."""

    def kept(self, keys: object, depth: int) -> int:
        raise KeyError("lost")
