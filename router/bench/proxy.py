"""What a request costs on its way through the router, in processor time, beside a relay that does nothing else.

Processor time of the proxy's own process, so neither the load generator's speed nor other processes enter. Only
ratios between rows of one run mean anything. Needs Linux (``/proc``).

A peer is any command that listens on {port} and forwards to {worker}:

    homing bench proxy --peer 'other=other-router --port {port} --worker-urls {worker}'
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final

import httptools
import uvloop

from router.bench.proxy_parts import EVENTS
from router.bench.running import PARTS, CannotRun, answers, process, processor_seconds, router, worker_url
from router.option_values import seconds, whole


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request; ``unit`` is what is counted."""

    name: str
    prompt_bytes: int
    connections: int
    is_stream: bool = False

    @property
    def unit(self) -> str:
        """What one row's time is of."""
        return "event" if self.is_stream else "request"


CASES: Final = (Case("500 B", 500, 64), Case("100 kB", 100_000, 64), Case("streams", 500, 50, is_stream=True))


class _Client(asyncio.Protocol):
    """Asks again as soon as it is answered. Two sessions' worth of headers."""

    def __init__(self, case: Case, done: list[int]) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._case = case
        self._done = done
        self._number = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are no subclass of asyncio's
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            raise RuntimeError(f"answered {self._parser.get_status_code()}")
        self._done[0] += EVENTS if self._case.is_stream else 1
        self._ask()

    def _ask(self) -> None:
        self._number += 1
        stream = b"true" if self._case.is_stream else b"false"
        prompt = b"abcd " * (self._case.prompt_bytes // 5)
        body = b'{"stream":%b,"model":"bench","messages":[{"role":"user","content":"%b"}]}' % (stream, prompt)
        if self._transport is not None:
            self._transport.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
                b"user-agent: bench\r\naccept: application/json\r\nx-session-id: session-%d\r\n"
                b"content-length: %d\r\n\r\n%b" % (self._number % 2, len(body), body)
            )

    def close(self) -> None:
        """Ask no more."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


async def _measure(port: int, pid: int, case: Case, seconds: float) -> float:
    """Microseconds of processor time that the process ``pid`` spends on one unit."""
    loop, done = asyncio.get_running_loop(), [0]
    clients = [
        (await loop.create_connection(lambda: _Client(case, done), "127.0.0.1", port))[1]
        for _ in range(case.connections)
    ]
    await asyncio.sleep(min(1.0, seconds / 2))  # warm, and past the first connections
    before, done[0] = processor_seconds(pid), 0
    await asyncio.sleep(seconds)
    spent = processor_seconds(pid) - before
    for client in clients:
        client.close()
    await asyncio.sleep(0.1)
    return spent / max(1, done[0]) * 1e6


@asynccontextmanager
async def _peer(name: str, command: str, worker: str) -> AsyncIterator[tuple[int, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    words = shlex.split(command.format(port=port, worker=worker))
    try:
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.DEVNULL)
    except OSError as error:
        raise CannotRun(f"{words[0]} cannot be run: {error.strerror or error}") from error
    try:
        await _until_ready(name, port, process)
        yield process.pid, port
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_ready(name: str, port: int, process: asyncio.subprocess.Process) -> None:
    """Raises ``CannotRun`` for a peer that ends, or does not answer for a minute."""
    ready, ended = asyncio.ensure_future(answers(port)), asyncio.ensure_future(process.wait())
    await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if not ready.done():
        ready.cancel()
        raise CannotRun(f"the peer {name} ended with status {process.returncode}")
    try:
        await ready
    except TimeoutError as error:
        raise CannotRun(f"the peer {name} does not answer on the port it was given") from error


async def _run(seconds: float, runs: int, peers: dict[str, str]) -> None:
    async with (
        process(*PARTS, "worker") as (_, ready),
        process(*PARTS, "relay", ready.split("port=")[1].strip()) as (relay_pid, relay_ready),
        router(ready) as (router_pid, router_port),
    ):
        relay_port = int(relay_ready.split("port=")[1])
        rows = [("bare relay", relay_pid, relay_port), ("homing", router_pid, router_port)]
        found = await _table(rows, seconds, runs)
        for name, command in peers.items():
            async with _peer(name, command, worker_url(ready)) as (pid, port):
                # The router once more beside each peer: machines change from minute to minute.
                beside = await _table([("homing", router_pid, router_port), (name, pid, port)], seconds, runs)
                found |= {(row, case): value for (row, case), value in beside.items() if row == name}
                found |= {(f"homing beside {name}", case): v for (row, case), v in beside.items() if row == "homing"}
        _show(found)


async def _table(rows: Sequence[tuple[str, int, int]], seconds: float, runs: int) -> dict[tuple[str, str], float]:
    """Microseconds by row and case: the median of ``runs``, taken in turns."""
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(runs):
        for case in CASES:
            for name, pid, port in rows:
                taken.setdefault((name, case.name), []).append(await _measure(port, pid, case, seconds))
    return {key: median(values) for key, values in taken.items()}


def _show(found: dict[tuple[str, str], float]) -> None:
    print("processor time, us; in brackets as a multiple of the bare relay's")
    width = max(len(name) for name, _ in found)
    for name in dict.fromkeys(name for name, _ in found):
        values = ((case, found[name, case.name], found["bare relay", case.name]) for case in CASES)
        cells = (
            f"{case.name} {value:8.1f} a {case.unit} ({value / floor if floor else math.inf:4.1f})"
            for case, value, floor in values
        )
        print(f"{name:{width}}  " + "   ".join(cells))


def _named(text: str) -> tuple[str, str]:
    name, _, command = text.partition("=")
    try:
        words = shlex.split(command.format(port=0, worker="http://127.0.0.1:0"))
    except (LookupError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{command!r} is no command: {error}") from error
    if not name or not words:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND")
    return name, command


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="homing bench proxy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=seconds, default=3.0, help="of each measurement (default: 3)")
    parser.add_argument("--runs", type=whole(1), default=3, help="medians are of so many (default: 3)")
    parser.add_argument(
        "--peer", action="append", type=_named, default=[], metavar="NAME=COMMAND", help="may be repeated"
    )
    options = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(options.seconds, options.runs, dict(options.peer)))
    return 0
