"""The commands ``homing check-events`` and ``homing record-events``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from router.capture.check import Report, check
from router.capture.drive import Script, drive
from router.capture.format import find_captures, find_files, read_capture
from router.capture.passthrough import Door, open_door, serve
from router.capture.record import Tape, following
from router.errors import CaptureError, WorkerError
from router.fleet.worker_api import describe
from router.option_values import ratio, seconds, whole
from router.plain_words import masked, what_is_allowed
from router.settings import WorkerSpec

#: Options of the load that are no counts of at least one.
_VALUES: dict[str, Callable[[str], float]] = {
    "aborts": ratio,
    "salts": ratio,
    "patience_seconds": seconds,
    "seed": int,
}
#: What the others are, for the help.
_LOAD = {
    "sessions": "conversations of the load",
    "turns": "turns of each",
    "concurrency": "conversations at a time",
    "system_tokens": "tokens of the head that two of three share",
    "turn_tokens": "tokens that a turn adds, half to twice as many",
    "output_tokens": "tokens of an answer",
    "aborts": "share of the turns whose answers are cut off",
    "salts": "share of the conversations that have a salt of their own",
    "seed": "decides all of the load",
    "patience_seconds": "a worker that is away for longer ends the recording",
}
_COUNTS = "vLLM tells them with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
_GEOMETRY = 'what no event says: {"attention_chunk_size": N, "eagle": true, "lora_modules": {"NAME": "PATH"}}'


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
        captures = find_captures(options.files)
        reports = _told_apart([check(read_capture(*files)) for files in captures], [frames for frames, _ in captures])
    except CaptureError as error:
        print(f"homing check-events: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(_summary(reports)))
    else:
        for line in _lines(reports, is_verbose=options.verbose):
            print(line)
    return 0


def _told_apart(reports: Sequence[Report], frames: Sequence[Path]) -> list[Report]:
    """Captures of one name, from several folders, are named by their paths."""
    count = Counter(report.name for report in reports)
    return [
        report if count[report.name] == 1 else replace(report, name=str(path.with_name(report.name)))
        for report, path in zip(reports, frames, strict=True)
    ]


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
        if report.without_ids:
            lines.append(f"{'':<{width}}  not judged, for want of the prompt's token ids: {report.without_ids}")
        if report.without_counts:
            lines.append(f"{'':<{width}}  not judged, for want of cached_tokens: {report.without_counts} ({_COUNTS})")
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


def record_events(argv: Sequence[str]) -> int:
    """``homing record-events``. Returns the exit status: 0, or 1 for a worker or port that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="homing record-events",
        description="Record a worker's cache events and the requests it serves, for homing check-events. By default a "
        "door is opened: send requests there instead of to the worker, and stop with Ctrl-C. With --drive a small "
        "scripted load is run instead.",
        epilog="Token ids are asked of the engine, so answers have more fields than without. Prompts are written "
        "down as they are; credentials are not.",
    )
    script = Script()
    parser.add_argument("--worker", required=True, metavar="URL", help="the worker to record")
    parser.add_argument("--name", required=True, type=_name, help="writes NAME.jsonl and NAME.requests.jsonl")
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DIR", help="where (default: here)")
    parser.add_argument("--overwrite", action="store_true", help="write over a capture of that name")
    parser.add_argument("--kv-events", metavar="tcp://HOST:PORT", help="endpoint of rank 0 (default: asked)")
    parser.add_argument("--dp-size", type=int, metavar="N", help="ranks of the worker (default: asked)")
    parser.add_argument("--host", default="127.0.0.1", help="of the door (default: 127.0.0.1)")
    parser.add_argument("--port", type=whole(0, 65535), default=8099, help="of the door (default: 8099; 0: any)")
    parser.add_argument("--geometry", type=_mapping, default={}, metavar="JSON", help=_GEOMETRY)
    parser.add_argument("--drive", action="store_true", help="run the scripted load")
    for name, default in asdict(script).items():
        flag = "--" + name.replace("_", "-")
        value = {"aborts": "RATIO", "salts": "RATIO", "patience_seconds": "SECONDS"}.get(name, "N")
        told_of = f"{_LOAD[name]} (default: {default:g})"
        kind = _VALUES.get(name, whole(1))
        parser.add_argument(flag, type=kind, default=default, metavar=value, help=told_of)
    options = parser.parse_args(argv)
    script = Script(**{name: getattr(options, name) for name in asdict(script)})
    told = {"url": options.worker, "kv_events": options.kv_events, "dp_size": options.dp_size}
    try:
        spec = WorkerSpec.model_validate(told)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        option = {"url": "--worker"}.get(name := str(wrong["loc"][0]), "--" + name.replace("_", "-"))
        parser.error(f"bad value for {option}: {masked(repr(told[name]))}; {what_is_allowed(wrong)}")
    try:
        return _run(options, spec, script)
    except KeyboardInterrupt:  # during the scripted load
        print(f"homing record-events: stopped; what was recorded is in {_shown(options)}", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, spec: WorkerSpec, script: Script) -> int:
    status = 0
    try:
        asyncio.run(_record(options, spec, script))
    except* (WorkerError, CaptureError, OSError) as failed:
        first: BaseException = failed
        while isinstance(first, BaseExceptionGroup):  # what runs side by side fails for one reason
            first = first.exceptions[0]
        print(f"homing record-events: {first}", file=sys.stderr)
        status = 1
    return status


def _shown(options: argparse.Namespace) -> str:
    return f"{options.folder / options.name}.*"


def _name(text: str) -> str:
    if not text or Path(text).name != text:
        raise argparse.ArgumentTypeError("a name is needed, without a path; --folder says where")
    return text


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed")
    return value


async def _record(options: argparse.Namespace, spec: WorkerSpec, script: Script) -> None:
    if not options.overwrite and (there := find_files(options.folder, options.name)):
        raise CaptureError(f"{there[0]} is there already; give another --name, or --overwrite")
    say = partial(print, file=sys.stderr, flush=True)
    patience = httpx.Timeout(20.0 if options.drive else 3600.0)
    async with contextlib.AsyncExitStack() as stack:
        listening = None if options.drive else stack.enter_context(open_door(options.host, options.port))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=patience, trust_env=False))
        info = await describe(client, spec)
        tape = stack.enter_context(Tape(options.name, options.folder))
        async with following(info, tape):
            tape.note(
                "note",
                text="server_info",
                engine=str(info.engine),
                models=info.models,
                geometry={
                    "block_size": info.block_tokens,
                    "dp_size": info.dp_size,
                    "pool_tokens": info.pool_tokens,
                    "pool_blocks": info.pool_blocks,
                    "chunked_prefill_size": info.prefill_chunk_tokens,
                    "max_running_requests": info.max_running_requests,
                    "retention_tokens": info.retention_tokens,
                    **options.geometry,
                },
            )
            if listening is None:
                await drive(info, tape, client, script, say=say)
            else:
                host = f"[{options.host}]" if ":" in options.host else options.host
                print(f"send requests to http://{host}:{listening.getsockname()[1]}; stop with Ctrl-C", flush=True)
                await serve(Door(info, tape, client, patience_seconds=script.patience_seconds, say=say), listening)
        print(f"{tape.frames} messages, {tape.requests} requests in {_shown(options)}")
        if tape.requests and not tape.frames:
            say("not one cache event came with them: were all prompts shorter than a block?")


def main(argv: Sequence[str]) -> int:
    """Run one of the commands; its name comes first."""
    name, *rest = argv
    commands = {"check-events": check_events, "record-events": record_events}
    return commands[name](rest)
