"""The watchmen over host and disk have power: for each class of bug one is planted, and a walk finds it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kv_mover import KvMover
from test_offload_machine import walk

from engine_shim.cache.component import Component
from engine_shim.cache.copies import Copies, Page
from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.pool import PageError
from engine_shim.cache.radix import RadixCache
from engine_shim.cache.transfers import Place
from engine_shim.schedule.memory import Memory
from engine_shim.schedule.offload import Offload


def sources_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """The tree may give up what is being copied out."""
    patch.setattr(Component, "pin", lambda self, node: None)
    patch.setattr(Component, "unpin", lambda self, node: None)
    patch.setattr(RadixCache, "unpin", lambda self, receipt: setattr(self, "pinned", self.pinned - 1))


def freed_before_the_load_landed(patch: pytest.MonkeyPatch) -> None:
    """A request that leaves frees pages that a load will still write."""
    drop = Memory.drop

    def bad(self: Memory, entry: Any) -> None:
        if entry.load is not None:
            entry.load.outstanding.clear()
        drop(self, entry)

    patch.setattr(Memory, "drop", bad)


def stale_load(patch: pytest.MonkeyPatch) -> None:
    """A host slot may be given to another page while a load reads it."""
    patch.setattr(Copies, "pin", lambda self, copy: None)
    patch.setattr(Copies, "unpin", lambda self, copy: None)


def no_barrier(patch: pytest.MonkeyPatch) -> None:
    """A step does not say which loads it depends on."""
    patch.setattr(KvMover, "finish", lambda self, loads: None)


def read_before_ready(patch: pytest.MonkeyPatch) -> None:
    """A copy counts as soon as its transfer has begun."""
    reserve = Copies.reserve

    def bad(self: Copies, page: Page, place: Place, group: int) -> Any:
        copy = reserve(self, page, place, group)
        if copy is not None:
            copy.is_ready = True
        return copy

    patch.setattr(Copies, "reserve", bad)


def copied_for_each_twin(patch: pytest.MonkeyPatch) -> None:
    """What is on its way already is sent again."""
    grow = Copies.grow
    patch.setattr(
        Copies, "grow", lambda self, *arguments: [replace(page, copies={}) for page in grow(self, *arguments)]
    )


def damage_ignored(patch: pytest.MonkeyPatch) -> None:
    """A load that did not arrive whole is taken for one that did."""
    land = Offload._land
    patch.setattr(Offload, "_land", lambda self, transfer, *, whole: land(self, transfer, whole=True))


def window_with_a_hole(patch: pytest.MonkeyPatch) -> None:
    """A boundary is loaded though its window is not all there."""
    boundary = Offload._boundary

    def bad(self: Offload, chain: list[Page], match: Any, places: Any) -> tuple[int, int]:
        depth, _ = boundary(self, chain, match, places)
        return depth, min(depth, len(chain))

    patch.setattr(Offload, "_boundary", bad)


def untold_copies(patch: pytest.MonkeyPatch) -> None:
    """Copies go without an event."""
    patch.setattr(EventRecorder, "uncopied", lambda self, place, group, page: None)


def told_before_landing(patch: pytest.MonkeyPatch) -> None:
    """What a load brings goes to the tree, and to the routers, when it is sent."""
    start = Offload.start

    def bad(self: Offload, load: Any, targets: Any) -> None:
        start(self, load, targets)
        load.outstanding.clear()

    patch.setattr(Offload, "start", bad)


BUGS = [
    sources_not_pinned,
    freed_before_the_load_landed,
    stale_load,
    no_barrier,
    read_before_ready,
    copied_for_each_twin,
    damage_ignored,
    window_with_a_hole,
    untold_copies,
    told_before_landing,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of six walks, which all pass on clean code, ends with an alarm."""
    plant(monkeypatch)
    with pytest.raises((IntegrityError, AssertionError, KeyError, ValueError, IndexError, PageError)):
        deque(map(walk, range(6)), maxlen=0)
