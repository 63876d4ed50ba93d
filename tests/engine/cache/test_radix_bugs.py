"""The radix cache's oracle has power: for each class of bug one is planted, and a walk finds it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from test_radix_machine import walk

from engine_shim.cache.component import WindowComponent
from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.pool import PageError
from engine_shim.types import GroupKind


def told_backwards(patch: pytest.MonkeyPatch) -> None:
    """Events leave in another order than things happened."""
    take = EventRecorder.take
    patch.setattr(EventRecorder, "take", lambda self: take(self)[::-1])


def merged_across_chains(patch: pytest.MonkeyPatch) -> None:
    """Stores are merged though the one does not continue the other."""
    store = EventRecorder._store

    def bad(self: EventRecorder, where: object, namespace: str, parent: int | None, *pages: Any) -> None:
        latest = self._latest.get(where)
        store(self, where, namespace, latest.hashes[-1] if hasattr(latest, "parent") and parent else parent, *pages)

    patch.setattr(EventRecorder, "_store", bad)


def state_untold(patch: pytest.MonkeyPatch) -> None:
    """A state that comes or goes is nobody's news."""
    told = EventRecorder._is_told

    def bad(self: EventRecorder, group: int) -> bool:
        return told(self, group) and self.layout.groups[group].kind is not GroupKind.STATE

    patch.setattr(EventRecorder, "_is_told", bad)


def window_evicted_from_its_end(patch: pytest.MonkeyPatch) -> None:
    """Of a node that is cut the end goes first, which alone is of use."""
    patch.setattr(WindowComponent, "upper_first", False)


def whole_path_locked(patch: pytest.MonkeyPatch) -> None:
    """Who resumes behind a window locks all windows of the path."""
    patch.setattr(
        WindowComponent, "covered", lambda self, node, extent, cut: [n for n in node.path() if n.held[1]][::-1]
    )


@pytest.mark.parametrize(
    "plant", [told_backwards, merged_across_chains, state_untold, window_evicted_from_its_end, whole_path_locked]
)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the walks, which all pass on clean code, ends with an alarm."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError, PageError)):
        deque(map(walk, range(10)), maxlen=0)
