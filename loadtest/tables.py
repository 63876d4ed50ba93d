"""Reports as tables for a terminal, and the progress of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtest.answer import Outcome
from loadtest.replay import Exchange
from loadtest.report import Report, Spread

PLAIN_EVERY_REQUESTS = 100
#: Of what is written where nobody says how wide it is, such as a file.
_PLAIN_COLUMNS = 110


def output_console() -> Console:
    """Standard output: as wide as its terminal, or as tables need."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_COLUMNS)


def print_report(report: Report, console: Console) -> None:
    """One run: summary, ranks, and errors if there were any."""
    table = Table(title=report.label or None, show_header=False, title_justify="left")
    table.add_column("what", style="dim")
    table.add_column("value")
    table.add_row("requests", _requests(report))
    table.add_row("sessions", f"{report.sessions} in {report.duration_seconds:.1f} s ({report.stopped})")
    hit = report.hit_ratio
    table.add_row("hit rate, measured", _ratio(hit.measured, missing="not reported by the server"))
    table.add_row("hit rate, ideal", _ratio(hit.ideal))
    if hit.expected is not None:
        table.add_row("hit rate, router expected", _ratio(hit.expected))
    table.add_row("first token", _spread(report.first_token_seconds))
    table.add_row("between tokens", _spread(report.inter_token_seconds))
    table.add_row("whole request", _spread(report.request_seconds))
    tokens = report.tokens
    table.add_row("tokens in", f"{tokens.prompt:,} ({tokens.prompt_per_second:,.0f}/s), {_count(tokens.cached)} cached")
    table.add_row("tokens out", f"{tokens.completion:,} ({tokens.completion_per_second:,.0f}/s)")
    if report.reasons:
        table.add_row("reasons", ", ".join(f"{name} {count}" for name, count in report.reasons.items()))
    table.add_row("request digest", report.request_digest)
    console.print(table)
    _print_ranks(report, console)
    for kind, count in report.errors_by_kind.items():
        console.print(f"[red]{count} x {kind}[/red]: ", end="")
        console.print(report.error_examples.get(kind, ""), markup=False)


def _print_ranks(report: Report, console: Console) -> None:
    table = Table("rank", title="by rank", title_justify="left")
    for name in ("requests", "share", "tokens in", "uncached", "hit rate"):
        table.add_column(name, justify="right")
    for rank in report.ranks:
        table.add_row(
            rank.name,
            str(rank.requests),
            _ratio(rank.request_share),
            f"{rank.prompt_tokens:,}",
            _count(rank.uncached_tokens),
            _ratio(rank.hit_ratio),
        )
    console.print(table)
    if report.request_imbalance is not None:
        uncached = f", uncached tokens {report.uncached_imbalance:.2f}" if report.uncached_imbalance else ""
        console.print(f"busiest rank over mean: requests {report.request_imbalance:.2f}{uncached}")


def print_comparison(reports: Sequence[Report], console: Console) -> None:
    """Runs side by side, one a row; says so when they did not send the same requests.

    ``uncached`` are the prompt tokens that were computed, ``max/mean`` how unevenly over the ranks.
    """
    table = Table("run", title="comparison", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = ("requests", "errors", "hit rate", "ideal", "TTFT ms p50/p90/p99", "uncached", "max/mean")
    for name in headings:
        table.add_column(name, justify="right")
    for report in reports:
        first = report.first_token_seconds
        cached = report.tokens.cached
        table.add_row(
            report.label or "unnamed",
            str(report.requests),
            str(report.errors),
            _ratio(report.hit_ratio.measured),
            _ratio(report.hit_ratio.ideal),
            "/".join(f"{seconds * 1000:.0f}" for seconds in (first.p50, first.p90, first.p99)),
            _count(report.tokens.prompt - cached if cached is not None else None),
            f"{report.uncached_imbalance:.2f}" if report.uncached_imbalance is not None else "-",
        )
    console.print(table)
    if len({report.request_digest for report in reports}) > 1:
        console.print("[yellow]The runs did not send the same requests (their digests differ).[/yellow]")


class ProgressView:
    """A bar on a terminal, a line every hundred requests elsewhere. Use as a context, call for each exchange."""

    def __init__(self, console: Console, *, total_requests: int | None) -> None:
        self._console = console
        self._requests = self._errors = self._prompt_tokens = self._cached_tokens = 0
        self._progress = Progress(
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("replay", total=total_requests, note="")

    def __enter__(self) -> ProgressView:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, exchange: Exchange) -> None:
        """Count one exchange."""
        answer = exchange.answer
        self._requests += 1
        self._errors += answer.outcome not in (Outcome.OK, Outcome.CANCELLED)
        if answer.usage is not None:
            self._prompt_tokens += answer.usage.prompt_tokens
            self._cached_tokens += answer.usage.cached_tokens or 0
        hit = f"hit rate {self._cached_tokens / self._prompt_tokens:.1%}" if self._prompt_tokens else ""
        note = f"{hit}  {self._errors} errors"
        self._progress.update(self._task, advance=1, note=note)
        if not self._console.is_terminal and self._requests % PLAIN_EVERY_REQUESTS == 0:
            self._console.print(f"{self._requests} requests  {note}", highlight=False)


def _requests(report: Report) -> str:
    parts = [f"{report.requests}", f"{report.errors} errors"]
    if report.cancelled:
        parts.append(f"{report.cancelled} cut at the end")
    if report.warmup_requests:
        parts.append(f"and {report.warmup_requests} to warm up")
    return ", ".join(parts)


def _spread(value: Spread) -> str:
    if not value.count:
        return "-"
    return f"p50 {_time(value.p50)}  p90 {_time(value.p90)}  p99 {_time(value.p99)}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _ratio(value: float | None, *, missing: str = "-") -> str:
    return missing if value is None else f"{value:.1%}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
