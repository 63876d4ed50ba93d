"""``make demo``: what affinity is worth, on this machine, with real parts.

Two workers of two ranks each (torch on the CPU, the built-in needle model) behind a router. The same agent sessions are
played under ``round_robin`` and under ``affinity``, each from empty caches; then facts hidden in one long shared
text are asked for through warm caches. Every process that was started is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
from rich.console import Console

from engine_shim.model.needle_text import facts, haystack

POLICIES = ("round_robin", "affinity")
SESSIONS = ("--sessions", "10", "--turns", "30", "--lanes", "6", "--seed", "1", "--scale-time", "0")
HAYSTACK_TOKENS = 8_000
QUESTIONS = 32
NEAR_IDEAL_RATIO = 0.02
WELL_BELOW_RATIO = 0.10
START_SECONDS = 120.0
STOP_SECONDS = 15.0


class DemoError(Exception):
    """The demo cannot go on; the message says why and names the log."""


class Process:
    """A ``homing`` subcommand that has printed its ready line, as ``name=value`` pairs."""

    def __init__(self, name: str, arguments: Sequence[str], *, logs: Path) -> None:
        self.name = name
        self._log = logs / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "router.cli", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def ready(self) -> dict[str, str]:
        """Wait for the ready line. Raises ``DemoError`` if the process ends without one."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.decode().split()
            if words[:1] == ["homing"] and "ready" in words:
                return dict(word.split("=", 1) for word in words if "=" in word)
        self._process.wait()
        raise DemoError(f"{self.name} did not start:\n{self._log.read_text()[-2000:]}")

    @property
    def has_ended(self) -> bool:
        """No process is left of it."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Ask it to stop; kill it if it has not after a while."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def running(processes: Sequence[Process]) -> Iterator[list[dict[str, str]]]:
    """Wait until all are ready; end all, whatever happens."""
    try:
        with ThreadPoolExecutor(len(processes)) as pool:
            yield list(pool.map(Process.ready, processes))
    finally:
        for process in reversed(processes):
            process.stop()


def main() -> int:
    """Run the demo. 0: affinity came near the ideal, without errors, and all needles were right; else 1."""
    argparse.ArgumentParser(prog="make demo", description=__doc__).parse_args()
    console = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):  # however it is ended, it ends what it started
        signal.signal(number, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="homing-demo-") as folder:
            return _demo(Path(folder), console)
    except DemoError as error:
        console.print(f"[red]demo failed:[/red] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130


def _demo(folder: Path, console: Console) -> int:
    console.print("Starting two workers of two ranks each: paged-KV engine on torch, CPU, model 'needle' ...")
    shims = [
        Process(
            f"shim-{number}",
            (
                *("shim", "--port", "0", "--dp-size", "2", "--kv-events-port", "0", "--replay-port", "0"),
                *("--pool-tokens", "65536", "--log-level", "warning"),
            ),
            logs=folder,
        )
        for number in (1, 2)
    ]
    reports = []
    with running(shims) as started:
        workers = [f"http://{words['http']}" for words in started]
        for policy in POLICIES:
            for worker in workers:
                httpx.post(f"{worker}/reset_prefix_cache", timeout=30).raise_for_status()
            with _router(policy, workers, folder) as url:
                console.print(f"\nThe same agent sessions under [bold]{policy}[/bold], from empty caches:")
                reports.append(_replay(policy, url, folder))
                if policy == POLICIES[-1]:
                    right, cached_ratio = _ask_needles(url, console)
    console.print()
    _compare(reports)
    console.print(
        f"Needles: [bold]{right} of {2 * QUESTIONS}[/bold] right, over one shared text of {HAYSTACK_TOKENS:,} tokens, "
        f"{cached_ratio:.1%} of it from cache."
    )
    failed = [] if right == 2 * QUESTIONS else ["not all needles were right"]
    failed += _judge(*(msgspec.json.decode(report.read_bytes(), type=_Report) for report in reports))
    if not all(shim.has_ended for shim in shims):
        failed.append("a process is still running")
    console.print(f"[red]{'; '.join(failed)}[/red]" if failed else "All processes have ended.")
    return 1 if failed else 0


@contextlib.contextmanager
def _router(policy: str, workers: Sequence[str], folder: Path) -> Iterator[str]:
    """A router over the workers, with all ranks ready."""
    named = [option for worker in workers for option in ("--worker", worker)]
    arguments = ("router", "--port", "0", "--admin-port", "0", "--policy", policy, "--log-level", "warning", *named)
    with running([Process(f"router-{policy}", arguments, logs=folder)]) as started:
        url = started[0]["data"]
        deadline = time.monotonic() + START_SECONDS
        while not _all_ready(started[0]["admin"], ranks=2 * len(workers)):
            if time.monotonic() > deadline:
                raise DemoError("the router did not find all ranks ready in time")
            time.sleep(0.1)
        yield url


def _all_ready(admin: str, *, ranks: int) -> bool:
    workers = httpx.get(f"{admin}/admin/workers", timeout=10).json()["workers"]
    ready = [rank for worker in workers for rank in worker["ranks"] if rank["status"] == "ready"]
    return len(ready) == ranks


def _replay(policy: str, url: str, folder: Path) -> Path:
    report = folder / f"{policy}.json"
    command = [sys.executable, "-m", "router.cli", "replay", "--url", url, *SESSIONS]
    status = subprocess.run([*command, "--label", policy, "--json", str(report)], check=False).returncode
    if status:
        raise DemoError(f"the replay under {policy} ended with status {status}")
    return report


def _compare(reports: Sequence[Path]) -> None:
    command = [sys.executable, "-m", "router.cli", "replay", "--compare", *map(str, reports)]
    subprocess.run(command, check=True)


class _HitRatio(msgspec.Struct):
    measured: float
    ideal: float


class _Report(msgspec.Struct):
    errors: int
    hit_ratio: _HitRatio


def _judge(scattered: _Report, at_home: _Report) -> list[str]:
    """What of the demo's claim did not come true."""
    failed = []
    if scattered.errors or at_home.errors:
        failed.append("there were errors")
    if at_home.hit_ratio.measured < at_home.hit_ratio.ideal - NEAR_IDEAL_RATIO:
        failed.append(f"affinity is more than {NEAR_IDEAL_RATIO:.0%} below the ideal hit rate")
    if scattered.hit_ratio.measured > at_home.hit_ratio.measured - WELL_BELOW_RATIO:
        failed.append("round_robin is not well below affinity")
    return failed


def _ask_needles(url: str, console: Console) -> tuple[int, float]:
    """Ask every question twice. Returns how many answers were right and the cached share of the second round."""
    stated = facts(QUESTIONS, seed=1)
    text = haystack(HAYSTACK_TOKENS, stated, seed=1)
    console.print(f"\nAsking {QUESTIONS} needle questions over one text of {HAYSTACK_TOKENS:,} tokens, twice ...")
    right = cached = prompt = 0
    with httpx.Client(base_url=url, timeout=120) as client:
        for _ in range(2):
            cached = prompt = 0
            for fact in stated:
                answer = _ask(client, text + fact.question)
                right += answer.choices[0].text.strip() == fact.value
                prompt += answer.usage.prompt_tokens
                cached += answer.usage.prompt_tokens_details.cached_tokens
    return right, cached / prompt


class _Choice(msgspec.Struct):
    text: str


class _Details(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


def _ask(client: httpx.Client, prompt: str) -> _Answer:
    response = client.post("/v1/completions", json={"model": "needle", "prompt": prompt, "max_tokens": 4})
    response.raise_for_status()
    return msgspec.json.decode(response.content, type=_Answer)


if __name__ == "__main__":
    sys.exit(main())
