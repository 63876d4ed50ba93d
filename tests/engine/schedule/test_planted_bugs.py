"""The watchmen have power: for each class of cache bug one is planted, and some watchman finds it.

Watchmen are the shadow (what a step reads and writes), the recount of the cache after every step, and a replay of the
events. Clean code passes the same traffic, through pools so small that pages and states are used again all the time.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kv_memory import EOS, expected_output

from engine_shim.cache.component import Component, StateComponent, WindowComponent
from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.pool import PageError, PagePool
from engine_shim.cache.radix import RadixCache
from engine_shim.runner.shadow import ShadowError, ShadowRunner
from engine_shim.schedule.memory import Memory
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.schedule.windows import Windows
from engine_shim.types import (
    Batch,
    CacheGroup,
    CacheLayout,
    Chunk,
    FinishReason,
    GroupKind,
    Request,
    Sampled,
    Sampling,
    WindowTails,
)
from router.wire.kv_events import BlockRemoved, BlockStored

PAGE, WINDOW = 4, 10
LAYOUT = CacheLayout(
    PAGE,
    (
        CacheGroup(0, GroupKind.FULL, (1,)),
        CacheGroup(1, GroupKind.WINDOW, (0,), WINDOW),
        CacheGroup(2, GroupKind.STATE, (2,)),
    ),
    (90, 50, 14),
    checkpoint_tokens=16,
)
RINGS = CacheLayout(
    PAGE, LAYOUT.groups[:2], LAYOUT.pages[:2], checkpoint_tokens=16, window_tails=WindowTails.RING, ring_pages=7
)
Perturb = Callable[[Batch], Batch]


class Oracle:
    """Answers what must be answered, without looking at any page: only the watchmen can notice a wrong one."""

    def run(self, batch: Batch) -> list[Sampled]:
        sampled = []
        for chunk in batch.chunks:
            if chunk.samples:
                sampling = replace(chunk.request.sampling, max_tokens=1000, ignore_eos=True)
                sampled.append(Sampled((expected_output(chunk.request.prompt, sampling)[0][chunk.draws],)))
        return sampled


def drive(
    seed: int, *, perturb: Perturb = lambda batch: batch, steps: int = 150, layout: CacheLayout = LAYOUT
) -> ShadowRunner:
    """Conversations that grow, fork and are aborted, watched at every step."""
    rng = random.Random(seed)
    scheduler = Scheduler(layout, max_running=4, chunk_tokens=24, max_context_tokens=150, eos_token_ids={EOS})
    runner = ShadowRunner(Oracle(), layout, generations=scheduler.generations)
    histories = [tuple(rng.randrange(11) for _ in range(40)) for _ in range(2)]
    resident: dict[int, set[int | bytes]] = {0: set(), 1: set(), 2: set()}
    names = 0
    for _ in range(steps):
        if rng.random() < 0.5:
            history = rng.choice(histories[-4:])
            cut = len(history) if rng.random() < 0.6 else rng.randrange(len(history))
            prompt = (*history[:cut][:100], *(rng.randrange(11) for _ in range(rng.randint(1, 9))))
            scheduler.add(Request(str(names), prompt, Sampling(rng.randint(1, 25), ignore_eos=True)))
            names += 1
        batch = scheduler.schedule()
        if rng.random() < 0.1 and names:
            scheduler.abort(str(rng.randrange(names)))
        if batch is not None:
            outputs = scheduler.commit(batch, runner.run(perturb(batch)))
            histories += [tuple(out.request.tokens) for out in outputs if out.finish is FinishReason.LENGTH]
        scheduler.drain_outputs()
        scheduler.check_integrity()
        for event in scheduler.take_events():
            match event:
                case BlockStored():
                    resident[event.group].update(event.hashes)
                case BlockRemoved():
                    resident[event.group].difference_update(event.hashes)
        told = {0: set(), 1: set(), 2: set()}
        for event in scheduler.snapshot_events():
            told[event.group].update(event.hashes)
        assert resident == told, "the events do not add up to what is resident"
    evicted = scheduler.stats().evicted_pages
    if layout is RINGS:  # whose windows are never evicted, but written over
        evicted = (evicted[0], sum(scheduler.generations[1]))
    assert min(evicted) > 10, f"nothing was used again: {evicted}"
    return runner


@pytest.mark.parametrize("layout", [LAYOUT, RINGS], ids=["shared", "rings"])
@pytest.mark.parametrize("seed", range(3))
def test_clean_code_passes(seed: int, layout: CacheLayout) -> None:
    """No false alarm in 150 steps, of which every chunk is checked."""
    assert drive(seed, layout=layout).checked_chunks > 300


def test_a_sample_looks_at_one_chunk_in_turn() -> None:
    """Of every third step one chunk: three requests decode side by side, and each of them has its turn."""
    scheduler = Scheduler(LAYOUT, max_context_tokens=150)
    runner = ShadowRunner(Oracle(), LAYOUT, generations=scheduler.generations, every_steps=3, sample=True)
    for name in "abc":
        scheduler.add(Request(name, (ord(name), 1, 2), Sampling(20, ignore_eos=True)))
    for _ in range(9):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.commit(batch, runner.run(batch))
    assert runner.checked_chunks == 3


# --- bugs in the engine --------------------------------------------------------------------------------


def early_window_release(patch: pytest.MonkeyPatch) -> None:
    """Window pages go one page too soon."""
    slide = Windows.slide

    def bad(self: Windows, entry: Any, *, at_prompt_end: bool) -> None:
        self.reach_pages -= 1
        slide(self, entry, at_prompt_end=at_prompt_end)
        self.reach_pages += 1

    patch.setattr(Windows, "slide", bad)


def match_without_window(patch: pytest.MonkeyPatch) -> None:
    """A boundary is believed usable though one page less than the window is there."""
    init = WindowComponent.__init__

    def bad(self: WindowComponent, *arguments: Any) -> None:
        init(self, *arguments)
        self._reach -= 1

    patch.setattr(WindowComponent, "__init__", bad)


def match_of_another_position(patch: pytest.MonkeyPatch) -> None:
    """A state is taken for one of an earlier boundary in its run."""
    patch.setattr(StateComponent, "validator", lambda self: lambda node, pages: node.held[self.index] is not None)


def state_moves_on_split(patch: pytest.MonkeyPatch) -> None:
    """A node that is cut gives its state to the upper half."""

    def bad(self: StateComponent, upper: Any, lower: Any, pages: int) -> None:
        if lower.held[self.index] is not None and not lower.locks[self.index]:
            slots = lower.held[self.index]
            self.unlocked.remove(lower, 1)
            lower.held[self.index] = None
            upper.held[self.index] = slots
            self.unlocked.add(upper, 1)

    patch.setattr(StateComponent, "split", bad)


def state_written_in_place(patch: pytest.MonkeyPatch) -> None:
    """The tree's state is written by whoever reads it."""
    extend = Memory.extend

    def bad(self: Memory, entry: Any, tokens: int) -> None:
        table = entry.request.tables[2]
        if table[0] and not table[1]:
            table[1] = table[0]
        extend(self, entry, tokens)

    patch.setattr(Memory, "extend", bad)


def no_lock_on_states(patch: pytest.MonkeyPatch) -> None:
    """A state that is about to be read may be evicted."""
    patch.setattr(StateComponent, "extent", lambda self, pages: 0)


def receipt_not_replayed(patch: pytest.MonkeyPatch) -> None:
    """Releasing leaves the window locked."""
    release = RadixCache.release

    def bad(self: RadixCache, receipt: Any) -> None:
        release(self, replace(receipt, extents=(receipt.extents[0], 0, receipt.extents[2])))

    patch.setattr(RadixCache, "release", bad)


def freed_while_read(patch: pytest.MonkeyPatch) -> None:
    """Eviction takes no notice of locks in the full group."""

    def bad(self: Component, node: Any) -> None:
        node.locks[self.index] += 1

    patch.setattr(Component, "lock", bad)


def pages_leak(patch: pytest.MonkeyPatch) -> None:
    """Twins that the tree did not take are forgotten."""
    store = RadixCache.insert
    patch.setattr(RadixCache, "insert", lambda *arguments: tuple([] for _ in store(*arguments)))


def abort_frees_at_once(patch: pytest.MonkeyPatch) -> None:
    """An abort does not wait for the batch that still writes the request's pages."""
    abort = Scheduler.abort

    def bad(self: Scheduler, name: str) -> bool:
        if name in self._entries:
            self._entries[name].launches = 0
        return abort(self, name)

    patch.setattr(Scheduler, "abort", bad)


def untold_removals(patch: pytest.MonkeyPatch) -> None:
    """Window pages and states go without an event, as in engines that tell of full pages only."""
    removed = EventRecorder.removed

    def bad(self: EventRecorder, group: int, hashes: Any) -> None:
        if group == 0:
            removed(self, group, hashes)

    patch.setattr(EventRecorder, "removed", bad)


def handed_out_twice(patch: pytest.MonkeyPatch) -> None:
    """The pool now and then gives a page to two owners."""
    allocate = PagePool.allocate
    calls = [0]

    def bad(self: PagePool, pages: int) -> list[int]:
        taken = allocate(self, pages)
        calls[0] += 1
        if calls[0] % 50 == 0 and taken:
            self._free.append(taken[0])
        return taken

    patch.setattr(PagePool, "allocate", bad)


def tree_s_window_freed(patch: pytest.MonkeyPatch) -> None:
    """A request lets go of window pages below the part that it owns: they are the tree's."""
    slide = Windows.slide

    def bad(self: Windows, entry: Any, *, at_prompt_end: bool) -> None:
        entry.window_own_from = 0
        slide(self, entry, at_prompt_end=at_prompt_end)

    patch.setattr(Windows, "slide", bad)


def stale_pages_kept(patch: pytest.MonkeyPatch) -> None:
    """Full pages stay though no boundary in them can be used any more."""
    patch.setattr(RadixCache, "_prune", lambda self, node: None)


def lock_short_of_the_window(patch: pytest.MonkeyPatch) -> None:
    """A lock covers one page less than the window."""
    extent = WindowComponent.extent
    patch.setattr(WindowComponent, "extent", lambda self, pages: max(0, extent(self, pages) - 1))


def table_too_short(patch: pytest.MonkeyPatch) -> None:
    """A step gets tables that are a page shorter than what it writes."""
    extend = Memory.extend
    patch.setattr(Memory, "extend", lambda self, entry, tokens: extend(self, entry, max(0, tokens - PAGE)))


BUGS = [
    early_window_release,
    tree_s_window_freed,
    stale_pages_kept,
    lock_short_of_the_window,
    table_too_short,
    match_without_window,
    match_of_another_position,
    state_moves_on_split,
    state_written_in_place,
    no_lock_on_states,
    receipt_not_replayed,
    freed_while_read,
    pages_leak,
    abort_frees_at_once,
    untold_removals,
    handed_out_twice,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three runs ends with an alarm."""
    plant(monkeypatch)
    with pytest.raises((IntegrityError, AssertionError, KeyError, ValueError, IndexError, PageError)) as alarm:
        collections.deque(map(drive, range(3)))
    assert "nothing was used again" not in str(alarm.value)


# --- a step that reads or writes elsewhere ---------------------------------------------------------------


def _changed(batch: Batch, change: Callable[[Chunk], Chunk | None]) -> Batch:
    """The batch with one chunk changed, if ``change`` finds one to its liking."""
    for index, chunk in enumerate(batch.chunks):
        new = change(chunk)
        if new is not None:
            return Batch((*batch.chunks[:index], new, *batch.chunks[index + 1 :]))
    return batch


def _table(chunk: Chunk, group: int, table: list[int]) -> Chunk:
    tables = list(chunk.tables)
    tables[group] = table
    return replace(chunk, tables=tuple(tables))


def pages_swapped(chunk: Chunk) -> Chunk | None:
    table = list(chunk.tables[0])
    return _table(chunk, 0, [table[1], table[0], *table[2:]]) if chunk.start >= 2 * PAGE else None


def one_page_off(chunk: Chunk) -> Chunk | None:
    table = list(chunk.tables[1])
    return _table(chunk, 1, [*table[1:], table[0]]) if chunk.start >= 4 * PAGE else None


def a_null_page(chunk: Chunk) -> Chunk | None:
    table = list(chunk.tables[0])
    return _table(chunk, 0, [0, *table[1:]]) if chunk.start >= PAGE else None


def a_state_from_nowhere(chunk: Chunk) -> Chunk | None:
    source, target = chunk.tables[2]
    return _table(chunk, 2, [source % 13 + 1, target]) if chunk.start else None


def prefix_written_over(chunk: Chunk) -> Chunk | None:
    """The page in progress is the first page of the context."""
    table = list(chunk.tables[0])
    if chunk.start < PAGE or chunk.start % PAGE:
        return None
    table[chunk.start // PAGE] = table[0]
    return _table(chunk, 0, table)


@pytest.mark.parametrize(
    "change", [pages_swapped, one_page_off, a_null_page, a_state_from_nowhere, prefix_written_over]
)
def test_a_step_with_a_wrong_table_is_stopped(change: Callable[[Chunk], Chunk | None]) -> None:
    """The shadow names the request and the position of the first wrong slot."""
    with pytest.raises(ShadowError, match=r"request '\d+' (reads a wrong|writes position \d+ of group 0 over)"):
        drive(0, perturb=lambda batch: _changed(batch, change))
