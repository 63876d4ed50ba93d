"""Many runs: every policy under every scenario of a grid, kept in a folder if one is given.

A run that the folder holds is not repeated, so an interrupted grid goes on where it stopped; and processes that are
given the same folder share the work. A file is locked by the process that computes it, and the lock ends with the
process. Results are of the code that made them: begin a new folder after changing it.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import msgspec

from loadtest.simulate.measure import PolicyResult
from loadtest.simulate.report import Cell
from loadtest.simulate.run import simulate
from loadtest.simulate.scenario import Scenario
from loadtest.simulate.workload import Recording

#: Told of each result, run or found: its cell's number, the result, and how many there are by now.
Progress = Callable[[int, PolicyResult, int], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """One cell of the grid, before it is run; ``utilisation`` is what its slow-down stands for."""

    scenario: Scenario
    utilisation: float | None


class Grid:
    """Policies times plans, over one recording; ``trace`` is where that was read from."""

    def __init__(
        self, recording: Recording, plans: Sequence[Plan], policies: Sequence[str], *, trace: Path, folder: Path | None
    ) -> None:
        self._recording = recording
        self._plans = plans
        self._policies = policies
        self._trace = trace
        self._folder = folder

    def run(self, progress: Progress) -> list[Cell]:
        """All cells. What other processes are computing is left to the end, and then waited for."""
        runs = [(number, policy) for number in range(len(self._plans)) for policy in self._policies]
        found: dict[tuple[int, str], PolicyResult] = {}
        for may_wait in (False, True):
            for run in runs:
                if run in found:
                    continue
                result = self._result(*run, may_wait=may_wait)
                if result is not None:
                    found[run] = result
                    progress(run[0], result, len(found))
        return [
            Cell(plan.scenario, plan.utilisation, tuple(found[number, policy] for policy in self._policies))
            for number, plan in enumerate(self._plans)
        ]

    def _result(self, number: int, policy: str, *, may_wait: bool) -> PolicyResult | None:
        """None: another process is at it."""
        plan = self._plans[number]
        if self._folder is None:
            return simulate(self._recording, plan.scenario, policy)
        with (self._folder / self._file_name(plan, policy)).open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if may_wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return None
            file.seek(0)
            try:
                return msgspec.json.decode(file.read(), type=PolicyResult)
            except msgspec.DecodeError:  # new, or cut short when its process was ended
                result = simulate(self._recording, plan.scenario, policy)
            file.truncate(0)
            file.write(msgspec.json.encode(result))
            return result

    def _file_name(self, plan: Plan, policy: str) -> str:
        """Named for the eye by what varies in a grid, and by a digest of the trace and of all that is not default."""
        scenario = plan.scenario
        special = [
            f"{field.name}={value}"
            for field in fields(scenario)
            if (value := getattr(scenario, field.name)) != field.default
        ]
        digest = hashlib.sha256("\n".join([self._trace_digest, *special]).encode()).hexdigest()[:12]
        cell = f"{scenario.lanes}-{scenario.pool_tokens}-{plan.utilisation}-{scenario.seed}"
        return f"{cell}-{policy}-{digest}.json"

    @cached_property
    def _trace_digest(self) -> str:
        return hashlib.sha256(self._trace.read_bytes()).hexdigest()
