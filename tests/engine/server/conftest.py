"""The shim that most of these tests talk to."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from shim_process import SIM, ShimProcess, running_shim, wait_until


@pytest.fixture(scope="session")
def sim() -> Iterator[ShimProcess]:
    """Two ranks of the needle model under the sim runner, one millisecond a token."""
    with running_shim(*SIM, "--dp-size", "2", "--max-body-bytes", "100000") as shim:
        yield shim


@pytest.fixture
def client(sim: ShimProcess) -> Iterator[httpx.Client]:
    """A client of ``sim``, whose caches are empty."""
    with httpx.Client(base_url=sim.url, timeout=60) as client:
        wait_until(lambda: client.post("/reset_prefix_cache").json() == {"success": True})
        yield client
