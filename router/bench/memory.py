"""What clients cost the router in memory: those that idle, those that stream, and those that do not read.

The resident memory of the router's own process, before and after so many clients of a kind have come. Clients that do
not read are sent as much as the router takes; what the kernel holds for their sockets is not counted. Needs Linux
(``/proc``) and as many open files as there are clients.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import Sequence
from typing import Final

import uvloop

from router.bench.proxy_parts import FLOODS, HOLDS
from router.bench.running import PARTS, CannotRun, process, resident_bytes, router
from router.option_values import whole

#: So many rounds of clients come and go before anything is counted: what is kept of requests as such is not a client's.
_WARM_ROUNDS: Final = 30
#: Until what was freed has been given back, and a flood has filled all that it fills.
_SETTLE_SECONDS: Final = 2.0
_AT_ONCE: Final = 64
#: Files that are open besides, here and in the router.
_SPARE_FILES: Final = 200


def _request(prompt_bytes: int, *, stream: bool, user: bytes = b"") -> bytes:
    """A chat request; ``user`` tells the worker how to answer it."""
    body = b'{"model":"bench","stream":%b,%b"messages":[{"role":"user","content":"%b"}]}' % (
        b"true" if stream else b"false",
        user + b"," if user else b"",
        b"abcd " * (prompt_bytes // 5),
    )
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


class _Client(asyncio.Protocol):
    """Asks once, and stays. ``answered`` is done with the first bytes; without ``reads`` it takes no more of them."""

    def __init__(self, request: bytes, *, reads: bool) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._reads = reads
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are no subclass of asyncio's
        if self._transport is not None:
            self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            self.answered.set_result(None)
        if not self._reads and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.answered.done():
            self.answered.set_exception(ConnectionError("the router closed a connection"))

    def leave(self) -> None:
        """Go without a word."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


async def _come(port: int, request: bytes, *, clients: int, reads: bool = True) -> list[_Client]:
    """So many clients that have been answered, or have begun to be."""
    loop = asyncio.get_running_loop()
    come: list[_Client] = []
    while len(come) < clients:
        together = [
            (await loop.create_connection(lambda: _Client(request, reads=reads), "127.0.0.1", port))[1]
            for _ in range(min(_AT_ONCE, clients - len(come)))
        ]
        async with asyncio.timeout(60):
            await asyncio.gather(*(client.answered for client in together))
        come += together
    return come


IDLE: Final = _request(500, stream=False)
STREAM: Final = _request(20_000, stream=True, user=HOLDS)
FLOOD: Final = _request(500, stream=True, user=FLOODS)


async def _run(idle: int, streams: int, unread: int) -> None:
    kinds = (
        (f"{idle:,} idle clients, each with an answer behind it", IDLE, idle, True),
        (f"{streams:,} streams under way, of prompts of 20 kB", STREAM, streams, True),
        (f"{unread:,} clients that read nothing of a stream", FLOOD, unread, False),
    )
    async with process(*PARTS, "worker") as (_, ready):
        for name, request, clients, reads in kinds:
            in_all, each = await measure(ready, request, clients=clients, reads=reads)
            print(f"{name:52}  {in_all / 1e6:6.0f} MB in all, {each / 1e3:7.1f} kB each", flush=True)


async def measure(worker_ready: str, request: bytes, *, clients: int, reads: bool) -> tuple[int, float]:
    """Bytes of a router of its own with so many clients, and what each has added."""
    async with router(worker_ready, "--server.max-connections", str(clients + _AT_ONCE)) as (pid, port):
        for _ in range(_WARM_ROUNDS):
            for client in await _come(port, IDLE, clients=_AT_ONCE):
                client.leave()
        await asyncio.sleep(_SETTLE_SECONDS)
        before = resident_bytes(pid)
        come = await _come(port, request, clients=clients, reads=reads)
        await asyncio.sleep(_SETTLE_SECONDS)
        after = resident_bytes(pid)
        for client in come:
            client.leave()
        return after, (after - before) / clients


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="homing bench memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--idle", type=whole(1), default=10_000, help="clients (default: 10000)")
    parser.add_argument("--streams", type=whole(1), default=1000, help="at once (default: 1000)")
    parser.add_argument("--unread", type=whole(1), default=50, help="clients that do not read (default: 50)")
    options = parser.parse_args(argv)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = max(options.idle, options.streams, options.unread)
    if most != resource.RLIM_INFINITY and clients + _SPARE_FILES > most:
        raise CannotRun(f"{clients:,} clients are more than the {most:,} files that may be open (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # and of the processes started here
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(options.idle, options.streams, options.unread))
    return 0
