"""The command ``homing replay``: arguments to a plan, a run, a report."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import msgspec
from rich.console import Console

from loadtest.client import Address, AddressError, ChatClient, Timeouts
from loadtest.generator import AGENT_WORKLOAD, generate_sessions
from loadtest.identity import ClientProfile
from loadtest.replay import Replay, ReplayPlan, RunLog, Stop
from loadtest.report import Report, Setting, summarise
from loadtest.tables import ProgressView, output_console, print_comparison, print_report
from loadtest.trace import TraceError, choose_sessions, read_trace
from loadtest.types import Session, conversations, limit_turns
from loadtest.words import WORDS

DESCRIPTION = """\
Replay coding-agent sessions against an OpenAI-compatible address, closed loop: a turn is sent when the turn
before it was answered and its recorded gap has passed. Reports latency, errors, and the prefix hit rate measured
beside the ideal one of the same requests.
"""

EPILOG = """\
examples:
  homing replay --sessions 8 --turns 10
      eight generated sessions of at most ten turns against http://127.0.0.1:8000
  homing replay --trace sessions.jsonl.gz --lanes 16 --scale-time 1/60 --json run.json --label affinity
      a recording, an hour of its gaps in a minute, the report also as JSON
  homing replay --compare round_robin.json affinity.json
      reports side by side; equal digests mean that the same requests were sent

The same --seed, --scale-tokens and --client send the same requests, whatever the number of lanes. A second run against
a warm cache finds the first one's text there: give it another --salt, or empty the cache.

In tables of reports, max/mean is what the busiest rank computed over what a rank did on average: 1 is even.

exit status: 0 done; 1 the run failed (address, trace, or more errors than the budget); 2 bad usage; 130 Ctrl-C.
"""


def main(argv: list[str]) -> int:
    """Run the command; the exit status is described in its help."""
    parser = build_parser()
    options = parser.parse_args(argv)
    errors = Console(stderr=True)
    try:
        if options.compare:
            print_comparison([_load_report(path) for path in options.compare], output_console())
            return 0
        address = Address.parse(options.url)
        sessions = list(_sessions(options))
        log = asyncio.run(_replay(options, address, sessions, errors))
    except (TraceError, AddressError, _ReportError) as error:
        errors.print(f"homing replay: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    report = summarise(log, label=options.label, settings=settings_of(options))
    complaints = []
    try:
        _write(options, report, log)
    except OSError as error:
        complaints.append(f"{error.filename or 'the report'}: {error.strerror}")
    if log.stopped is Stop.ERROR_BUDGET or report.errors > options.error_budget * report.requests:
        complaints.append(
            f"{'stopped at ' if log.stopped is Stop.ERROR_BUDGET else ''}{report.errors} errors in {report.requests} "
            f"requests; --error-budget {options.error_budget:g} allows no more"
        )
    for complaint in complaints:
        errors.print(f"homing replay: {complaint}", style="red", markup=False, highlight=False, soft_wrap=True)
    if log.stopped is Stop.INTERRUPTED:
        return 130
    return 1 if complaints else 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="homing replay",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_argument_group("where to")
    where.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    where.add_argument("--model", help="model to ask for (default: the first that the server lists)")
    where.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="sent as a bearer token (default: $OPENAI_API_KEY)"
    )
    where.add_argument(
        "--client",
        type=_one_of(ClientProfile),
        default=ClientProfile.AIPERF,
        metavar="NAME",
        help=f"whose session headers to send: {', '.join(ClientProfile)} (default: %(default)s)",
    )
    what = parser.add_argument_group("what to send")
    source = what.add_mutually_exclusive_group()
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="recorded sessions or Mooncake requests, .jsonl or .jsonl.gz"
    )
    source.add_argument(
        "--generate", action="store_true", help="draw sessions from published statistics (default without --trace)"
    )
    what.add_argument(
        "--sessions", type=_whole(1), default=16, metavar="N", help="sessions to play (default: %(default)s)"
    )
    what.add_argument(
        "--turns", type=_whole(1), metavar="N", help="at most N turns of each conversation (default: all)"
    )
    what.add_argument(
        "--seed", type=_whole(0), default=0, metavar="S", help="decides sessions and their order (default: %(default)s)"
    )
    what.add_argument(
        "--scale-tokens",
        type=_ratio_above_zero,
        default=Fraction(1, 32),
        metavar="RATIO",
        help="words sent for each recorded token (default: %(default)s)",
    )
    what.add_argument("--salt", default="", metavar="TEXT", help="makes all text another, so that no cache knows it")
    what.add_argument("--no-subagents", action="store_true", help="main conversations only")
    what.add_argument("--keep-duplicates", action="store_true", help="play sessions marked as near-duplicates too")
    what.add_argument(
        "--live-output", action="store_true", help="quote the server's answers in later turns, not the recorded ones"
    )
    what.add_argument("--no-ignore-eos", action="store_true", help="leave out 'ignore_eos', for servers that refuse it")
    how = parser.add_argument_group("how to play")
    how.add_argument("--lanes", type=_whole(1), default=4, metavar="N", help="sessions at once (default: %(default)s)")
    how.add_argument(
        "--scale-time",
        type=_ratio,
        default=Fraction(1, 60),
        metavar="RATIO",
        help="seconds waited for each recorded second, 0 for no gaps (default: %(default)s)",
    )
    how.add_argument(
        "--gap-cap",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="longest gap, before scaling (default: %(default)s)",
    )
    how.add_argument(
        "--warm-start",
        action="store_true",
        help="start each session in its middle, after one request that fills the cache",
    )
    how.add_argument(
        "--duration",
        type=_seconds,
        metavar="SECONDS",
        help="stop after so long (default: when all sessions are played)",
    )
    how.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="longest silence of the server (default: %(default)s)",
    )
    how.add_argument(
        "--error-budget",
        type=_share,
        default=0.1,
        metavar="RATIO",
        help="stop when more of the requests fail (default: %(default)s)",
    )
    output = parser.add_argument_group("what to tell")
    output.add_argument("--label", default="", metavar="TEXT", help="names the run in tables and JSON")
    output.add_argument(
        "--json",
        type=lambda text: text if text == "-" else output_file(text),
        metavar="FILE",
        help="write the report as JSON; '-' for the standard output, without tables",
    )
    output.add_argument("--records", type=output_file, metavar="FILE", help="write one line of JSON for each request")
    output.add_argument(
        "--compare", nargs="+", type=Path, metavar="FILE", help="only show reports written by --json, side by side"
    )
    return parser


def _sessions(options: argparse.Namespace) -> Iterator[Session]:
    if options.trace is not None:
        recorded = read_trace(options.trace, keep_duplicates=options.keep_duplicates)
        chosen = choose_sessions(recorded, count=options.sessions, seed=options.seed)
    else:
        chosen = generate_sessions(options.sessions, seed=options.seed, workload=AGENT_WORKLOAD)
    for session in chosen:
        limited = limit_turns(session, options.turns) if options.turns else session
        yield _without_subagents(limited) if options.no_subagents else limited


def _without_subagents(session: Session) -> Session:
    turns = tuple(replace(turn, subagents=()) for turn in session.main.turns)
    return replace(session, main=replace(session.main, turns=turns))


async def _replay(options: argparse.Namespace, address: Address, sessions: list[Session], console: Console) -> RunLog:
    timeouts = Timeouts(silence_seconds=options.timeout)
    async with ChatClient(address, timeouts=timeouts, api_key=options.api_key) as client:
        model = options.model or await _first_model(client, options.url)
        plan = ReplayPlan(
            model=model,
            lanes=options.lanes,
            scale_tokens=options.scale_tokens,
            scale_time=options.scale_time,
            gap_cap_seconds=options.gap_cap,
            max_seconds=options.duration,
            error_budget_ratio=options.error_budget,
            profile=options.client,
            salt=options.salt,
            seed=options.seed,
            ignore_eos=not options.no_ignore_eos,
            live_output=options.live_output,
            warm_start=options.warm_start,
        )
        requests = sum(len(c.turns) for session in sessions for c in conversations(session))
        with ProgressView(console, total_requests=None if options.warm_start else requests) as progress:
            replay = Replay(plan, client, sessions=iter(sessions), vocabulary=WORDS, on_exchange=progress)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, replay.stop)
            try:
                return await replay.run()
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(number)


async def _first_model(client: ChatClient, url: str) -> str:
    models = await client.models()
    if not models:
        raise AddressError(f"{url} lists no model; is a worker up? Name one with --model to try all the same")
    return models[0]


def _write(options: argparse.Namespace, report: Report, log: RunLog) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if options.json == "-":
        sys.stdout.write(encoded.decode())
    else:
        print_report(report, output_console())
        if options.json:
            options.json.write_bytes(encoded)
    if options.records:
        lines = (msgspec.json.encode(exchange) + b"\n" for exchange in log.exchanges)
        options.records.write_bytes(b"".join(lines))


def settings_of(options: argparse.Namespace) -> dict[str, Setting]:
    """The options that decide what was sent and how; ratios as numbers. Never the key."""
    hidden = {"api_key", "json", "records", "compare", "label"}
    return {name: _plain(value) for name, value in vars(options).items() if name not in hidden and value is not None}


def _plain(value: object) -> Setting:
    if isinstance(value, Fraction):
        return float(value)
    return value if isinstance(value, bool | int | float) else str(value)


class _ReportError(Exception):
    """A file given to --compare is not a report."""


def _load_report(path: Path) -> Report:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise _ReportError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise _ReportError(f"{path} is not a report written by --json: {error}") from error


# Values of options. argparse names the option; these name the remedy.


def output_file(text: str) -> Path:
    """A file to write when all is over: that it cannot be is told before anything begins."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; name a file in a folder that is there")
    return path


def _whole(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return int(text)

    return parse


def _ratio(text: str) -> Fraction:
    try:
        ratio = Fraction(text)
    except (ValueError, ZeroDivisionError):
        ratio = Fraction(-1)
    if not 0 <= ratio <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ratio from 0 to 1; give it as 1/32 or 0.5")
    return ratio


def _ratio_above_zero(text: str) -> Fraction:
    ratio = _ratio(text)
    if not ratio:
        raise argparse.ArgumentTypeError("0 would leave no text to send; give it as 1/32 or 0.5")
    return ratio


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _seconds(text: str) -> float:
    seconds = _number(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _share(text: str) -> float:
    share = _number(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ratio from 0 to 1")
    return share


def _one_of(kinds: type[ClientProfile]) -> Callable[[str], ClientProfile]:
    def parse(text: str) -> ClientProfile:
        try:
            return kinds(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(kinds)}") from error

    return parse
