"""One bound for all that the indexes of a process hold, and who lets go where it is too much.

The unit is a block of full attention with one holder, a name and its share of a run: about 130 bytes. What else is
held is counted as one each: a block of another group, a copy beyond a rank's first, a name beyond one a block, a block
of another group in a shared pool. Fourteen further holders of blocks are one, at 9 bytes each. A run of few blocks
counts five more, and what waits for its parent counts by its tokens and names. Names of forgotten
blocks go by and by: there may be a quarter as many of them as blocks.
"""

from __future__ import annotations

from typing import Protocol

#: Of what is free this share is granted at once; less than that share of all, and a few, is not worth it.
_GRANTED_SHARE = 8
_LEAST_GRANTED_SHARE = 1024
_LEAST_GRANTED = 64


class Holder(Protocol):
    """An index."""

    def recall(self) -> None:
        """Give back what was granted in advance, and note what is held."""

    def forget(self, count: int) -> None:
        """Let go of so much, and note what is left."""


class Budget:
    """What all holders have together, or may take without asking. Who holds most lets go first, so that nobody pushes
    out one who has little.
    """

    def __init__(self, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self.used = 0
        self._held: dict[Holder, int] = {}
        self._granted: dict[Holder, None] = {}

    def note(self, holder: Holder, held: int) -> None:
        """So much is held by now, and no more may be taken without asking."""
        self.used += held - self._held.get(holder, 0)
        self._held[holder] = held
        self._granted.pop(holder, None)

    def grant(self, holder: Holder, held: int) -> int:
        """The same, but the holder may take so many more without asking: none where there are few."""
        blocks = (self.most_blocks - self.used) // _GRANTED_SHARE
        if blocks <= self.most_blocks // _LEAST_GRANTED_SHARE + _LEAST_GRANTED:
            self.note(holder, held)
            return 0
        self.note(holder, held + blocks)
        self._granted[holder] = None
        return blocks

    def leave(self, holder: Holder) -> None:
        """A holder is gone with all it held."""
        self.note(holder, 0)
        del self._held[holder]

    def make_room(self, blocks: int = 0) -> None:
        """Have let go of what does not fit beside so many more, as far as that can be."""
        while (excess := self.used + blocks - self.most_blocks) > 0:
            if self._granted:
                next(iter(self._granted)).recall()
                continue
            before = self.used
            max(self._held, key=self._held.__getitem__).forget(excess)
            if self.used >= before:
                return
