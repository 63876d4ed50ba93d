"""``make demo`` keeps its word, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from loadtest.processes import HomingProcess
from loadtest.processes import running as processes

DEMO = [sys.executable, "-m", "loadtest.demo"]


def descendants(pid: int) -> set[int]:
    """Process ids below ``pid``, from /proc."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) in {pid, *found}:
            found.add(int(stat.parent.name))
    return found


def running(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}/stat").exists()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_shows_what_it_says() -> None:
    """Affinity within four points of the ideal, round robin well below, no errors, all needles right: status 0."""
    demo = subprocess.run(DEMO, capture_output=True, text=True, check=False)

    assert demo.returncode == 0, demo.stdout[-2000:] + demo.stderr[-2000:]
    assert "64 of 64" in demo.stdout
    assert "All processes have ended." in demo.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_stopped_stops_its_processes(number: signal.Signals) -> None:
    """Ctrl-C, a supervisor's TERM, a closed terminal: workers and router end with it, and no traceback is shown."""
    with subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        started: set[int] = set()
        deadline = time.monotonic() + 120
        while len(started) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            started |= descendants(demo.pid)
        os.kill(demo.pid, number)
        output, _ = demo.communicate(timeout=120)

    assert len(started) >= 2
    assert demo.returncode == 130
    assert "Traceback" not in output
    assert not running(started)


def test_who_is_told_to_end_waits_for_nobody_to_be_ready(tmp_path: Path) -> None:
    """Ctrl-C while a process starts, which would take ten minutes: it is ended at once."""
    starting = HomingProcess("starting", (), logs=tmp_path)
    starting._command = (sys.executable, "-c", "import time; time.sleep(600)")
    main = threading.get_ident()

    def ctrl_c() -> None:
        while starting._process is None:
            time.sleep(0.01)
        time.sleep(0.2)  # by then it is most likely waited for
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background jobs ignore it
    try:
        threading.Thread(target=ctrl_c, daemon=True).start()
        with pytest.raises(KeyboardInterrupt), processes([starting]):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert starting.has_ended
