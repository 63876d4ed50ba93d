"""The nouns of what moves below the device: plan, saves, loads, what sinks, and transfers under way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine_shim.cache.copies import Copy, Page
from engine_shim.cache.radix import Receipt
from engine_shim.cache.transfers import Place, WritePolicy


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """The sizes of what lies below the device, in pages for each group with the null page counted, and when to write.

    ``disk_pages`` is None without a disk. ``piece_pages`` move in one transfer at most.
    """

    host_pages: tuple[int, ...]
    disk_pages: tuple[int, ...] | None = None
    policy: WritePolicy = WritePolicy.THROUGH
    piece_pages: int = 256


@dataclass(slots=True, eq=False)
class Load:
    """A prefix of ``pages`` pages that a request starts behind, of which ``copies`` come from the host.

    ``full_from`` is where the tree's own full pages end. ``copies[g]`` are those of the last pages of group g.
    ``targets[g]`` are the request's pages that they go to, empty until the load has started. ``outstanding``: transfers
    that have not landed. ``failed``: one of them did not arrive whole.
    """

    pages: int
    full_from: int
    copies: list[list[Copy]]
    targets: list[list[int]] = field(default_factory=list)
    outstanding: set[int] = field(default_factory=set)
    failed: bool = False

    @property
    def started(self) -> bool:
        """It has pages to write to."""
        return bool(self.targets)


@dataclass(slots=True, eq=False)
class Save:
    """What is left to copy of a boundary: ``items`` are (group, index of the page on the path, device page)."""

    namespace: str
    tokens: tuple[int, ...]
    hashes: list[int]
    receipt: Receipt
    items: deque[tuple[int, int, int]]


@dataclass(slots=True, eq=False)
class Sinking:
    """A part of a request's own on its way to the host: ``pages`` are those of its full group, from its first one on.

    ``waits``: the transfers that bring them, and what is saved beside them, there.
    """

    pages: list[Page]
    waits: set[int]


@dataclass(slots=True, eq=False)
class Flight:
    """A transfer under way: what it reads and writes below the device, and whose it is.

    ``sinks``: what it reads is a request's own, of which some is free when it has landed.
    """

    reads: list[Copy] = field(default_factory=list)
    writes: list[Copy] = field(default_factory=list)
    save: Save | None = None
    load: Load | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class BelowStats:
    """What lies below the device at one moment, in pages of full attention, and counts since the start.

    ``moved_pages`` count the pages of all groups, by source and target, ``refused_pages`` what was found on disk at the
    start and not taken over, by reason.
    """

    used_pages: dict[Place, int]
    total_pages: dict[Place, int]
    moved_pages: dict[tuple[Place, Place], int]
    failed_transfers: int
    refused_pages: dict[str, int]


@dataclass(slots=True)
class OffloadCounters:
    """Counts since the start: pages moved, in all groups, transfers that did not arrive whole, and pages refused."""

    saved_pages: int = 0
    loaded_pages: int = 0
    spilled_pages: int = 0
    fetched_pages: int = 0
    failed_transfers: int = 0
    refused_pages: dict[str, int] = field(default_factory=dict)
