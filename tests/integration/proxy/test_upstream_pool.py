"""Connections to workers, without a router around them: what one exchange leaves for the next."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.proxy.receiver import AnswerHead, Failure
from router.proxy.upstream import UpstreamConnection, UpstreamPool
from router.settings import UpstreamSettings
from tests.fakes.fault_worker import FaultWorker, answer
from tests.fakes.proxy_rig import target


class Reader:
    """Takes one answer, and is behind as soon as it has come."""

    def __init__(self, connection: UpstreamConnection, *, pauses: bool) -> None:
        self._connection = connection
        self._pauses = pauses
        self.ended: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self.body = b""

    def on_answer(self, head: AnswerHead, length: int | None, begins: bytes) -> None:
        assert head.status == 200

    def on_body(self, data: bytes) -> None:
        self.body += data
        if self._pauses:
            self._connection.pause()

    def on_end(self, failure: Failure | None) -> None:
        self.ended.set_result(failure)

    def waits_on(self, silent_seconds: float, *, has_head: bool) -> bool:
        return True


async def test_a_connection_that_was_paused_to_the_end_serves_the_next_request() -> None:
    """Its client was slow to read the last piece. The next client's answer is read as if nothing had been."""
    pool = UpstreamPool(UpstreamSettings())
    async with FaultWorker([(answer(200, b"first"),), (answer(200, b"second"),)]) as worker, asyncio.timeout(20):
        connection = await pool.connect(target(worker.port))
        for body in (b"first", b"second"):
            assert isinstance(connection, UpstreamConnection)
            reader = Reader(connection, pauses=body == b"first")
            connection.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"", reader)
            assert await reader.ended is None
            assert reader.body == body
            pool.give_back(connection)
            connection = pool.take(target(worker.port))
        assert worker.connections == 1
        pool.close()


#: Of each TCP connection of this machine: addresses, and which timer runs, for how long.
CONNECTIONS = Path("/proc/net/tcp")
KEEPALIVE_TIMER = "02"


def timers(port: int) -> list[list[str]]:
    """Of what is connected to a port here: which timer, and for how many hundredths of a second, in hexadecimal."""
    fields = [line.split() for line in CONNECTIONS.read_text().splitlines()[1:]]
    return [each[5].split(":") for each in fields if each[2:4] == [f"0100007F:{port:04X}", "01"]]


@pytest.mark.skipif(not CONNECTIONS.exists(), reason="not Linux")
async def test_the_kernel_asks_after_workers() -> None:
    """A host that has lost its power says nothing, and probes of its process go elsewhere: after half a minute of
    silence the kernel asks on the connection itself.
    """
    pool = UpstreamPool(UpstreamSettings())
    async with FaultWorker() as worker, asyncio.timeout(20):
        assert isinstance(await pool.connect(target(worker.port)), UpstreamConnection)
        [(timer, left)] = timers(worker.port)
        assert timer == KEEPALIVE_TIMER
        assert 20 <= int(left, 16) / 100 <= 30
        pool.close()
        await worker.until(open_connections=0)
