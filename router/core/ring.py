"""Consistent hashing of sessions onto ranks: uhashring behind an immutable face."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from uhashring import HashRing


class Ring:
    """An immutable ring over names. Adding or removing a name moves about 1/n of the keys."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._ring = HashRing(nodes=sorted(self._names), vnodes=64)

    def walk(self, key: str) -> Iterator[str]:
        """All names, the key's own first, then those that would inherit it in turn."""
        if not self._names:
            return
        for node in self._ring.range(key, len(self._names)):
            yield str(node["nodename"])
