"""Results as a Markdown table: one row for each cell and policy, the mean over seeds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.simulate.measure import PolicyResult
from loadtest.simulate.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Cell:
    """All policies under one scenario."""

    scenario: Scenario
    utilisation: float | None
    results: tuple[PolicyResult, ...]


Column = tuple[str, Callable[[PolicyResult], float], str]

_COLUMNS: tuple[Column, ...] = (
    ("turns/s", lambda result: result.turns_per_second, ".2f"),
    ("hit", lambda result: result.hit_rate, ".3f"),
    ("ideal", lambda result: result.ideal_hit_rate, ".3f"),
    ("TTFT mean s", lambda result: result.ttft_seconds.mean, ".2f"),
    ("p50", lambda result: result.ttft_seconds.p50, ".2f"),
    ("p90", lambda result: result.ttft_seconds.p90, ".1f"),
    ("p99", lambda result: result.ttft_seconds.p99, ".0f"),
    ("imbalance", lambda result: result.imbalance, ".2f"),
    ("moved", lambda result: result.moved_share, ".3f"),
    ("hold p99 s", lambda result: result.hold_seconds.p99, ".0f"),
    ("max", lambda result: result.hold_seconds.max, ".0f"),
    ("slowest decile", lambda result: result.slowest_decile_progress, ".2f"),
)


def markdown(cells: Sequence[Cell]) -> str:
    """Cells that differ in the seed alone become one row a policy, cells in the order given."""
    seeds = sorted({cell.scenario.seed for cell in cells})
    lines = [
        f"Mean of seeds {', '.join(map(str, seeds))}." if len(seeds) > 1 else f"Seed {seeds[0]}.",
        "",
        "| lanes/pool/use | policy | " + " | ".join(name for name, _, _ in _COLUMNS) + " |",
        "|---|---|" + "---|" * len(_COLUMNS),
    ]
    for name, group in itertools.groupby(cells, key=lambda cell: cell_name(cell.scenario, cell.utilisation)):
        for results in zip(*(cell.results for cell in group), strict=True):
            figures = [format(statistics.fmean(map(value, results)), form) for _, value, form in _COLUMNS]
            lines.append(f"| {name} | {results[0].policy} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def cell_name(scenario: Scenario, utilisation: float | None) -> str:
    """Lanes, pool of each rank, and utilisation in percent."""
    use = "full speed" if utilisation is None else f"{100 * utilisation:.0f}"
    return f"{scenario.lanes or 'open loop'}/{scenario.pool_tokens / 1e6:g}M/{use}"
