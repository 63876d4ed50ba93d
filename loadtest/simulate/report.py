"""Results as Markdown tables: a row for each cell and policy, and the router beside the best of the others."""

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


#: The policy that is the router's own, with admission; ``price`` is the same without.
ROUTER = "affinity"

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
    """Cells that differ in the seed alone become one row a policy, the mean over the seeds, in the order given."""
    seeds = sorted({cell.scenario.seed for cell in cells})
    groups = {
        name: list(zip(*(cell.results for cell in group), strict=True))
        for name, group in itertools.groupby(cells, key=lambda cell: cell_name(cell.scenario, cell.utilisation))
    }
    lines = [
        f"Mean of seeds {', '.join(map(str, seeds))}." if len(seeds) > 1 else f"Seed {seeds[0]}.",
        "",
        "| lanes/pool/use | policy | " + " | ".join(name for name, _, _ in _COLUMNS) + " |",
        "|---|---|" + "---|" * len(_COLUMNS),
    ]
    for name, policies in groups.items():
        for results in policies:
            figures = [format(statistics.fmean(map(value, results)), form) for _, value, form in _COLUMNS]
            lines.append(f"| {name} | {results[0].policy} | " + " | ".join(figures) + " |")
    versus = [row for name, policies in groups.items() if (row := _versus(name, policies)) is not None]
    if versus:
        lines += [
            "",
            f"{ROUTER} beside the others: in each cell the one with the most turns, and the ratio of the worst seed.",
            "",
            "| lanes/pool/use | turns/s | best other | turns/s | ratio | worst seed | p99 s | other's p99 s |",
            "|---|---|---|---|---|---|---|---|",
            *versus,
        ]
    return "\n".join(lines)


def _versus(name: str, policies: Sequence[Sequence[PolicyResult]]) -> str | None:
    """A row of the second table; None if there is nothing to compare."""

    def turns(results: Sequence[PolicyResult]) -> float:
        return statistics.fmean(result.turns_per_second for result in results)

    own = next((results for results in policies if results[0].policy == ROUTER), None)
    others = [results for results in policies if results[0].policy not in (ROUTER, "price")]
    if own is None or not others or not all(map(turns, others)):
        return None
    best = max(others, key=turns)
    worst = min(mine.turns_per_second / its.turns_per_second for mine, its in zip(own, best, strict=True))
    own_p99, its_p99 = (statistics.fmean(result.ttft_seconds.p99 for result in results) for results in (own, best))
    return (
        f"| {name} | {turns(own):.2f} | {best[0].policy} | {turns(best):.2f} | {turns(own) / turns(best):.2f} "
        f"| {worst:.2f} | {own_p99:.0f} | {its_p99:.0f} |"
    )


def cell_name(scenario: Scenario, utilisation: float | None) -> str:
    """Lanes, pool of each rank, and utilisation in percent."""
    use = "full speed" if utilisation is None else f"{100 * utilisation:.0f}"
    return f"{scenario.lanes or 'open loop'}/{scenario.pool_tokens / 1e6:g}M/{use}"
