"""Where a context is longer than the device's pool the watchmen have power: each planted bug is found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from test_long_context_machine import walk

from engine_shim.cache.copies import Copies, Page
from engine_shim.runner.shadow import ShadowError
from engine_shim.schedule.chunks import Chunks
from engine_shim.schedule.entry import Entry
from engine_shim.schedule.sinks import Sinks
from engine_shim.types import Chunk


def wrong_host_page(patch: pytest.MonkeyPatch) -> None:
    """A step is told of the host's pages in another order."""
    cut = Chunks.cut

    def bad(self: Chunks, entry: Entry, fitting: int) -> Chunk:
        chunk = cut(self, entry, fitting)
        sunk = chunk.sunk
        return chunk if sunk is None else replace(chunk, sunk=replace(sunk, slots=sunk.slots[1:] + sunk.slots[:1]))

    patch.setattr(Chunks, "cut", bad)


def given_away_while_read(patch: pytest.MonkeyPatch) -> None:
    """A copy gives way to others, as the first of all, while a request reads it, and no recount looks at that."""
    hold, let_go = Sinks.hold, Sinks._let_go

    def unpinned(self: Sinks, entry: Entry, copies: list[Any]) -> None:
        hold(self, entry, copies)
        for copy in copies:
            copy.pins -= 1
            self._copies.shelves[copy.place].order[copy.group].move_to_end(copy, last=False)

    def pinned(self: Sinks, sunk: list[Any]) -> None:
        for copy in sunk:
            copy.pins += 1
        let_go(self, sunk)

    patch.setattr(Sinks, "hold", unpinned)
    patch.setattr(Sinks, "_let_go", pinned)
    patch.setattr(Copies, "check", lambda self, pinned: None)


def freed_while_copied(patch: pytest.MonkeyPatch) -> None:
    """A request that leaves frees what is still being copied."""
    leave = Sinks.leave

    def bad(self: Sinks, entry: Entry, owned: list[list[int]]) -> bool:
        entry.sinking = None
        return leave(self, entry, owned)

    patch.setattr(Sinks, "leave", bad)


def handed_back_before_it_landed(patch: pytest.MonkeyPatch) -> None:
    """What is being copied counts as arrived."""
    patch.setattr(Sinks, "_are_landed", lambda self, waits: True)
    patch.setattr(Page, "ready", lambda self, place, group: self.copies.get((place, group)))


BUGS = [wrong_host_page, given_away_while_read, freed_while_copied, handed_back_before_it_landed]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of six walks, which pass on clean code, ends with an alarm of the shadow."""
    plant(monkeypatch)
    with pytest.raises(ShadowError):
        deque(map(walk, range(6)), maxlen=0)
