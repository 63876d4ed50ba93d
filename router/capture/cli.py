"""The commands ``homing check-events`` and ``homing record-events``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.capture.check import Report, check
from router.capture.format import find_captures, read_capture
from router.errors import CaptureError


def check_events(argv: Sequence[str]) -> int:
    """``homing check-events``. Returns the exit status: 0 whatever the score is, 1 for a file that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="homing check-events",
        description="Replay captured event streams through the router's own code and compare what it predicts of each "
        "request's cached tokens with what the engine reported.",
        epilog="A capture is NAME.jsonl and NAME.requests.jsonl, gzipped or not; name either. "
        "homing record-events makes them.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a capture's frames or requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verbose", action="store_true", help="print every request that was predicted wrongly")
    options = parser.parse_args(argv)
    try:
        reports = [check(read_capture(*files)) for files in find_captures(options.files)]
    except CaptureError as error:
        print(f"homing check-events: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(_summary(reports)))
    else:
        for line in _lines(reports, is_verbose=options.verbose):
            print(line)
    return 0


def _summary(reports: Sequence[Report]) -> dict[str, Any]:
    """All captures together, and each; the totals stand at the top."""
    files: list[dict[str, Any]] = [
        {
            "name": report.name,
            "requests": len(report.verdicts) if report.verdicts is not None else 0,
            "exact": report.exact,
            "over": report.over,
            "under": report.under,
            "groups": [
                {
                    "group": group.number,
                    "kind": group.kind,
                    "block_tokens": group.block_tokens,
                    "window_tokens": group.window_tokens,
                }
                for group in report.groups
            ],
            "frames": report.frames,
            "damaged": report.damaged,
        }
        for report in reports
    ]
    totals = {name: sum(file[name] for file in files) for name in ("requests", "exact", "over", "under")}
    groups = files[0]["groups"] if len(files) == 1 else {file["name"]: file["groups"] for file in files}
    return {**totals, "groups": groups, "files": files}


def _lines(reports: Sequence[Report], *, is_verbose: bool) -> list[str]:
    width = max(len(report.name) for report in reports)
    lines = [f"{'capture':<{width}}  requests  exact  over  under  groups"]
    for report in reports:
        groups = ", ".join(
            f"{group.kind}{f' {group.window_tokens}' if group.window_tokens else ''} in blocks of {group.block_tokens}"
            for group in report.groups
        )
        if report.verdicts is None:
            lines.append(f"{report.name:<{width}}  no requests file: {report.frames} frames only; {groups}")
            continue
        counts = f"{len(report.verdicts):>8}  {report.exact:>5}  {report.over:>4}  {report.under:>5}"
        lines.append(f"{report.name:<{width}}  {counts}  {groups or 'none'}")
        if report.damaged:
            lines.append(f"{'':<{width}}  {report.damaged} messages could not be decoded")
        if is_verbose:
            lines += [
                f"    {verdict.at_seconds:9.3f}s rank {verdict.rank} {verdict.tag or 'request'}: "
                f"predicted {verdict.predicted_tokens}, was {verdict.actual_tokens} of {verdict.prompt_tokens}"
                for verdict in report.verdicts
                if verdict.predicted_tokens != verdict.actual_tokens
            ]
    if len(reports) > 1:
        judged = sum(len(report.verdicts or ()) for report in reports)
        exact, over, under = (sum(getattr(report, name) for report in reports) for name in ("exact", "over", "under"))
        lines.append(f"{'all':<{width}}  {judged:>8}  {exact:>5}  {over:>4}  {under:>5}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Run one of the commands; its name comes first."""
    name, *rest = argv
    return {"check-events": check_events}[name](rest)
