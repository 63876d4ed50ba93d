"""A signal loses no process: not even one that is being started when it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest import processes
from loadtest.processes import Process, end_on_signals


@pytest.fixture
def handlers() -> Iterator[None]:
    """Signals mean afterwards what they meant before."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_who_is_signalled_while_starting_a_process_knows_it_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes between the fork and the return of ``Popen``; it is heard once the process can be ended."""
    popen = subprocess.Popen

    def slow(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        started: subprocess.Popen[bytes] = popen(*arguments, **named)
        os.kill(os.getpid(), signal.SIGTERM)
        return started

    monkeypatch.setattr(processes.subprocess, "Popen", slow)
    process = Process("sleeper", (sys.executable, "-c", "import time; time.sleep(60)"), logs=tmp_path)
    end_on_signals()
    with pytest.raises(KeyboardInterrupt):
        process.start()

    assert not process.has_ended
    process.end()
    process.wait()
    assert process.has_ended
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
