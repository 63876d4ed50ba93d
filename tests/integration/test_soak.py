"""The soak, short: the same faults, some thousands of requests."""

from __future__ import annotations

import random
import socket

import pytest

from loadtest.faulty_worker import FaultyWorker
from loadtest.soak import Plan, soak


async def test_a_dead_worker_keeps_its_port() -> None:
    """Of the many connections that are made meanwhile none is given it, and it comes back there."""
    worker = FaultyWorker(reset_ratio=0.0, rng=random.Random(1))
    await worker.start()
    port = worker.port
    await worker.kill()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    await worker.start()
    assert worker.port == port
    await worker.kill()


async def test_no_answer_is_lost_or_doubled_and_nothing_is_left() -> None:
    """Clients leave, workers reset, one dies and comes back: each answer is whole and its own or says that it broke."""
    plan = Plan(requests=3000, clients=32, workers=3, dead_seconds=1.0, max_growth_bytes=4_000_000)
    tally = await soak(plan)
    assert not tally.wrong
    assert sum(tally.outcomes.values()) == plan.requests
    assert tally.resets > 0
    assert set(tally.outcomes) <= {"answered", "left", "broken off"}
    # The share that leaves is 5 %, that which breaks in mid-stream 2 % of half, and what the dying worker had begun.
    assert tally.outcomes["answered"] > 0.9 * plan.requests
