"""Contexts longer than the device's pool, beside short ones, under any arrivals, aborts, failures and restarts."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from test_offload_machine import OffloadMachine

from engine_shim.cache.transfers import WritePolicy
from engine_shim.types import SchedulingPolicy, WindowTails


class LongContextMachine(OffloadMachine):
    """As the machine over host and disk; most contexts do not fit the device, and the host holds one to three."""

    longest = 150

    @initialize(
        page=st.integers(1, 3),
        window=st.none() | st.integers(1, 7),
        full_pages=st.integers(3, 16),
        spare_window_pages=st.integers(2, 12),
        state_slots=st.none() | st.integers(3, 8),
        checkpoint_pages=st.integers(2, 9),
        chunk=st.integers(1, 20),
        running=st.integers(1, 5),
        drafts=st.sampled_from([0, 3]),
        tails=st.sampled_from(WindowTails),
        layers=st.integers(1, 3),
        ring=st.integers(1, 6),
        seed=st.integers(0, 5),
        scheduling=st.sampled_from(SchedulingPolicy),
        host=st.integers(20, 110),
        disk=st.none() | st.integers(60, 200),
        policy=st.sampled_from(WritePolicy),
        piece=st.integers(1, 9),
        overlaps=st.booleans(),
    )
    def start(self, *, head: bool = False, **options: object) -> None:
        super().start(head=head, **options)

    @rule(
        tokens=st.lists(st.integers(1, 3), min_size=10, max_size=60),
        parent=st.integers(0, 30),
        cut=st.integers(0, 150),
        max_tokens=st.integers(1, 40),
        priority=st.integers(-1, 1),
    )
    def add_long(self, tokens: list[int], parent: int, cut: int, max_tokens: int, priority: int = 0) -> None:
        """A prompt that is long by itself or by what it goes on from."""
        self.add(tokens, parent, cut, max_tokens, True, "", priority=priority)


LongContextMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLongContexts = LongContextMachine.TestCase


def walk(seed: int, *, steps: int = 150, tails: WindowTails = WindowTails.STORED) -> LongContextMachine:
    """A few long heads that come again and again, and short prompts between them."""
    rng = random.Random(seed)
    machine = LongContextMachine()
    page = 1 + seed % 3
    machine.start(
        page=page,
        window=(None, 5, 7)[seed % 3],
        full_pages=rng.randint(5, 20 // page),
        spare_window_pages=rng.randint(3, 6),
        state_slots=rng.randint(5, 8) if seed % 2 else None,
        checkpoint_pages=rng.randint(3, 8),
        chunk=rng.randint(3, 25),
        running=rng.randint(1, 4),
        drafts=rng.choice([0, 3]),
        tails=tails,
        layers=1 + seed % 2,
        ring=rng.randint(1, 6),
        seed=seed,
        scheduling=list(SchedulingPolicy)[seed // 2 % 2],
        host=rng.choice([100, 180, 400]) // page,
        disk=rng.choice([None, 900 // page]),
        policy=list(WritePolicy)[seed % 3],
        piece=rng.randint(1, 9),
        overlaps=rng.random() < 0.7,
    )
    for _ in range(steps):
        match rng.choice(("add", "long", "steps", "steps", "steps", "ahead", "one", "end", "abort", "break", "rare")):
            case "add" if len(machine.scheduler._entries) < 6:
                tokens = [rng.randint(1, 3) for _ in range(rng.randint(1, 8))]
                machine.add(tokens, rng.randint(0, len(machine.requests)), rng.randint(0, 10), 6, True, "")
            case "long" if len(machine.scheduler._entries) < 6:
                tokens = [rng.randint(1, 3) for _ in range(rng.choice([2, 9, 60]))]
                recent = max(0, len(machine.requests) - 12)
                parent = rng.randint(recent, len(machine.requests))
                machine.add_long(tokens, parent, rng.choice([0, 40, 80, 150]), rng.randint(1, 30), -parent % 3)
            case "steps":
                machine.steps(rng.randint(1, 8))
            case "ahead":
                machine.steps_ahead(rng.randint(1, 5))
            case "one" if machine.batch is None:
                machine.launch()
            case "one":
                machine.land()
            case "end":
                machine.transfers_end(rng.randrange(4), 2, rng.randrange(10))
            case "abort":
                machine.abort(rng.randint(0, len(machine.requests)))
            case "break":
                machine.break_next_load()
            case "rare" if rng.random() < 0.1 and machine.batch is not None:
                machine.fail()
            case "rare" if rng.random() < 0.1:
                machine.reset()
            case "rare" if rng.random() < 0.1 and machine.sizes[1] is not None:
                machine.restart()
        machine.agrees()
    machine.teardown()
    return machine


@pytest.mark.parametrize("tails", WindowTails)
@pytest.mark.parametrize("seed", [2, 4])
def test_long_random_walks(seed: int, tails: WindowTails) -> None:
    """Many steps, and after each of them pages, copies, answers and events agree; with windows of every kind."""
    machine = walk(seed, tails=tails)
    assert machine.layout.window_tails is tails
    assert machine.memory.host_reads > 500


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_long_random_walks_with_states(seed: int) -> None:
    """The same for full attention alone and beside recurrent layers."""
    assert walk(seed).memory.host_reads > 500
