"""Processes that a bench measures: a router, its worker, and proxies to compare with. Needs Linux (``/proc``)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

#: Followed by ``worker`` or ``relay``: see ``proxy_parts``.
PARTS: Final = (sys.executable, "-m", "router.bench.proxy_parts")
ROUTER: Final = (sys.executable, "-m", "router.cli", "router", "--admin-port", "0", "--log-level", "error")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class CannotRun(Exception):
    """Something that a bench needs is not there. The message is a plain sentence."""


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[tuple[int, str]]:
    """A running part: its process id and the line that says it is ready."""
    running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert running.stdout is not None
        yield running.pid, (await asyncio.wait_for(running.stdout.readline(), 30)).decode()
    finally:
        running.kill()
        await running.wait()


@asynccontextmanager
async def router(worker_ready: str, *options: str) -> AsyncIterator[tuple[int, int]]:
    """A router before the worker that said this: its process id and port, once it takes requests."""
    async with process(*ROUTER, "--port", "0", "--worker", worker_url(worker_ready), *options) as (pid, ready):
        port = int(ready.split("data=http://127.0.0.1:")[1].split()[0])
        await answers(port)
        yield pid, port


def worker_url(ready: str) -> str:
    """Where the worker is that said this line."""
    return f"http://127.0.0.1:{ready.split('port=')[1].strip()}"


async def answers(port: int) -> None:
    """Wait until a proxy takes requests for the model."""
    body = b'{"model":"bench","messages":[{"role":"user","content":"hi"}]}'
    async with asyncio.timeout(60):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
                    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
                )
                status = await reader.readline()
                writer.close()
                if b" 200 " in status:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.2)


def processor_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_bytes(pid: int) -> int:
    """What a process has in memory now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
