"""The watchmen have power over rings, too: for each class of bug in them one is planted, and some watchman finds it."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
from test_planted_bugs import RINGS, abort_frees_at_once, drive, freed_while_read, handed_out_twice

from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.pool import PageError, PagePool
from engine_shim.cache.ring import Rings
from engine_shim.schedule.windows import RingWindows


def ring_slots_unguarded(patch: pytest.MonkeyPatch) -> None:
    """A slot is known by its number only and written over while it is read, as requests are let run too far."""
    claim = Rings.claim
    patch.setattr(Rings, "claim", lambda self, owner, number, *, keep_from: claim(self, owner, number, keep_from=10**9))
    patch.setattr(RingWindows, "end", lambda self, entry, pages: entry.window_from + self.rings.pages + 3)


def ring_run_too_far(patch: pytest.MonkeyPatch) -> None:
    """Requests are let run too far for their rings."""
    patch.setattr(RingWindows, "end", lambda self, entry, pages: entry.window_from + self.rings.pages + 3)


def ring_let_go_too_soon(patch: pytest.MonkeyPatch) -> None:
    """A slot is free for the next lap one page before the window has passed it."""
    slide = RingWindows.slide

    def bad(self: RingWindows, entry: Any, *, at_prompt_end: bool) -> None:
        self.reach_pages -= 1
        slide(self, entry, at_prompt_end=at_prompt_end)
        self.reach_pages += 1

    patch.setattr(RingWindows, "slide", bad)


def ring_without_generations(patch: pytest.MonkeyPatch) -> None:
    """A page that is written over looks as it did before."""
    patch.setattr(PagePool, "turn", lambda self, page: None)


def ring_handed_on(patch: pytest.MonkeyPatch) -> None:
    """The next request gets a ring as the one before has left it, slots and all."""
    left: list[Any] = []
    open_ring = Rings.open

    def close(self: Rings, owner: str) -> None:
        left.extend([self._rings.pop(owner)] if owner in self._rings else [])

    def reopen(self: Rings, owner: str) -> None:
        if left:
            self._rings[owner] = left.pop()
        else:
            open_ring(self, owner)

    patch.setattr(Rings, "close", close)
    patch.setattr(Rings, "open", reopen)


RING_BUGS = [
    ring_slots_unguarded,
    ring_run_too_far,
    ring_let_go_too_soon,
    ring_without_generations,
    ring_handed_on,
    abort_frees_at_once,
    freed_while_read,
    handed_out_twice,
]


@pytest.mark.parametrize("plant", RING_BUGS, ids=lambda plant: plant.__name__)
def test_a_bug_in_rings_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three runs ends with an alarm."""
    plant(monkeypatch)
    with pytest.raises((IntegrityError, AssertionError, KeyError, ValueError, PageError)) as alarm:
        collections.deque(drive(seed, layout=RINGS) for seed in range(3))
    assert "nothing was used again" not in str(alarm.value)
