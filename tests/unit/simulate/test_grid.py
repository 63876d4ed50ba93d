"""Grids that are kept in a folder: what is there is not run again, and several processes share the work."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.simulate import grid
from loadtest.simulate.grid import Grid, Plan
from loadtest.simulate.measure import HoldSpread, PolicyResult, Spread
from loadtest.simulate.scenario import Scenario
from loadtest.simulate.workload import Recording

PLANS = [Plan(Scenario(seed=seed), 0.4) for seed in (1, 2)]


class Runs:
    """Stands in for the simulation: notes what was run, and makes the seed the result."""

    def __init__(self) -> None:
        self.done: list[tuple[int, str]] = []

    def __call__(self, recording: Recording, scenario: Scenario, policy: str) -> PolicyResult:
        self.done.append((scenario.seed, policy))
        spread = Spread(1.0, 1.0, 1.0, 1.0)
        return PolicyResult(policy, scenario.seed, 0.5, 0.9, spread, 1.0, 0.0, HoldSpread(0.0, 0.0), 0.4, 10, 0.5)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    stand_in = Runs()
    monkeypatch.setattr(grid, "simulate", stand_in)
    return stand_in


def play(folder: Path, *, policies: tuple[str, ...] = ("affinity", "sticky"), plans: list[Plan] = PLANS) -> list[float]:
    trace = folder.parent / "trace"
    if not trace.exists():
        trace.write_text("a trace")
    folder.mkdir(exist_ok=True)
    cells = Grid(Recording(64), plans, policies, trace=trace, folder=folder).run(lambda *_: None)
    assert all([result.policy for result in cell.results] == list(policies) for cell in cells)
    return [result.turns_per_second for cell in cells for result in cell.results]


def test_what_is_there_is_not_run_again(tmp_path: Path, runs: Runs) -> None:
    """The second time nothing is run, and a policy more runs only that policy."""
    assert play(tmp_path / "kept") == [1, 1, 2, 2]
    assert play(tmp_path / "kept") == [1, 1, 2, 2]
    assert runs.done == [(1, "affinity"), (1, "sticky"), (2, "affinity"), (2, "sticky")]

    play(tmp_path / "kept", policies=("affinity", "price", "sticky"))
    assert runs.done[4:] == [(1, "price"), (2, "price")]


def test_a_result_cut_short_is_run_again(tmp_path: Path, runs: Runs) -> None:
    """A process that was ended while it wrote leaves half a file."""
    play(tmp_path / "kept", policies=("sticky",))
    for file in (tmp_path / "kept").iterdir():
        file.write_bytes(file.read_bytes()[:20])

    assert play(tmp_path / "kept", policies=("sticky",)) == [1, 2]
    assert play(tmp_path / "kept", policies=("sticky",)) == [1, 2]
    assert len(runs.done) == 4


def test_other_settings_or_another_trace_are_other_runs(tmp_path: Path, runs: Runs) -> None:
    """Everything that a result depends on is in its name."""
    play(tmp_path / "kept", policies=("sticky",), plans=PLANS[:1])
    play(tmp_path / "kept", policies=("sticky",), plans=[Plan(Scenario(host_ratio=4.0), 0.4)])
    (tmp_path / "trace").write_text("another trace")
    play(tmp_path / "kept", policies=("sticky",), plans=PLANS[:1])

    assert len(runs.done) == 3


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
file.write(open(sys.argv[2], "rb").read())
"""


def test_what_another_process_is_computing_comes_last_and_is_taken_over(tmp_path: Path, runs: Runs) -> None:
    """The first run is locked elsewhere: the others are done meanwhile, and the other process's result is used."""
    folder = tmp_path / "kept"
    play(folder, policies=("sticky",))
    first, second = sorted(folder.iterdir())
    (tmp_path / "result").write_bytes(second.read_bytes())
    first.write_bytes(b"")
    second.write_bytes(b"")
    runs.done.clear()
    command = [sys.executable, "-c", HOLDER, str(first), str(tmp_path / "result")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"

        def progress(number: int, result: PolicyResult, done: int) -> None:
            if done == 1:  # the second run is through while the first is locked
                assert number == 1
                assert holder.stdin is not None
                holder.stdin.write("\n")
                holder.stdin.flush()

        cells = Grid(Recording(64), PLANS, ["sticky"], trace=tmp_path / "trace", folder=folder).run(progress)

    assert [cell.results[0].turns_per_second for cell in cells] == [2, 2]
    assert runs.done == [(2, "sticky")]
    with first.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert os.fstat(file.fileno()).st_size > 0
