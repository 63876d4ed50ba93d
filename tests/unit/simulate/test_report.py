"""The tables: means over seeds, and the router beside the best of the others."""

from __future__ import annotations

from loadtest.simulate.measure import HoldSpread, PolicyResult, Spread
from loadtest.simulate.report import Cell, markdown
from loadtest.simulate.scenario import Scenario


def cell(seed: int, *results: tuple[str, float, float]) -> Cell:
    """Policies with their turns a second and their 99th percentile."""
    return Cell(
        Scenario(lanes=256, pool_tokens=1_000_000, seed=seed),
        0.4,
        tuple(
            PolicyResult(
                policy, turns, 0.5, 0.9, Spread(1.0, 0.5, 2.0, p99), 1.0, 0.0, HoldSpread(0.0, 0.0), 0.4, 10, 0.5
            )
            for policy, turns, p99 in results
        ),
    )


def test_the_best_of_the_others_is_so_over_all_seeds() -> None:
    """a: 3 and 1, b: 1 and 2; a is best by its mean of 2. The router's 5 and 3 are 2 times that; worst: 5 / 3 = 1.67.

    ``price`` is the router's own, and nobody to beat.
    """
    lines = markdown(
        [
            cell(1, ("affinity", 5.0, 10.0), ("price", 9.0, 1.0), ("a", 3.0, 30.0), ("b", 1.0, 1.0)),
            cell(2, ("affinity", 3.0, 20.0), ("price", 9.0, 1.0), ("a", 1.0, 50.0), ("b", 2.0, 1.0)),
        ]
    ).splitlines()

    assert "| 256/1M/40 | b | 1.50 | 0.500 | 0.900 | 1.00 | 0.50 | 2.0 | 1 | 1.00 | 0.000 | 0 | 0 | 0.40 |" in lines
    assert lines[-1] == "| 256/1M/40 | 4.00 | a | 2.00 | 2.00 | 1.67 | 15 | 40 |"


def test_alone_the_router_is_compared_with_nobody() -> None:
    """One table only."""
    text = markdown([cell(1, ("affinity", 5.0, 10.0), ("price", 4.0, 10.0))])

    assert text.count("| lanes/pool/use |") == 1
