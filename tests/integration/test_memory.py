"""What a connection costs the router in memory: what ten thousand idle clients and a thousand streams rest on."""

from __future__ import annotations

import sys

import pytest

from router.bench.memory import FLOOD, IDLE, STREAM, measure
from router.bench.running import PARTS, process

#: 10,000 idle connections in 400 MB, a process of 100 MB included; 1,000 streams in 300 MB; 1 MB for who does not read.
IDLE_BYTES = 30_000
STREAM_BYTES = 200_000
UNREAD_BYTES = 1_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("request_", "clients", "most_bytes", "reads"),
    [(IDLE, 2000, IDLE_BYTES, True), (STREAM, 300, STREAM_BYTES, True), (FLOOD, 20, UNREAD_BYTES, False)],
    ids=["idle", "streams", "unread"],
)
async def test_clients_cost_little(request_: bytes, clients: int, most_bytes: int, reads: bool) -> None:
    """Clients that have asked and stay, streams of prompts of 20 kB, clients that read nothing: so much each."""
    async with process(*PARTS, "worker") as (_, ready):
        _, each_bytes = await measure(ready, request_, clients=clients, reads=reads)
    assert each_bytes < most_bytes
