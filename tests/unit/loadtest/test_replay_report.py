"""The report's arithmetic, written out."""

from __future__ import annotations

import io
import statistics
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtest.answer import Answer, Outcome, Placement, Usage
from loadtest.replay import Exchange, RunLog, Stop
from loadtest.report import Report, imbalance, percentile, summarise
from loadtest.tables import ProgressView, print_comparison, print_report


def exchange(
    *,
    rank: str | None = None,
    prompt: int = 100,
    cached: int | None = 0,
    ideal: float = 0.0,
    outcome: Outcome = Outcome.OK,
    first: float = 0.1,
    gaps: tuple[float, ...] = (),
    is_warmup: bool = False,
    has_usage: bool = True,
    expected: int | None = None,
) -> Exchange:
    is_ok = outcome is Outcome.OK
    return Exchange(
        session="s",
        agent="",
        turn=0,
        sent_seconds=0.0,
        body_bytes=prompt * 6,
        ideal_ratio=ideal,
        is_warmup=is_warmup,
        answer=Answer(
            outcome=outcome,
            detail="" if is_ok else f"because of {outcome}",
            first_token_seconds=first if is_ok else None,
            gap_seconds=gaps,
            total_seconds=first + sum(gaps),
            usage=Usage(prompt, 10, cached) if is_ok and has_usage else None,
            placement=Placement(rank, "w", "home", expected) if rank else None,
        ),
    )


def log_of(*exchanges: Exchange, seconds: float = 10.0, digest: str = "d") -> RunLog:
    return RunLog(exchanges, seconds, sessions_played=1, stopped=Stop.FINISHED, request_digest=digest)


def test_hit_rates_are_weighted_with_prompt_tokens() -> None:
    """Measured (0 + 600) / (200 + 800) = .6; ideal (.5 * 200 + .9 * 800) / 1000 = .82; expected 700 / 1000."""
    report = summarise(
        log_of(
            exchange(rank="0", prompt=200, cached=0, ideal=0.5, expected=0),
            exchange(rank="1", prompt=800, cached=600, ideal=0.9, expected=700),
        )
    )
    assert report.hit_ratio.measured == 0.6
    assert report.hit_ratio.ideal == pytest.approx(0.82)
    assert report.hit_ratio.expected == 0.7
    assert report.tokens.prompt_per_second == 100.0
    assert report.tokens.completion_per_second == 2.0


def test_uncached_tokens_and_imbalance_by_rank() -> None:
    """Rank 0 computes 100 + 50, rank 1 computes 50: the busiest has 150 over a mean of 100."""
    report = summarise(
        log_of(
            exchange(rank="0", prompt=100, cached=0),
            exchange(rank="0", prompt=100, cached=50),
            exchange(rank="1", prompt=100, cached=50),
        )
    )
    assert [(r.name, r.requests, r.uncached_tokens) for r in report.ranks] == [("w/0", 2, 150), ("w/1", 1, 50)]
    assert report.ranks[0].request_share == pytest.approx(2 / 3)
    assert report.ranks[0].hit_ratio == 0.25
    assert report.uncached_imbalance == 1.5
    assert report.request_imbalance == pytest.approx(4 / 3)


def test_errors_are_counted_apart_and_cancelled_requests_are_none() -> None:
    """Kinds with one example each; failures and warm-ups stay out of times, tokens and ranks."""
    report = summarise(
        log_of(
            exchange(first=0.2, gaps=(0.01, 0.03)),
            exchange(first=9.0, is_warmup=True, prompt=5000),
            exchange(outcome=Outcome.RESET),
            exchange(outcome=Outcome.RESET),
            exchange(outcome=Outcome.PUSHBACK),
            exchange(outcome=Outcome.CANCELLED),
        )
    )
    assert (report.requests, report.errors, report.cancelled, report.warmup_requests) == (5, 3, 1, 1)
    assert report.errors_by_kind == {"pushback": 1, "reset": 2}
    assert report.error_examples == {"pushback": "because of pushback", "reset": "because of reset"}
    assert (report.first_token_seconds.count, report.first_token_seconds.p99) == (1, 0.2)
    assert (report.inter_token_seconds.count, report.inter_token_seconds.p50) == (2, pytest.approx(0.02))
    assert report.tokens.prompt == 100


def test_cached_tokens_that_nobody_reports_are_unknown_and_those_left_out_by_some_are_none() -> None:
    """vLLM omits the field when nothing was cached, so it is 0 beside answers that have it, else unknown."""
    silent = summarise(log_of(exchange(cached=None), exchange(cached=None)))
    assert silent.hit_ratio.measured is None
    assert silent.tokens.cached is None
    assert silent.ranks[0].uncached_tokens is None
    assert summarise(log_of(exchange(cached=None), exchange(cached=60))).hit_ratio.measured == 0.3


def test_without_usage_the_ideal_is_weighted_with_bytes() -> None:
    """Bodies of 600 and 1,800 bytes at 0 and 1 make .75."""
    report = summarise(
        log_of(exchange(has_usage=False, prompt=100, ideal=0.0), exchange(has_usage=False, prompt=300, ideal=1.0))
    )
    assert report.hit_ratio.ideal == 0.75


def test_a_run_without_a_success_has_a_report() -> None:
    """Nothing divides by zero."""
    report = summarise(log_of(exchange(outcome=Outcome.CONNECT), seconds=0.0))
    assert (report.errors, report.hit_ratio.ideal, report.ranks, report.request_imbalance) == (1, 0.0, [], None)
    assert summarise(log_of()).requests == 0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    """As ``statistics.quantiles`` with the inclusive method."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    ordered = sorted(values)
    for share, cut in ((0.5, cuts[49]), (0.9, cuts[89]), (0.99, cuts[98])):
        assert percentile(ordered, share) == pytest.approx(cut, abs=1e-6)


def test_a_worker_asked_directly_has_ranks_and_no_reasons() -> None:
    """Its answers name the rank only: shares are told, reasons and expectations are not."""
    one = exchange(cached=50)
    served = [replace(one, answer=replace(one.answer, placement=Placement(rank))) for rank in ("0", "1", "1")]
    report = summarise(log_of(*served))
    assert [(rank.name, rank.requests) for rank in report.ranks] == [("rank 0", 1), ("rank 1", 2)]
    assert (report.reasons, report.hit_ratio.expected) == ({}, None)


def test_imbalance_is_largest_over_mean() -> None:
    """(6, 2, 1) has mean 3; one rank or no load has none."""
    assert imbalance([6, 2, 1]) == 2.0
    assert imbalance([5]) is None
    assert imbalance([0, 0]) is None


def test_a_report_survives_json() -> None:
    """What --json writes is what --compare reads."""
    report = summarise(
        log_of(exchange(rank="0", cached=5, gaps=(0.1,)), exchange(outcome=Outcome.RESET)),
        label="a",
        settings={"seed": 1, "warm_start": False, "gap_cap": 0.5, "client": "codex"},
    )
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def shown(*reports: Report) -> str:
    output = io.StringIO()
    console = Console(file=output, width=200)
    print_comparison(reports, console)
    for report in reports:
        print_report(report, console)
    return output.getvalue()


def test_tables_say_when_runs_are_not_comparable() -> None:
    """Equal digests pass in silence, different ones are named; measured stands beside ideal."""
    one = summarise(log_of(exchange(rank="0", prompt=100, cached=40, ideal=0.9)), label="one")
    other = summarise(log_of(exchange(rank="0"), digest="e"), label="other")
    assert "did not send the same requests" not in shown(one, one)
    text = shown(one, other)
    assert "did not send the same requests" in text
    assert "40.0%" in text
    assert "90.0%" in text
    assert "w/0" in text


def test_progress_off_a_terminal_is_a_line_each_hundred_requests() -> None:
    """250 requests, every second failing, make two lines with the hit rate so far."""
    output = io.StringIO()
    with ProgressView(Console(file=output, width=100), total_requests=250) as progress:
        for number in range(250):
            progress(exchange(cached=50, outcome=Outcome.RESET if number % 2 else Outcome.OK))
    assert output.getvalue().splitlines() == [
        "100 requests  hit rate 50.0%  50 errors",
        "200 requests  hit rate 50.0%  100 errors",
    ]
