"""``make demo``: what affinity is worth, on this machine, with real parts.

Two workers of two ranks each (torch on the CPU, the built-in needle model) behind a router. The same agent sessions are
played under ``round_robin`` and under ``affinity``, each from empty caches; then facts hidden in one long shared
text are asked for through warm caches. Every process that was started is ended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from rich.console import Console

from engine_shim.model.needle_text import facts, haystack
from loadtest.processes import HomingProcess, ProcessError, end_on_signals, router, running
from loadtest.tables import output_console

POLICIES = ("round_robin", "affinity")
SESSIONS = ("--sessions", "10", "--turns", "30", "--lanes", "6", "--seed", "1", "--scale-time", "0")
HAYSTACK_TOKENS = 8_000
QUESTIONS = 32
#: Of a machine that stands still now and then; a quiet one stays within half of it.
NEAR_IDEAL_RATIO = 0.04
WELL_BELOW_RATIO = 0.10


def main() -> int:
    """Run the demo. 0: affinity came near the ideal, without errors, and all needles were right; else 1."""
    argparse.ArgumentParser(prog="make demo", description=__doc__).parse_args()
    console = output_console()
    end_on_signals()
    try:
        with tempfile.TemporaryDirectory(prefix="homing-demo-") as folder:
            return _demo(Path(folder), console)
    except ProcessError as error:
        console.print(f"[red]demo failed:[/red] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130


def _demo(folder: Path, console: Console) -> int:
    console.print("Starting two workers of two ranks each: paged-KV engine on torch, CPU, model 'needle' ...")
    shims = [
        HomingProcess(
            f"shim-{number}",
            (
                *("shim", "--port", "0", "--dp-size", "2", "--kv-events-port", "0", "--replay-port", "0"),
                *("--pool-tokens", "65536", "--log-level", "warning"),
            ),
            logs=folder,
        )
        for number in (1, 2)
    ]
    reports = []
    with running(shims) as ready:
        workers = [f"http://{words['http']}" for words in ready]
        for policy in POLICIES:
            for worker in workers:
                httpx.post(f"{worker}/reset_prefix_cache", timeout=30).raise_for_status()
            options = ("--policy", policy)
            with router(f"router-{policy}", options, workers=workers, ranks=2 * len(workers), logs=folder) as started:
                url = started["data"]
                console.print(f"\nThe same agent sessions under [bold]{policy}[/bold], from empty caches:")
                reports.append(_replay(policy, url, folder))
                if policy == POLICIES[-1]:
                    right, cached_ratio = _ask_needles(url, console)
    console.print()
    _compare(reports)
    console.print(
        f"Needles: [bold]{right} of {2 * QUESTIONS}[/bold] right, over one shared text of {HAYSTACK_TOKENS:,} tokens, "
        f"{cached_ratio:.1%} of it from cache."
    )
    failed = [] if right == 2 * QUESTIONS else ["not all needles were right"]
    failed += _judge(*(msgspec.json.decode(report.read_bytes(), type=_Report) for report in reports))
    if not all(shim.has_ended for shim in shims):
        failed.append("a process is still running")
    console.print(f"[red]{'; '.join(failed)}[/red]" if failed else "All processes have ended.")
    return 1 if failed else 0


def _replay(policy: str, url: str, folder: Path) -> Path:
    report = folder / f"{policy}.json"
    command = [sys.executable, "-m", "router.cli", "replay", "--url", url, *SESSIONS]
    status = subprocess.run([*command, "--label", policy, "--json", str(report)], check=False).returncode
    if status:
        raise ProcessError(f"the replay under {policy} ended with status {status}")
    return report


def _compare(reports: Sequence[Path]) -> None:
    command = [sys.executable, "-m", "router.cli", "replay", "--compare", *map(str, reports)]
    subprocess.run(command, check=True)


class _HitRatio(msgspec.Struct):
    measured: float
    ideal: float


class _Report(msgspec.Struct):
    errors: int
    hit_ratio: _HitRatio


def _judge(scattered: _Report, at_home: _Report) -> list[str]:
    """What of the demo's claim did not come true."""
    failed = []
    if scattered.errors or at_home.errors:
        failed.append("there were errors")
    if at_home.hit_ratio.measured < at_home.hit_ratio.ideal - NEAR_IDEAL_RATIO:
        failed.append(f"affinity is more than {NEAR_IDEAL_RATIO:.0%} below the ideal hit rate")
    if scattered.hit_ratio.measured > at_home.hit_ratio.measured - WELL_BELOW_RATIO:
        failed.append("round_robin is not well below affinity")
    return failed


def _ask_needles(url: str, console: Console) -> tuple[int, float]:
    """Ask every question twice. Returns how many answers were right and the cached share of the second round."""
    stated = facts(QUESTIONS, seed=1)
    text = haystack(HAYSTACK_TOKENS, stated, seed=1)
    console.print(f"\nAsking {QUESTIONS} needle questions over one text of {HAYSTACK_TOKENS:,} tokens, twice ...")
    right = cached = prompt = 0
    with httpx.Client(base_url=url, timeout=120) as client:
        for _ in range(2):
            cached = prompt = 0
            for fact in stated:
                answer = _ask(client, text + fact.question)
                right += answer.choices[0].text.strip() == fact.value
                prompt += answer.usage.prompt_tokens
                cached += answer.usage.prompt_tokens_details.cached_tokens
    return right, cached / prompt


class _Choice(msgspec.Struct):
    text: str


class _Details(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


def _ask(client: httpx.Client, prompt: str) -> _Answer:
    response = client.post("/v1/completions", json={"model": "needle", "prompt": prompt, "max_tokens": 4})
    response.raise_for_status()
    return msgspec.json.decode(response.content, type=_Answer)


if __name__ == "__main__":
    sys.exit(main())
