"""What the tree would let a prompt resume behind, the copies below the device do as well."""

from __future__ import annotations

import random
from collections import deque

import pytest
from test_offload_machine import OffloadMachine

from engine_shim.cache.component import Component, WindowComponent
from engine_shim.cache.transfers import WritePolicy
from engine_shim.types import Request, SchedulingPolicy, WindowTails


def come_back(seed: int, tails: WindowTails) -> int:
    """Conversations with room for everything, every transfer arrives; then each prompt again, on an empty device.

    Each resumes where the tree would have let it, or where its window is rebuilt. Returns how many end on a page.
    """
    rng = random.Random(seed)
    machine = OffloadMachine()
    machine.start(
        page=2 + seed % 3,
        window=(5, 9, None)[seed % 3],
        full_pages=600,
        spare_window_pages=400,
        state_slots=200 if seed % 2 and tails is WindowTails.STORED else None,
        checkpoint_pages=rng.randint(1, 4),
        chunk=rng.randint(3, 13),
        running=rng.randint(1, 4),
        drafts=rng.choice([0, 3]),
        head=rng.random() < 0.5,
        tails=tails,
        layers=1 + seed % 2,
        ring=rng.randint(1, 6),
        seed=seed,
        scheduling=SchedulingPolicy.FCFS,
        host=1200,
        disk=1200 if seed % 4 < 2 else None,
        policy=WritePolicy.THROUGH,
        piece=rng.randint(1, 9),
        overlaps=rng.random() < 0.7,
    )

    def ask(tokens: list[int], parent: int, cut: int, max_tokens: int) -> Request:
        machine.add(tokens, parent, cut, max_tokens, True, "", 0)
        while machine.scheduler.has_work:
            machine.steps(3)
        machine.settle()
        return list(machine.requests.values())[-1]

    for number in range(12):
        tokens = [rng.randint(1, 3) for _ in range(rng.randint(1, 20))]
        ask(tokens, rng.randint(0, number), rng.randint(0, 30), rng.randint(1, 3))
    layout, page = machine.layout, machine.layout.page_tokens
    expected = {}
    for request in machine.requests.values():
        match = machine.scheduler._memory.cache.match("", request.prompt[:-1])
        stored = layout.window_tails is WindowTails.STORED
        expected[request.prompt] = page * match.pages if stored else layout.rebuild_tokens(match.full_pages)
    for prompt, tokens in expected.items():
        cache = machine.scheduler._memory.cache
        if machine.sizes[1] is not None:
            machine.restart()
        for group, pool in enumerate(cache.pools):
            cache.evict(group, pool.total)
        assert ask(list(prompt), len(machine.requests), 0, 1).cached_tokens >= tokens
    machine.teardown()
    return sum(len(prompt) % page == 0 and tokens > 0 for prompt, tokens in expected.items())


@pytest.mark.parametrize("tails", WindowTails)
def test_what_the_device_would_give_comes_back(tails: WindowTails) -> None:
    """From the host, and after a restart from the disk, for prompts of any length."""
    assert sum(come_back(seed, tails) for seed in range(12)) > 10


def test_a_copied_window_that_ends_with_the_prompt_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: no page more than the last boundary needs, behind which a prompt of whole pages cannot resume."""
    monkeypatch.setattr(WindowComponent, "to_copy", Component.to_copy)
    with pytest.raises(AssertionError):
        deque((come_back(seed, WindowTails.STORED) for seed in range(12)), maxlen=0)
