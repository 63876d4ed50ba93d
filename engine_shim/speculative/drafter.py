"""What proposes drafts, as a runner sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine_shim.types import Chunk

if TYPE_CHECKING:
    from torch import Tensor

    from engine_shim.attention.plan import Plan


class Drafter(Protocol):
    """Proposes what may follow. Only the rank's thread calls it."""

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """What the pages of its cache group hold, ``[layers, pages, ...]`` each; nothing where it has no group."""
        ...

    def propose(self, chunks: Sequence[Chunk]) -> list[tuple[int, ...]]:
        """For each of these chunks up to its ``room`` tokens that are thought to follow its request's tokens."""
        ...

    def observe(self, plan: Plan, hidden: Tensor, ends: Sequence[int]) -> None:
        """What a step computed: the residual stream of its rows, and up to which position each of its chunks counts."""
        ...
