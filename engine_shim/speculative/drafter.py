"""What proposes drafts, as a runner sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine_shim.types import Chunk


class Drafter(Protocol):
    """Proposes what may follow. Only the rank's thread calls it."""

    def propose(self, chunks: Sequence[Chunk]) -> list[tuple[int, ...]]:
        """For each of these chunks up to its ``room`` tokens that are thought to follow its request's tokens."""
        ...
