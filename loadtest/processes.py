"""Processes of a whole system on this machine: started, waited for, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import httpx

START_SECONDS = 120.0
STOP_SECONDS = 15.0


class ProcessError(Exception):
    """A process does not do what it was started for; the message says why, with the end of its log."""


class Process:
    """A command, not yet started, whose output goes to a log in the folder ``logs``."""

    #: Whether what it prints is read here instead.
    _is_read = False

    def __init__(self, name: str, command: Sequence[str], *, logs: Path) -> None:
        self.name = name
        self._command = command
        self._log = logs / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; from here on it must be stopped."""
        with self._log.open("wb") as log, _ENDING.held_back():
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE if self._is_read else log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """No process is left of it."""
        return self._process is None or self._process.poll() is not None

    def failed(self, what: str) -> ProcessError:
        """The error to raise about it."""
        return ProcessError(f"{self.name} {what}:\n{self._log.read_text(errors='replace')[-2000:]}")

    def end(self) -> None:
        """Ask it to stop, if it was started."""
        if not self.has_ended and self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """See it end; kill it if it has not after a while."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


class HomingProcess(Process):
    """A ``homing`` subcommand that says when it is ready, in a line of ``name=value`` pairs."""

    _is_read = True

    def __init__(self, name: str, arguments: Sequence[str], *, logs: Path) -> None:
        super().__init__(name, (sys.executable, "-m", "router.cli", *arguments), logs=logs)

    def ready(self) -> dict[str, str]:
        """Wait for the ready line. Raises ``ProcessError`` if the process ends without one."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.decode().split()
            if words[:1] == ["homing"] and "ready" in words:
                return dict(word.split("=", 1) for word in words if "=" in word)
        self._process.wait()
        raise self.failed("did not start")


class _Ending:
    """Signals that end this process, as ``KeyboardInterrupt``; later where it would lose what it is about to start."""

    def __init__(self) -> None:
        self._is_held_back = self._is_due = False

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """A handler of signals."""
        if self._is_held_back:
            self._is_due = True
        else:
            signal.default_int_handler(number, frame)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Once, and not while it is held back already."""
        self._is_held_back = True
        try:
            yield
        finally:
            self._is_held_back = False
            if self._is_due:
                self._is_due = False
                raise KeyboardInterrupt


_ENDING = _Ending()


def end_on_signals() -> None:
    """Let a process that is told to end leave its ``with`` blocks, and so end what it started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a shell lets background jobs ignore the first
        signal.signal(number, _ENDING.signalled)


@contextlib.contextmanager
def running(processes: Sequence[HomingProcess]) -> Iterator[list[dict[str, str]]]:
    """Start all and wait until they are ready; end all, whatever happens."""
    with ThreadPoolExecutor(len(processes)) as pool:  # whose threads see the processes end, and so end themselves
        try:
            for process in processes:
                process.start()
            yield list(pool.map(HomingProcess.ready, processes))
        finally:
            for process in processes:
                process.end()
            for process in processes:
                process.wait()


@contextlib.contextmanager
def router(
    name: str, options: Sequence[str], *, workers: Sequence[str], ranks: int, logs: Path
) -> Iterator[dict[str, str]]:
    """A router over the workers, with all ``ranks`` ready: the pairs of its ready line."""
    named = [option for worker in workers for option in ("--worker", worker)]
    arguments = ("router", "--port", "0", "--admin-port", "0", "--log-level", "warning", *options, *named)
    with running([HomingProcess(name, arguments, logs=logs)]) as started:
        deadline = time.monotonic() + START_SECONDS
        while not _all_ready(started[0]["admin"], ranks=ranks):
            if time.monotonic() > deadline:
                raise ProcessError("the router did not find all ranks ready in time")
            time.sleep(0.1)
        yield started[0]


def _all_ready(admin: str, *, ranks: int) -> bool:
    workers = httpx.get(f"{admin}/admin/workers", timeout=10).json()["workers"]
    ready = [rank for worker in workers for rank in worker["ranks"] if rank["status"] == "ready"]
    return len(ready) == ranks
