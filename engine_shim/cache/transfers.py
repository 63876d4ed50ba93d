"""The nouns of copies below the device: where a page can lie, what moves one, and who carries that out.

::

    device (the pools that attention reads)  --save-->  host  --spill-->  disk
                                             <--load--        <--fetch--

The cache decides what moves and when a page may be used again; a *mover* carries bytes, off the step, and tells what
has landed. Until then every page that a transfer reads or writes is kept for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine_shim.cache.labels import Kept, Label


class Place(StrEnum):
    """Where a copy of a page lies. The values are the media of cache events."""

    DEVICE = "GPU"
    HOST = "CPU"
    DISK = "STORAGE"


class WritePolicy(StrEnum):
    """When pages are copied to the host: as soon as they are stored, when used a second time, or before eviction."""

    THROUGH = "through"
    SELECTIVE = "selective"
    BACK = "back"


@dataclass(frozen=True, slots=True)
class Move:
    """Pages of one group, from ``sources[i]`` to ``targets[i]``; ``names[i]`` is the block key of what is moved.

    What goes to disk has ``labels`` too, by which another process can find it.
    """

    group: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    names: tuple[int, ...]
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages that move together. ``id`` is unique in the life of a rank and grows."""

    id: int
    source: Place
    target: Place
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Landing:
    """A transfer has ended, and neither reads nor writes any more. ``whole``: every page arrived as it was stored."""

    id: int
    whole: bool


def moves_of(items: Iterable[tuple[int, int, int, int]], *, labels: Sequence[Label] = ()) -> tuple[Move, ...]:
    """(group, source, target, name) of each page, with its label if there are some, gathered by group."""
    groups: dict[int, list[tuple[int, int, int]]] = {}
    labelled: dict[int, list[Label]] = {}
    for place, (group, source, target, name) in enumerate(items):
        groups.setdefault(group, []).append((source, target, name))
        labelled.setdefault(group, []).extend(labels[place : place + 1])
    moves = []
    for group, pages in groups.items():
        sources, targets, names = zip(*pages, strict=True)
        moves.append(Move(group, sources, targets, names, tuple(labelled[group])))
    return tuple(moves)


class LoadError(RuntimeError):
    """A page that a step was about to read did not arrive; the step can be run again without it."""


class Mover(Protocol):
    """Carries transfers out. Called by the rank's thread alone; the work itself is done elsewhere.

    Transfers between the same two places land in the order of their submission. ``overlaps``: a step may be launched
    while its load is under way, since the runner waits at each layer for what that layer reads; when the step has
    ended, the load has landed.
    """

    overlaps: bool

    def submit(self, transfer: Transfer) -> None:
        """Begin. All that the steps before have written to the sources is part of the copy."""
        ...

    def landed(self) -> list[Landing]:
        """What has ended since the last call; does not wait."""
        ...

    def kept(self) -> Kept:
        """What the disk has from earlier processes; asked once, before anything is submitted."""
        ...

    def wipe(self) -> None:
        """Forget what is on disk, also for processes to come. Nothing is under way."""
        ...


class BackgroundMover(Mover, Protocol):
    """One that works while nobody calls it. ``notify`` is called, from any thread, whenever something has landed."""

    notify: Callable[[], None]

    def close(self) -> None:
        """End what is under way and let go of everything."""
        ...
