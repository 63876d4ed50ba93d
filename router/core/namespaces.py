"""Texts that a rank keeps apart though its events do not say so.

SGLang's default events leave out a request's ``extra_key``: two tenants' blocks of one text come under one name. The
router remembers under which keys it has sent a text, and gives what arrives to the one that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Stands for the seed of a text without an extra key.
PLAIN = 0
_FEW = 65536


class Namespaces:
    """Chain keys of equal text, by the seed that tells them apart; in the order in which they were last sent."""

    def __init__(self) -> None:
        self._alike: dict[int, dict[int, int]] = {}
        self._most = _FEW

    def __bool__(self) -> bool:
        return bool(self._alike)

    @property
    def is_crowded(self) -> bool:
        """Whether it is time to ``forget``: far more is kept than was needed last."""
        return len(self._alike) > self._most

    def learn(self, plain: Sequence[int], own: Sequence[int], *, seed: int) -> None:
        """A prompt was sent under ``seed``. ``plain`` are its keys as its events alone would have them."""
        for first, key in zip(plain, own, strict=True):
            alike = self._alike.setdefault(first, {PLAIN: first})
            alike.pop(seed, None)
            alike[seed] = key
            self._alike[key] = alike

    def alike(self, key: int) -> Sequence[int]:
        """All keys of the same text, the one not sent for longest first; ``key`` alone if there are no others."""
        found = self._alike.get(key)
        return (key,) if found is None else tuple(found.values())

    def claim(
        self, parent: int | None, keys: Sequence[int], *, waits: Callable[[int], bool]
    ) -> tuple[int | None, Sequence[int]]:
        """The same chain in the namespace whose last block is waited for, else in the one it was last sent under.

        As it is where the text was never sent under an extra key, or its namespace does not have it whole.
        """
        alike = self._alike.get(keys[-1]) if keys else None
        if alike is None or waits(keys[-1]):
            return parent, keys
        for seed in (*(seed for seed, key in alike.items() if waits(key)), next(reversed(alike))):
            chain = [self._alike.get(key, {}).get(seed) for key in (*keys, *(() if parent is None else (parent,)))]
            whole = [key for key in chain if key is not None]
            if len(whole) == len(chain):
                return (whole[-1] if parent is not None else None), whole[: len(keys)]
        return parent, keys

    def forget(self, is_known: Callable[[int], bool]) -> None:
        """Let go of texts that nobody holds or waits for."""
        gone = [key for key, alike in self._alike.items() if not any(map(is_known, alike.values()))]
        for key in gone:
            del self._alike[key]
        self._most = max(_FEW, 2 * len(self._alike))
