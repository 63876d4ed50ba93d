"""Which decodes go on from the step before: the same sequences on the same pages, each a token longer.

What was brought together of their keys and values then still stands, but for one token of each. It is told by the
requests, their lengths and their page tables, step by step: whatever comes between (a preemption, a load, a page that
takes another's place, drafts, a step that did not bring the sequence on) breaks the succession.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_shim.placing import to_device
from engine_shim.types import CacheGroup, Chunk, Request


@dataclass(frozen=True, slots=True)
class GoingOn:
    """A segment of decodes in one step. It ``follows`` if the same sequences stood in the same ``place`` a step before.

    A segment keeps its place as long as each step follows the one before; no two segments of a step, or of two steps
    in a row unless they follow, have the same. ``slots`` ``[B]`` of the pool hold each sequence's own token of this
    step; ``rows_positions`` are the sequence's row and that token's position, ``[B]`` both.
    """

    step: int
    place: int
    follows: bool
    slots: Tensor
    rows_positions: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Standing:
    place: int
    starts: list[int]
    tables: list[list[int]]

    def precedes(self, starts: list[int], tables: list[list[int]]) -> bool:
        return starts == [start + 1 for start in self.starts] and all(
            table[: len(held)] == held for table, held in zip(tables, self.tables, strict=True)
        )


class Succession:
    """One rank's decodes, step after step."""

    def __init__(self) -> None:
        self._step = 0
        self._before: dict[tuple[int, tuple[Request, ...]], _Standing] = {}
        self._now: dict[tuple[int, tuple[Request, ...]], _Standing] = {}

    def begin(self) -> None:
        """Another step begins."""
        self._step += 1
        self._before, self._now = self._now, {}

    def find(
        self,
        chunks: Sequence[Chunk],
        group: CacheGroup,
        tables: list[list[int]],
        *,
        page_tokens: int,
        device: torch.device,
    ) -> GoingOn:
        """Where the decodes stand that share a segment of a full-attention group; once for each segment of a step.

        ``tables`` are their pages up to and including this step's tokens; nobody changes them any more.
        """
        starts = [chunk.start for chunk in chunks]
        key = (group.index, tuple(chunk.request for chunk in chunks))
        before = self._before.get(key)
        follows = before is not None and before.precedes(starts, tables)
        place = before.place if before is not None and follows else self._free_place()
        self._now[key] = _Standing(place, starts, tables)
        slots = [table[-1] * page_tokens + start % page_tokens for table, start in zip(tables, starts, strict=True)]
        rows, positions, places = to_device([[*range(len(starts))], starts, slots], device)
        return GoingOn(self._step, place, follows, slots=places, rows_positions=(rows, positions))

    def _free_place(self) -> int:
        taken = {standing.place for standing in (*self._before.values(), *self._now.values())}
        return min(set(range(len(taken) + 1)) - taken)
