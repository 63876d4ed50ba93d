"""A shim as its users have it: a process of its own, on ports the system chose."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

_ROOT = Path(__file__).parents[3]


@dataclass(slots=True)
class ShimProcess:
    """A running shim; ``ready`` is its ready line, read into names and values."""

    process: subprocess.Popen[str]
    ready: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://{self.ready['http']}"

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.ready["http"].rsplit(":", 1)
        return host, int(port)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Signal it and wait: exit code and what it wrote to stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def command(*options: str) -> list[str]:
    ports = ("--port", "0", "--kv-events-port", "0", "--replay-port", "0")
    return [sys.executable, "-m", "router.cli", "shim", *ports, *options]


def spawn(*options: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(*options), env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@contextlib.contextmanager
def running_shim(*options: str) -> Iterator[ShimProcess]:
    """A shim with these options, from its ready line to its end."""
    process = spawn(*options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("homing shim ready "):
            _, errors = process.communicate(timeout=10)
            pytest.fail(f"no ready line: {line!r} {errors}")
        pairs = (word.split("=", 1) for word in line.split() if "=" in word)
        yield ShimProcess(process, dict(pairs))
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


SIM = ("--runner", "sim", "--sim-prefill-rate", "inf", "--sim-decode-step", "1")


def wait_until(condition, *, seconds: float = 20.0) -> float:
    """Poll until true; returns the seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "not within the time"
        time.sleep(0.01)
    return time.monotonic() - start


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry these labels."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in client.get("/metrics").text.splitlines()
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items())
    ]
    assert values, f"no sample of {name} {labels}"
    return sum(values)
