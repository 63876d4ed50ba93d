"""Homing beside other routers, live: the same replay over the same ranks, equally cold.

Each run starts its own workers (Homing's shim with its timing model, one rank each, so empty caches), puts one router
before them, and plays the same generated agent sessions. A round takes the routers in turn over sessions of a seed of
its own; the table shows means over the rounds. What was computed and what was reused is counted by the workers, so that
no router's own account enters.

A fixed amount of work is played closed loop: where some sessions are stuck behind a crowded rank, the others have the
rest to themselves, and half of all first tokens come soon. So read percentiles beside the mean and the seconds in all.

    python -m loadtest.compare --peers DIR

DIR holds a virtual environment for each peer: ``smg``, ``sgr`` (sglang-router), ``vr`` (vllm-router). Absent ones are
named and left out. Every router has its cache-aware policy and otherwise the defaults of its command.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from loadtest.cli import output_file
from loadtest.processes import START_SECONDS, HomingProcess, Process, ProcessError, end_on_signals, router, running
from loadtest.report import Report, imbalance
from loadtest.tables import output_console

MODEL = "needle"
#: The command of each peer, in its folder, before the options that all have in common.
PEERS = {
    "smg": ("smg/bin/smg", "launch"),
    "sglang-router": ("sgr/bin/sglang-router", "launch"),
    "vllm-router": ("vr/bin/vllm-router",),
}
HOMING = "homing"


@dataclass(frozen=True, slots=True)
class Plan:
    """Workers and load. Tokens are those of the shim, whose prompts are 1/32 of the recorded ones."""

    ranks: int = 8
    pool_tokens: int = 32_768
    prefill_rate: float = 750.0
    lanes: int = 32
    sessions: int = 32
    turns: int = 24
    scale_time: str = "1/40"
    client: str = "aiperf"
    seed: int = 1
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One replay through one router. ``imbalance`` is the largest over the mean of what the ranks computed."""

    router: str
    requests: float
    errors: float
    hit_rate: float
    ideal_hit_rate: float
    ttft_mean_seconds: float
    ttft_p50_seconds: float
    ttft_p90_seconds: float
    ttft_p99_seconds: float
    imbalance: float
    duration_seconds: float
    request_digest: str


def compare(plan: Plan, names: Sequence[str], peers: Path | None, console: Console) -> list[Run]:
    """All runs, round after round. Raises ``ProcessError``, also if a round's runs did not send the same requests."""
    runs: list[Run] = []
    for number in range(plan.rounds):
        for name in names:
            with tempfile.TemporaryDirectory(prefix="homing-compare-") as folder:
                run = _run(replace(plan, seed=plan.seed + number), name, peers, Path(folder))
            runs.append(run)
            console.print(f"round {number + 1}: {_words(run)}", highlight=False, soft_wrap=True)
        if len({run.request_digest for run in runs[-len(names) :]}) > 1:
            raise ProcessError("the runs of one round did not send the same requests")
    return runs


def means(runs: Sequence[Run]) -> list[Run]:
    """One row a router, the digest that of its first round."""
    rows = []
    for name in dict.fromkeys(run.router for run in runs):
        own = [asdict(run) for run in runs if run.router == name]
        counted = [key for key, value in own[0].items() if isinstance(value, int | float)]
        rows.append(Run(**(own[0] | {key: fmean(run[key] for run in own) for key in counted})))
    return rows


# --- one run --------------------------------------------------------------------------------------


def _run(plan: Plan, name: str, peers: Path | None, folder: Path) -> Run:
    options = (
        *("shim", "--port", "0", "--kv-events-port", "0", "--replay-port", "0", "--log-level", "warning"),
        *("--runner", "sim", "--sim-prefill-rate", str(plan.prefill_rate), "--chunk-tokens", "128"),
        *("--pool-tokens", str(plan.pool_tokens)),
    )
    with running([HomingProcess(f"shim-{rank}", options, logs=folder) for rank in range(plan.ranks)]) as started:
        workers = [f"http://{words['http']}" for words in started]
        front = _homing(workers, folder) if peers is None or name == HOMING else _peer(name, peers, workers, folder)
        with front as url:
            report = _replay(plan, name, url, folder)
        prompt, cached = zip(*map(_prompt_and_cached_tokens, workers), strict=True)
    computed = [one - other for one, other in zip(prompt, cached, strict=True)]
    return Run(
        router=name,
        requests=report.requests,
        errors=report.errors,
        hit_rate=sum(cached) / max(1, sum(prompt)),
        ideal_hit_rate=report.hit_ratio.ideal,
        ttft_mean_seconds=report.first_token_seconds.mean,
        ttft_p50_seconds=report.first_token_seconds.p50,
        ttft_p90_seconds=report.first_token_seconds.p90,
        ttft_p99_seconds=report.first_token_seconds.p99,
        imbalance=imbalance(computed) or 1.0,
        duration_seconds=report.duration_seconds,
        request_digest=report.request_digest,
    )


@contextlib.contextmanager
def _homing(workers: Sequence[str], folder: Path) -> Iterator[str]:
    with router(HOMING, (), workers=workers, ranks=len(workers), logs=folder) as started:
        yield started["data"]


@contextlib.contextmanager
def _peer(name: str, peers: Path, workers: Sequence[str], folder: Path) -> Iterator[str]:
    """A peer that calls all workers healthy. All three have these options, and list workers alike."""
    program, *command = PEERS[name]
    port, metrics_port = _free_port(), _free_port()
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--policy", "cache_aware", "--worker-urls", *workers]
    process = Process(name, (str(peers / program), *command), logs=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        process.start()
        deadline = time.monotonic() + START_SECONDS
        while _healthy_workers(url) < len(workers):
            if process.has_ended or time.monotonic() > deadline:
                raise process.failed("did not find its workers")
            time.sleep(0.2)
        yield url
    finally:
        process.end()
        process.wait()


def _healthy_workers(url: str) -> int:
    try:
        answer = httpx.get(f"{url}/workers", timeout=5, trust_env=False)
    except httpx.TransportError:
        return 0
    return sum(bool(worker.get("is_healthy")) for worker in answer.json()["workers"]) if answer.is_success else 0


def _replay(plan: Plan, name: str, url: str, folder: Path) -> Report:
    path = folder / "report.json"
    arguments = {
        "--url": url,
        "--model": MODEL,
        "--label": name,
        "--json": path,
        "--error-budget": 1,
        "--sessions": plan.sessions,
        "--turns": plan.turns,
        "--lanes": plan.lanes,
        "--seed": plan.seed,
        "--scale-time": plan.scale_time,
        "--client": plan.client,
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "router.cli", "replay", *words], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise ProcessError(f"the replay through {name} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return msgspec.json.decode(path.read_bytes(), type=Report)


def _prompt_and_cached_tokens(worker: str) -> tuple[int, int]:
    """What one worker was asked for since its start, and what of it came from its cache."""
    exposition = httpx.get(f"{worker}/metrics", timeout=30, trust_env=False).text
    totals = {"vllm:prompt_tokens_total": 0.0, "vllm:prompt_tokens_cached_total": 0.0}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
    prompt, cached = totals.values()
    return int(prompt), int(cached)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- the command ----------------------------------------------------------------------------------


def _words(run: Run) -> str:
    return (
        f"{run.router}: {run.requests:.0f} requests, {run.errors:.0f} errors, hit rate {run.hit_rate:.1%}, "
        f"first token {_first_token_words(run)} ms, imbalance {run.imbalance:.2f}, {run.duration_seconds:.0f} s"
    )


def _first_token_words(run: Run) -> str:
    seconds = (run.ttft_mean_seconds, run.ttft_p50_seconds, run.ttft_p90_seconds, run.ttft_p99_seconds)
    return "/".join(f"{1000 * one:.0f}" for one in seconds)


def _print(rows: Sequence[Run], console: Console) -> None:
    table = Table(Column("router", no_wrap=True), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("requests", "errors", "hit rate", "ideal", "TTFT ms mean/p50/p90/p99", "imbalance", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.router,
            f"{row.requests:.0f}",
            f"{row.errors:.0f}",
            f"{row.hit_rate:.1%}",
            f"{row.ideal_hit_rate:.1%}",
            _first_token_words(row),
            f"{row.imbalance:.2f}",
            f"{row.duration_seconds:.0f}",
        )
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="virtual environments of the peers (default: none)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write plan, means and all runs there")
    for name, default in asdict(Plan()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, help="default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. 0: done; 1: something did not start or end as it should."""
    options = vars(_parser().parse_args(argv))
    peers: Path | None = options.pop("peers")
    target: Path | None = options.pop("json")
    plan, console = Plan(**options), output_console()
    names = [HOMING]
    for name, (program, *_) in PEERS.items():
        if peers is not None and (peers / program).exists():
            names.append(name)
        else:
            console.print(f"{name} is not there and left out", highlight=False)
    end_on_signals()
    try:
        runs = compare(plan, names, peers, console)
        rows = means(runs)
    except ProcessError as error:
        console.print(f"comparison failed: {error}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    _print(rows, console)
    if target is not None:
        target.write_bytes(msgspec.json.encode({"plan": plan, "means": rows, "runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
