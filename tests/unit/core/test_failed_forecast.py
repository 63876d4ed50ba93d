"""A pool that fails: whatever is told to it or asked of it then ends nothing else, and a cleared rank has a new one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.core.forecast import Forecast, Pool
from router.core.index import PrefixIndex
from router.core.radix_pool import RadixPool
from router.core.shared_allocation import AnyAllocation
from router.core.shared_pool import SharedPool
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

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
    anew = index.pool(0)
    assert isinstance(anew, Pool)
    anew.sent(OTHER, blocks=4)
    assert index.reusable_tokens(KEYS, prompt_tokens=5) == {0: 1, 1: 1}
    assert failed == [(0, "KeyError('lost')")]


class Broken(Forecast):
    """What a defect would leave."""

    def kept(self, keys: object, depth: int) -> int:
        raise KeyError("lost")


POOLS: dict[str, Callable[[], Pool]] = {
    "one group": lambda: Pool(9, all_blocks=9),
    "radix": lambda: RadixPool(9, page_tokens=1),
    "groups": lambda: Pool(9, all_blocks=9),
}
REQUEST: dict[str, Callable[[AnyAllocation], None]] = {
    "begun": lambda allocation: allocation.begun(),
    "grows": lambda allocation: allocation.grows(lambda: 1),
    "ended": lambda allocation: allocation.ended(KEYS),
    "forget": lambda allocation: allocation.forget(),
}
EVENTS: dict[str, Callable[[PrefixIndex], None]] = {
    "stored": lambda index: index.apply(0, BlockStored((9, 8, 7), None, [9, 8, 7], 1)),
    "removed": lambda index: index.apply(0, BlockRemoved((4,))),
    "cleared": lambda index: index.apply(0, AllBlocksCleared()),
}
SPARSE_EVENTS: dict[str, Callable[[PrefixIndex], None]] = {
    "gained": lambda index: index.apply(0, window_of(4)),
    "lost": lambda index: index.apply(0, BlockRemoved((3,), group=1)),
}


@pytest.mark.parametrize(
    ("kind", "method"),
    [(kind, method) for kind in POOLS for method in (*REQUEST, *EVENTS)] + [("groups", each) for each in SPARSE_EVENTS],
)
def test_whatever_raises_in_a_pool_ends_no_request_and_no_event(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller goes on, the index has applied the event, the alarm is told once, and a clear makes all new."""
    index = PrefixIndex(block_tokens=1)
    failed: list[str] = []
    index.on_failed_forecast = lambda _slot, error: failed.append(repr(error))
    index.add_rank(0, domain="engine", pool=POOLS[kind]())
    index.apply(0, BlockStored((1, 2, 3, 4), None, PROMPT, 1))
    if kind == "groups":
        index.apply(0, window_of(3))
    pool = index.pool(0)
    assert pool is not None
    assert type(pool) is {"one group": Pool, "radix": RadixPool, "groups": SharedPool}[kind]
    allocation: AnyAllocation = pool.sent(OTHER, blocks=4)

    def fails(*_args: object, **_kwargs: object) -> None:
        raise KeyError(method)

    monkeypatch.setattr(pool, method, fails)
    happen = REQUEST.get(method)
    for _ in range(2):
        if happen is not None:
            happen(allocation)
        elif method != "cleared" or not failed:  # a second clear begins with a pool of its own
            (EVENTS | SPARSE_EVENTS)[method](index)
    assert failed == [f"KeyError('{method}')"]
    held = {"stored": 7, "removed": 3, "cleared": 0}.get(method, 4)
    assert index.blocks(0) == held
    for each in REQUEST.values():  # of a pool that has failed nothing is tried
        each(allocation)

    index.apply(0, AllBlocksCleared())
    anew = index.pool(0)
    assert anew is not None
    assert type(anew) is type(pool)
    assert anew is not pool
    index.apply(0, BlockStored((1, 2, 3, 4), None, PROMPT, 1))
    for each in REQUEST.values():
        each(anew.sent(OTHER, blocks=4))
    assert failed == [f"KeyError('{method}')"]
    assert index.blocks(0) == 4


def window_of(name: int) -> BlockStored:
    """A block of a sliding window's group."""
    return BlockStored((name,), name - 1, PROMPT[name - 1 : name], 1, group=1, kind="sliding_window", window_tokens=3)
