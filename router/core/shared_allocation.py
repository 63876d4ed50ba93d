"""What one request takes of a pool that groups share (``core/shared_pool``)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from router.core.block_queue import Copy
from router.core.forecast import Allocation

if TYPE_CHECKING:
    from router.core.shared_pool import SharedPool


class Due(StrEnum):
    """What a request has done, or will do, that no event has told of."""

    BEGINS = "begins"
    GROWS = "grows"
    ENDS = "ends"


@dataclass(slots=True, eq=False)
class SharedAllocation:
    """The blocks of one request: ``keys`` of the whole ones, the first ``prompt_blocks`` of its prompt; in each group
    it has one more, which is begun. Once it has been heard of, ``heard`` of them are known to be its own: of each group
    ``tables`` has those from block ``first`` on that it holds, None for what is not cached.
    ``sent_at``, ``begun_at`` and ``ended_at`` count what has happened in the pool.
    """

    pool: SharedPool
    keys: array[int]
    prompt_blocks: int
    prompt_tokens: int
    sent_at: int
    begun_at: int | None = None
    ended_at: int | None = None
    generated: Callable[[], int] | None = None
    heard: int = 0
    first: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[Copy | None]] = field(default_factory=dict)
    awaited: list[int] = field(default_factory=list)

    def begun(self) -> None:
        """It has its blocks."""
        self.pool.guard.attempt(self.pool.begun, self)

    def grows(self, generated: Callable[[], int]) -> None:
        """Its answer has begun; so many tokens of it there are by now, of which events tell late or not at all."""
        self.pool.guard.attempt(self.pool.grows, self, generated)

    def ended(self, keys: Sequence[int]) -> None:
        """It is over, and leaves these blocks."""
        self.pool.guard.attempt(self.pool.ended, self, keys)

    def forget(self) -> None:
        """It failed, or its events did not come in time."""
        self.pool.guard.attempt(self.pool.forget, self)

    def heard_tokens(self, *, block_tokens: int) -> int:
        """How many tokens it has, as far as has been heard."""
        if self.heard == self.prompt_blocks:
            return self.prompt_tokens
        return self.heard * block_tokens + (self.heard > self.prompt_blocks)

    def unheard_blocks(self, *, block_tokens: int) -> int:
        """How many blocks it has, or is about to have, of which no event has told."""
        return max(0, self.prompt_blocks - self.heard) + self.unheard_answer(block_tokens=block_tokens)

    def unheard_answer(self, *, block_tokens: int) -> int:
        """How many blocks its answer has filled of which no event has told."""
        return max(0, self.filled(block_tokens=block_tokens) - max(0, self.heard - self.prompt_blocks))

    def filled(self, *, block_tokens: int) -> int:
        """How many blocks its answer has filled by now, as far as its tokens tell."""
        if self.generated is None or self.ended_at is not None:
            return 0
        return (self.prompt_tokens + self.generated() - 1) // block_tokens - self.prompt_blocks


#: What a request takes of either pool.
AnyAllocation = Allocation | SharedAllocation


def due_of(
    pending: Collection[SharedAllocation], running: Collection[SharedAllocation], *, grown: Iterable[SharedAllocation]
) -> Iterator[tuple[SharedAllocation, Due]]:
    """What has happened by now that no event told of: answers that grew, then requests that began or ended, as they did
    one after the other, then those that wait.
    """
    yield from ((allocation, Due.GROWS) for allocation in grown)
    happened: list[tuple[int, SharedAllocation, Due]] = []
    for allocation in pending:
        if allocation.begun_at is not None and allocation not in running:
            happened.append((allocation.begun_at, allocation, Due.BEGINS))
        if allocation.ended_at is not None:
            happened.append((allocation.ended_at, allocation, Due.ENDS))
    happened.sort(key=lambda each: (each[0], each[2] is Due.ENDS))
    yield from ((allocation, due) for _, allocation, due in happened)
    yield from ((allocation, Due.BEGINS) for allocation in pending if allocation.begun_at is None)
