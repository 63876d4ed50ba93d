"""A router under random faults: clients that leave, workers that reset, one that dies and comes back.

Every request asks for a text of its own, so that a lost, doubled or swapped answer is seen for what it is. In the end
nothing may be left: no request under way, no connection, no load on any rank; and memory may not have grown.

    python -m loadtest.soak --requests 100000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.faulty_worker import MODEL, FaultyWorker, streamed_text

#: Gauges of what the router knows. All others tell what goes on, and must be zero when nobody asks anything.
_KNOWLEDGE = frozenset(
    {
        "homing_build_info",
        "homing_sessions",
        "homing_rank_up",
        "homing_rank_trust_ratio",
        "homing_rank_prefill_tokens_per_second",
        "homing_rank_breaker_open",  # that of the worker that died, until it is asked again
        "homing_rank_parity",
        "homing_index_blocks",
        "homing_index_orphan_blocks",
        "homing_index_entries",
        "homing_index_evicted_blocks",
        "homing_admission_on",
        "homing_admission_charged_tokens",
        "homing_shared_state_up",
        "homing_shared_state_replicas",
    }
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much, and how bad. Ratios are of requests; ``warm_at`` and ``kill_at`` are shares of the way.

    From ``warm_at`` on, when tables and buffers have their size, the router's memory may grow by ``max_growth_bytes``.
    """

    requests: int = 100_000
    clients: int = 64
    workers: int = 4
    abort_ratio: float = 0.05
    reset_ratio: float = 0.02
    warm_at: float = 0.2
    max_growth_bytes: int = 8_000_000
    kill_at: float = 0.4
    dead_seconds: float = 3.0
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """What became of the requests. ``wrong`` are sentences; there should be none."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    resets: int = 0
    rss_bytes: list[int] = field(default_factory=list)


async def soak(plan: Plan) -> Tally:
    """Start workers and a router, ask, and look at what is left."""
    rng = random.Random(plan.seed)
    workers = [FaultyWorker(reset_ratio=plan.reset_ratio, rng=rng) for _ in range(plan.workers)]
    for worker in workers:
        await worker.start()
    tally = Tally()
    try:
        async with _router(workers) as (process, data, admin):
            began = time.monotonic()
            asking = asyncio.create_task(_ask_all(plan, data, tally, rng))
            try:
                await _until(plan.warm_at, asking, plan, tally)
                tally.rss_bytes.append(_rss_bytes(process.pid))
                await _until(plan.kill_at, asking, plan, tally)
                await _kill_one(workers[0], asking, plan)
                await asking
            finally:
                asking.cancel()  # by Ctrl-C, it goes before the router
            tally.seconds = time.monotonic() - began
            await _check_quiet(admin, workers, tally)
            tally.rss_bytes.append(_rss_bytes(process.pid))
            tally.wrong += grown(tally.rss_bytes, plan.max_growth_bytes)
            process.terminate()
            if await process.wait() != 0:
                tally.wrong.append(f"the router ended with status {process.returncode}")
    finally:
        for worker in workers:
            await worker.kill()
    _check_doubles(workers, tally)
    tally.resets = sum(worker.resets for worker in workers)
    return tally


# --- asking ---------------------------------------------------------------------------------------


async def _ask_all(plan: Plan, data: tuple[str, int], tally: Tally, rng: random.Random) -> None:
    numbers = iter(range(plan.requests))

    async def client() -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for number in numbers:
            connection = connection or await asyncio.open_connection(*data)
            leaves = rng.random() < plan.abort_ratio
            outcome, keep = await _ask(*connection, number=number, leaves=leaves, rng=rng, tally=tally)
            tally.outcomes[outcome] += 1
            if not keep:
                connection[1].transport.abort()
                connection = None
        if connection is not None:
            connection[1].close()
            await connection[1].wait_closed()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(plan.clients):
            tasks.create_task(client())


async def _ask(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    number: int,
    leaves: bool,
    rng: random.Random,
    tally: Tally,
) -> tuple[str, bool]:
    """One request: what became of it, and whether the connection may be used again."""
    text, is_stream = f"text-{number}", bool(number % 2)
    messages = [{"role": "system", "content": "You repeat."}, {"role": "user", "content": text}]
    body = json.dumps({"model": MODEL, "stream": is_stream, "messages": messages}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\nx-session-id: session-%d\r\n"
        b"content-length: %d\r\n\r\n%b" % (number % 997, len(body), body)
    )
    if leaves:
        await asyncio.sleep(rng.random() * 0.01)
        return "left", False
    try:
        async with asyncio.timeout(30):
            status, content, whole = await _answer(reader)
    except (ConnectionError, asyncio.IncompleteReadError):
        # Only an answer that has begun and is no stream may end so.
        return ("cut off", False) if not is_stream else (_wrong(tally, f"{text}: a stream was cut off"), False)
    except TimeoutError:
        return _wrong(tally, f"{text}: no answer"), False
    if status != 200:
        return f"status {status}", whole
    said, ended = _said(content, is_stream=is_stream)
    if ended == "broken" and streamed_text(text).startswith(said):
        return "broken off", whole
    if ended != "whole" or said != (streamed_text(text) if is_stream else text):
        return _wrong(tally, f"{text}: {ended}, {said!r}"), False
    return "answered", whole


def _wrong(tally: Tally, sentence: str) -> str:
    tally.wrong.append(sentence)
    return "wrong"


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection lives on. Raises ``IncompleteReadError`` for one cut short."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head[9:12])
    if b"transfer-encoding: chunked" in head:
        pieces: list[bytes] = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            pieces.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
        content = b"".join(pieces)
    else:
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        content = await reader.readexactly(length)
    return status, content, b"connection: close" not in head


def _said(content: bytes, *, is_stream: bool) -> tuple[str, str]:
    """The answer's text, and how it ended: ``whole``, ``broken`` (with an error event), or neither."""
    if not is_stream:
        return json.loads(content)["choices"][0]["message"]["content"], "whole"
    events = [event.removeprefix(b"data: ") for event in content.split(b"\n\n") if event]
    said = ""
    for place, event in enumerate(events):
        if event == b"[DONE]":
            return said, "whole" if place == len(events) - 1 else "talks on after its end"
        value = json.loads(event)
        if "error" in value:
            return said, "broken" if place == len(events) - 1 else "talks on after an error"
        said += "".join(choice["delta"]["content"] for choice in value["choices"])
    return said, "without an end"


# --- breaking -------------------------------------------------------------------------------------


async def _until(share: float, asking: asyncio.Task[None], plan: Plan, tally: Tally) -> None:
    """Wait until so much of the way is gone."""
    while sum(tally.outcomes.values()) < share * plan.requests and not asking.done():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def _kill_one(worker: FaultyWorker, asking: asyncio.Task[None], plan: Plan) -> None:
    """A worker dies, and comes back after a while."""
    await worker.kill()
    await asyncio.wait([asking], timeout=plan.dead_seconds)
    await worker.start()


# --- looking --------------------------------------------------------------------------------------


async def _check_quiet(admin: str, workers: Sequence[FaultyWorker], tally: Tally) -> None:
    """Wait until all is quiet; what is not, is wrong."""
    deadline = time.monotonic() + 10.0
    async with httpx.AsyncClient(base_url=admin, trust_env=False) as client:
        while True:
            loud = list(loud_gauges((await client.get("/metrics")).text))
            if not loud or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.2)
    tally.wrong += [f"{name} is {value} with nobody asking" for name, value in loud]
    await asyncio.sleep(0.1)
    open_connections = sum(len(worker.connections) for worker in workers)
    if open_connections > 64 * len(workers):
        tally.wrong.append(f"{open_connections} connections to workers are open")


def loud_gauges(exposition: str) -> Iterator[tuple[str, float]]:
    """The router's gauges that say that something goes on, and how much."""
    for family in text_string_to_metric_families(exposition):
        if family.type == "gauge" and family.name.startswith("homing_") and family.name not in _KNOWLEDGE:
            yield from ((sample.name, sample.value) for sample in family.samples if sample.value)


def grown(rss_bytes: Sequence[int], max_growth_bytes: int) -> list[str]:
    """What there is to say against a router whose memory was this, from when it was warm to the end."""
    growth_bytes = rss_bytes[-1] - rss_bytes[0]
    if growth_bytes <= max_growth_bytes:
        return []
    return [f"the router's memory grew by {growth_bytes / 1e6:.1f} MB, and may by {max_growth_bytes / 1e6:.1f} MB"]


def _check_doubles(workers: Sequence[FaultyWorker], tally: Tally) -> None:
    answered: Counter[str] = Counter()
    for worker in workers:
        answered.update(worker.answered)
    tally.wrong += [f"{text} was answered {count} times" for text, count in answered.items() if count > 1]


def _rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0  # not Linux: nothing is said of memory
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


class _router:  # noqa: N801 - a context manager, used like a function
    """A router before ``workers``: its process, the data plane's address, the admin plane's URL."""

    def __init__(self, workers: Sequence[FaultyWorker]) -> None:
        self._workers = workers
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> tuple[asyncio.subprocess.Process, tuple[str, int], str]:
        named = [word for worker in self._workers for word in ("--worker", worker.url)]
        ports = ("--port", "0", "--admin-port", "0", "--log-level", "error", "--probes.interval-seconds", "0.5")
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router.cli", "router", *ports, *named, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        host, port = words["data"].removeprefix("http://").rsplit(":", 1)
        async with httpx.AsyncClient(base_url=words["admin"], trust_env=False) as client, asyncio.timeout(30):
            while not all(  # noqa: ASYNC110
                worker["status"] == "ready" for worker in (await client.get("/admin/workers")).json()["workers"]
            ):
                await asyncio.sleep(0.1)
        return process, (host, int(port)), words["admin"]

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


# --- the command ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak and print what became of it. Returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.soak", description=__doc__.split("\n", 1)[0])
    default = Plan()
    for name, kind, what in (
        ("requests", int, "in all"),
        ("clients", int, "that ask at a time"),
        ("workers", int, "behind the router, of which one dies and comes back"),
        ("abort_ratio", float, "share of the requests whose client leaves"),
        ("reset_ratio", float, "share of the requests whose worker resets"),
        ("seed", int, "decides who leaves and what is reset"),
    ):
        flag, metavar = "--" + name.replace("_", "-"), "N" if kind is int else "RATIO"
        value = getattr(default, name)
        parser.add_argument(flag, type=kind, default=value, metavar=metavar, help=f"{what} (default: {value})")
    plan = Plan(**vars(parser.parse_args(argv)))
    try:
        tally = asyncio.run(soak(plan))
    except KeyboardInterrupt:
        return 130
    print(f"{plan.requests} requests in {tally.seconds:.0f} s, {tally.resets} resets by workers")
    for outcome, count in tally.outcomes.most_common():
        print(f"  {outcome:12} {count:>8}  {100 * count / plan.requests:6.2f} %")
    warm, end = (f"{size / 1e6:.1f} MB" for size in tally.rss_bytes)
    share, bound = f"{100 * plan.warm_at:.0f} %", f"{plan.max_growth_bytes / 1e6:.1f} MB"
    print(f"router's memory after {share} of the requests {warm}, in the end {end}; it may grow by {bound}")
    for sentence in tally.wrong[:20]:
        print(f"WRONG: {sentence}")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
