"""Blocks that are found by their own tokens and the one behind them, as SGLang has them with EAGLE.

Its tree is of pairs of tokens: a page of the pairs (a, b) (b, c) is another than that of (a, b) (b, d), though their
own tokens are the same. Chain keys are of own tokens. What stood behind each block is kept here, and asked for of the
last one of a prefix: of those before it the next block tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.wire.block_keys import block_keys
from router.wire.kv_events import EngineHash

#: Of so many names it is kept what stands behind their blocks. Beyond it the oldest is forgotten: its block is found
#: one later.
_MAX_NAMES = 1 << 17


class Pairs:
    """What stands behind the blocks that one rank has, on its device or below it."""

    def __init__(self) -> None:
        self._by_name: dict[EngineHash, tuple[int, ...]] = {}
        self._known: set[int] = set()

    def store(self, names: Sequence[EngineHash], keys: Sequence[int], next_tokens: Sequence[int]) -> None:
        """Blocks of these keys were stored, before these tokens."""
        for name, key, token in zip(names, keys, next_tokens, strict=True):
            pair = _pair(key, token)
            self._by_name[name] = (*self._by_name.get(name, ()), pair)
            self._known.add(pair)
        while len(self._by_name) > _MAX_NAMES:
            self.remove((next(iter(self._by_name)),))

    def remove(self, names: Iterable[EngineHash]) -> None:
        """These were removed. Of what goes by one name (copies, texts that are kept apart) the first that came goes."""
        for name in names:
            gone, *left = self._by_name.get(name, ()) or (None,)
            if left:
                self._by_name[name] = tuple(left)
            elif gone is not None:
                del self._by_name[name]
            if gone is not None and gone not in left:
                self._known.discard(gone)

    def clear(self) -> None:
        """There are none."""
        self._by_name.clear()
        self._known.clear()

    def has(self, key: int, next_token: int) -> bool:
        """Whether the block was stored before this token."""
        return _pair(key, next_token) in self._known


def _pair(key: int, token: int) -> int:
    return block_keys((token,), block_tokens=1, parent=key)[0]
