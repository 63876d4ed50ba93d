"""The live comparison, short: Homing alone, and a peer that does not start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.compare import Run, means

SMALL = ("--ranks", "2", "--rounds", "1", "--sessions", "3", "--turns", "4", "--lanes", "3", "--scale-time", "0")


def compare(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest.compare", *SMALL, "--prefill-rate", "20000", *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)


def children() -> set[int]:
    """Shims and routers that this test's commands have started and not ended."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"router.cli" in words and parent in (1, os.getpid()):
                found.add(int(entry.name))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_homing_alone(tmp_path: Path) -> None:
    """Peers that are not there are named; Homing's row is whole, and no process is left."""
    before = children()
    target = tmp_path / "compared.json"
    done = compare("--json", str(target))

    assert done.returncode == 0, done.stderr
    assert all(f"{name} is not there" in done.stdout for name in ("smg", "sglang-router", "vllm-router"))
    written = json.loads(target.read_bytes())
    (row,) = written["means"]
    assert written["runs"] == [row]
    assert row["router"] == "homing"
    assert row["errors"] == 0
    assert row["requests"] >= 3 * 3
    assert 0.2 < row["hit_rate"] <= row["ideal_hit_rate"] < 1.0
    assert 0.0 < row["ttft_p50_seconds"] <= row["ttft_p90_seconds"] < 10.0
    assert 1.0 <= row["imbalance"] <= 2.0
    assert not children() - before


def test_a_report_that_cannot_be_written_is_told_before_anything_starts() -> None:
    """A comparison takes long; its figures would be lost in the end."""
    done = compare("--json", "/nowhere/compared.json")
    assert done.returncode == 2
    assert "argument --json: '/nowhere/compared.json' cannot be written" in done.stderr
    assert not done.stdout


def test_a_peer_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    """No table, status 1, and the peer's own words."""
    program = tmp_path / "smg" / "bin" / "smg"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho no such option >&2\nexit 2\n")
    program.chmod(0o755)
    done = compare("--peers", str(tmp_path))

    assert done.returncode == 1
    assert "round 1: homing" in done.stdout
    assert "smg did not find its workers" in done.stdout
    assert "no such option" in done.stdout


def test_a_row_is_the_mean_of_a_routers_rounds() -> None:
    """Numbers are averaged, router by router, in the order of their first run."""
    first = Run("a", 100, 0, 0.5, 0.9, 0.2, 0.1, 1.0, 2.0, 1.2, 10.0, "x")
    second = Run("a", 200, 2, 0.7, 0.9, 0.4, 0.3, 2.0, 3.0, 1.4, 20.0, "y")
    other = Run("b", 100, 0, 0.1, 0.9, 0.2, 0.1, 1.0, 2.0, 1.0, 10.0, "x")
    rows = means([first, other, second])

    assert [row.router for row in rows] == ["a", "b"]
    assert rows[1] == other
    assert (rows[0].requests, rows[0].errors, rows[0].duration_seconds) == (150, 1, 15.0)
    assert rows[0].hit_rate == pytest.approx(0.6)
