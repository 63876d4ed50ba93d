"""How a page is found again by another process: its whole chain, as a digest that nobody can make collide.

Block keys are 64 bits and hints only; what is kept for longer than the process that wrote it is found by these instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from router.wire.block_keys import pack_tokens

DIGEST_BYTES = 16


def root_digest(namespace: str) -> bytes:
    """The digest at the start of a namespace."""
    return blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=b"namespace").digest()


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a page of ``tokens`` behind ``parent``."""
    return blake2b(parent + pack_tokens(tokens), digest_size=DIGEST_BYTES, person=b"page").digest()


@dataclass(frozen=True, slots=True)
class Label:
    """A page: ``parent`` is the digest of all that stands before it."""

    namespace: str
    parent: bytes
    tokens: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """The page's own digest."""
        return chain_digest(self.parent, self.tokens)


@dataclass(slots=True, eq=False, repr=False)
class KeptPage:
    """A page of which an earlier process has left copies: ``slots[group]`` is where.

    ``parent`` is None at the start of a chain. ``written_seconds``: when the latest of the copies was made.
    """

    label: Label
    parent: KeptPage | None
    slots: dict[int, int] = field(default_factory=dict)
    written_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of earlier processes, parents before children, and how much was refused, by reason."""

    pages: tuple[KeptPage, ...] = ()
    refused: dict[str, int] = field(default_factory=dict)
