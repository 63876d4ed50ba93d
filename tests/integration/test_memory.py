"""What a connection costs the router in memory: what ten thousand idle clients and a thousand streams rest on."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import httpx
import pytest

from loadtest.faulty_worker import MODEL, FaultyWorker
from tests.integration.control.test_router_process import Running, homing

#: 10,000 idle connections in 400 MB, a process of 100 MB included; 1,000 streams in 300 MB.
IDLE_BYTES = 30_000
STREAM_BYTES = 200_000


def _rss_bytes(running: Running) -> int:
    line = next(
        line for line in Path(f"/proc/{running.process.pid}/status").read_text().splitlines() if "VmRSS" in line
    )
    return int(line.split()[1]) * 1024


def _request(text: str, *, stream: bool) -> bytes:
    body = json.dumps({"model": MODEL, "stream": stream, "messages": [{"role": "user", "content": text}]}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def _until_ready(running: Running) -> None:
    async with httpx.AsyncClient(base_url=running.words["data"], trust_env=False) as data, asyncio.timeout(15):
        while (await data.get("/readyz")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_idle_clients_and_streams_cost_little() -> None:
    """2,000 clients that have asked and stay, then 300 streams with prompts of 20 kB: so much each, and no more."""
    worker = FaultyWorker(reset_ratio=0.0, rng=random.Random(0))
    await worker.start()
    manager = homing("router", "--port", "0", "--admin-port", "0", "--log-level", "error", "--worker", worker.url)
    running = await asyncio.to_thread(manager.__enter__)
    try:
        await _until_ready(running)
        host, port = running.words["data"].removeprefix("http://").rsplit(":", 1)

        async def ask(request: bytes, until: bytes) -> asyncio.StreamWriter:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            await reader.readuntil(until)
            return writer

        for _ in range(100):
            warm = await ask(_request("warm", stream=False), b"\r\n\r\n")
            warm.transport.abort()
            await asyncio.sleep(0.02)
        before = _rss_bytes(running)
        idle = [await ask(_request("hi", stream=False), b"}}}") for _ in range(2000)]
        idle_bytes = (_rss_bytes(running) - before) / len(idle)

        before = _rss_bytes(running)
        worker.event_seconds = 60.0
        streams = [await ask(_request("x" * 20_000, stream=True), b"\r\n\r\n") for _ in range(300)]
        stream_bytes = (_rss_bytes(running) - before) / len(streams)
        for writer in (*idle, *streams):
            writer.transport.abort()
        print(f"an idle client {idle_bytes / 1000:.1f} kB, a stream {stream_bytes / 1000:.1f} kB")
        assert idle_bytes < IDLE_BYTES
        assert stream_bytes < STREAM_BYTES
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
        await worker.kill()
