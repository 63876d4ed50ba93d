"""The command ``homing simulate``: policies over a recorded trace in simulated time."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TypeVar

from loadtest.simulate.comparators import POLICIES
from loadtest.simulate.engine import FULL_SPEED_RATE
from loadtest.simulate.grid import Grid, Plan
from loadtest.simulate.measure import PolicyResult
from loadtest.simulate.report import Cell, cell_name, markdown
from loadtest.simulate.scenario import Scenario
from loadtest.simulate.speed import slowdown_for
from loadtest.simulate.workload import Recording, load_recording
from loadtest.trace import TraceError

DESCRIPTION = """\
Replay a trace in simulated time in front of simulated ranks, once for each policy. The decisions are those of the
router's own code (affinity: price and admission; price: without admission), or other routers' policies as published.
A recording of sessions is played closed loop on lanes, with subagents; a Mooncake trace arrives as recorded.
"""

EPILOG = """\
examples:
  homing simulate --trace sessions.jsonl.gz --ranks 8 --lanes 64 --pool-tokens 2000000 --utilisation 0.65 --json
  homing simulate --trace sessions.jsonl.gz --lanes 64,256 --pool-tokens 1e6,2e6,4e6 --utilisation .4,.65,.85 \\
      --seed 1,2,3 --policies affinity,sticky,llmd
      every cell of the grid, a table with the mean over the seeds
  the same with --policies all --results FOLDER
      keeps every run: once interrupted it goes on where it was, and may be started several times to use more cores
  homing simulate --trace mooncake.jsonl.gz --speed-up 2.5 --warm-up-seconds 0 --pool-tokens 500000 \\
      --policies affinity,mooncake

exit status: 0 done; 1 the trace cannot be read, or the folder not be used; 2 bad usage.
"""

T = TypeVar("T")


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is described in its help."""
    parser = build_parser()
    options = parser.parse_args(list(argv))
    policies = list(POLICIES) if options.policies == ["all"] else options.policies
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        parser.error(f"argument --policies: no policy {unknown[0]!r}; there are {', '.join(POLICIES)}")
    if options.window_tokens and options.host_ratio:
        parser.error("argument --window-tokens: not together with --host-ratio, whose tier knows no windows")
    try:
        recording = load_recording(options.trace)
        if options.results is not None:
            options.results.mkdir(parents=True, exist_ok=True)
    except (TraceError, OSError) as error:
        told = f"--results {options.results}: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"homing simulate: {told}", file=sys.stderr)
        return 1
    if (pool_tokens := min(options.pool_tokens)) < recording.least_prompt_tokens:
        parser.error(
            f"argument --pool-tokens: {pool_tokens} hold not even the shortest prompt of the trace, "
            f"which has {recording.least_prompt_tokens} tokens"
        )
    if options.speed_up != 1.0 and not recording.arrivals:
        parser.error(
            "argument --speed-up: sessions are played closed loop; it is for traces of requests with their times"
        )
    if options.fail_at is not None and options.fail_at >= options.warm_up_seconds + options.window_seconds:
        parser.error(f"argument --fail-at: the run is over by then; name an earlier time than {options.fail_at:g} s")
    end_seconds = recording.span_seconds / options.speed_up
    if recording.arrivals and options.warm_up_seconds > end_seconds:
        parser.error(
            f"argument --warm-up-seconds: the trace ends after {end_seconds:.0f} s, before "
            f"{options.warm_up_seconds:g} s of warm-up have passed: nothing would be counted"
        )
    plans = _plans(recording, options)

    def progress(number: int, result: PolicyResult, done: int) -> None:
        plan = plans[number]
        name = f"{cell_name(plan.scenario, plan.utilisation)} seed {plan.scenario.seed} {result.policy}"
        if not options.quiet:
            print(
                f"{done} of {len(plans) * len(policies)}: {name}: {result.turns_per_second:.3f} turns/s",
                file=sys.stderr,
            )

    cells = Grid(recording, plans, policies, trace=options.trace, folder=options.results).run(progress)
    if options.json:
        print(json.dumps([_row(cell, result) for cell in cells for result in cell.results], indent=1))
    else:
        print(markdown(cells))
    return 0


def _plans(recording: Recording, options: argparse.Namespace) -> list[Plan]:
    """Every combination; seeds of one cell follow each other."""

    @cache
    def slowdown(lanes: int, utilisation: float, seed: int) -> float:
        return slowdown_for(
            recording,
            utilisation=utilisation,
            ranks=options.ranks,
            lanes=lanes,
            seed=seed,
            speed_up=options.speed_up,
            seconds=options.window_seconds,
        )

    return [
        Plan(
            Scenario(
                ranks=options.ranks,
                lanes=lanes,
                pool_tokens=pool_tokens,
                slowdown=1.0 if utilisation is None else slowdown(lanes, utilisation, seed),
                seed=seed,
                warm_up_seconds=options.warm_up_seconds,
                window_seconds=options.window_seconds,
                event_lag_seconds=options.event_lag_seconds,
                host_ratio=options.host_ratio,
                slow_rank_factor=options.slow_rank,
                fail_at_seconds=options.fail_at,
                speed_up=options.speed_up,
                window_tokens=options.window_tokens,
                window_pool_ratio=options.window_pool_ratio,
            ),
            utilisation,
        )
        for lanes, pool_tokens, utilisation, seed in itertools.product(
            [0] if recording.arrivals else options.lanes, options.pool_tokens, options.utilisation, options.seed
        )
    ]


def _row(cell: Cell, result: PolicyResult) -> dict[str, object]:
    """One policy of one cell, with the settings it ran under."""
    scenario = cell.scenario
    return {
        **asdict(result),
        "ranks": scenario.ranks,
        "lanes": scenario.lanes,
        "pool_tokens": scenario.pool_tokens,
        "utilisation": cell.utilisation,
        "prefill_tokens_per_second": FULL_SPEED_RATE / scenario.slowdown,
        "seed": scenario.seed,
    }


def build_parser() -> argparse.ArgumentParser:
    """The options; those that say LIST take one value or several with commas, and every combination is run."""
    parser = argparse.ArgumentParser(
        prog="homing simulate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="JSON lines, plain or gzip: recorded sessions or Mooncake requests")
    add(
        "--policies",
        type=_several(str),
        default=["affinity", "sticky", "round_robin"],
        metavar="LIST",
        help=_policies(),
    )
    add("--ranks", type=_whole, default=8, help="data-parallel ranks (default %(default)s)")
    add("--lanes", type=_several(_whole), default=[64], metavar="LIST", help="sessions at a time (default 64)")
    add("--pool-tokens", type=_several(_whole), default=[2_000_000], metavar="LIST", help="of each rank (default 2e6)")
    add(
        "--utilisation",
        type=_several(_share),
        default=[None],
        metavar="LIST",
        help="share of the ranks that an infinite cache would need; sets their speed (default: full speed)",
    )
    add("--seed", type=_several(_integer), default=[1], metavar="LIST", help="(default 1)")
    add("--json", action="store_true", help="print a list with one object for each policy and cell")
    add(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="keep each run's result there, and run only what is not there yet",
    )
    add("--quiet", action="store_true", help="no progress on standard error")
    group = parser.add_argument_group("scenario")
    add = group.add_argument
    add(
        "--warm-up-seconds",
        type=_natural,
        default=1800.0,
        help="simulated time before the window (default %(default)s)",
    )
    add("--window-seconds", type=_positive, default=3600.0, help="simulated time that counts (default %(default)s)")
    add("--event-lag-seconds", type=_natural, default=0.5, help="how late cache events come (default %(default)s)")
    add("--host-ratio", type=_natural, default=0.0, help="host tier, in device pools (default: none)")
    add("--window-tokens", type=_whole, default=0, help="window of the layers that have one (default: none have)")
    add("--window-pool-ratio", type=_positive, default=0.1, help="their pool, in device pools (default %(default)s)")
    add("--slow-rank", type=_positive, default=1.0, metavar="FACTOR", help="rank 0 is so many times slower")
    add("--fail-at", type=_positive, metavar="SECONDS", help="rank 0 dies, and is back empty five minutes later")
    add("--speed-up", type=_positive, default=1.0, metavar="FACTOR", help="arrivals of an open-loop trace, faster")
    return parser


def _policies() -> str:
    return f"of {', '.join(POLICIES)}; or all (default affinity,sticky,round_robin)"


def _several(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A list of what counts once, however often it is named."""

    def parse_all(text: str) -> list[T]:
        return list(dict.fromkeys(parse(part) for part in text.split(",")))

    return parse_all


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def _integer(text: str) -> int:
    value = _number(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text}")
    return int(value)


def _whole(text: str) -> int:
    value = _number(text)
    if not (value >= 1 and value.is_integer()):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(value)


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return value


def _natural(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return value
