"""``homing router``: its command line, made from the settings tree, and how it starts or refuses to."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from router.errors import ConfigError
from router.knobs import Knob, knobs
from router.plain_words import masked
from router.settings import ModelSpec, Settings, WorkerSpec
from router.settings_sources import ENV_PREFIX, Layer, load_settings

#: Short names of what is set most often; every setting also has its long flag, ``--section.name``.
SHORT: dict[tuple[str, ...], str] = {
    ("server", "host"): "--host",
    ("server", "port"): "--port",
    ("admin", "host"): "--admin-host",
    ("admin", "port"): "--admin-port",
    ("routing", "policy"): "--policy",
    ("routing", "seed"): "--seed",
}

EPILOG = f"""\
examples:
  homing router --worker http://127.0.0.1:8100
  homing router --worker http://gpu1:8000 --worker http://gpu2:8000 --port 9000 --policy affinity
  homing router --config router.yaml --model-tokenizer my-model=/models/my-model

Every setting has a flag, an environment variable and a place in the YAML file:
  --server.max-body-bytes 1048576
  {ENV_PREFIX}SERVER__MAX_BODY_BYTES=1048576
  server: {{max_body_bytes: 1048576}}
The flag wins over the variable, the variable over the file. Lists are separated by commas, or written
as JSON; a list given at one place replaces the whole list below it.

exit status: 0 after a clean stop, 1 when a port is taken, 2 for a setting that is not understood.
"""


class _Parser(argparse.ArgumentParser):
    """Complains in one line, and guesses what was meant."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flag = unknown.split()[0].split("=")[0]
            options = [option for action in self._actions for option in action.option_strings]
            close = difflib.get_close_matches(flag, options, n=1)
            message = f"unknown option {flag}" + (f"; did you mean {close[0]}?" if close else "")
        raise ConfigError(message)


def main(argv: Sequence[str]) -> int:
    """Read the settings and serve until a signal. Returns the exit status."""
    try:
        settings = parse(argv)
    except ConfigError as error:
        print(f"homing router: {error}", file=sys.stderr)  # noqa: T201
        return 2
    from router.app import run  # the settings are checked before the servers' libraries are loaded

    return run(settings, reread=lambda: parse(argv))


def parse(argv: Sequence[str]) -> Settings:
    """The settings that a command line asks for. Raises ``ConfigError``; ``SystemExit`` after ``--help``."""
    given = vars(_parser().parse_args(argv))
    config: Path | None = given.pop("config", None)
    layer: dict[str, Any] = {}
    for key, value in given.items():
        *sections, name = key.split(".")
        place = layer
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return load_settings(layer, config=config)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="homing router",
        usage="homing router --worker URL [--worker URL ...] [OPTIONS]",
        description="Route LLM requests to the rank that already holds their prefix.",
        epilog=_keys("a worker, as JSON after --worker or in the YAML file's list 'workers':", WorkerSpec)
        + _keys("a model, in the YAML file's list 'models':", ModelSpec)
        + EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    common = parser.add_argument_group("most used")
    common.add_argument(
        "--worker",
        "--workers",
        dest="workers",
        action="append",
        type=_worker,
        metavar="URL",
        help='a worker, by its URL or as JSON with more of its settings: {"url": ..., "id": ...}; may be repeated',
    )
    common.add_argument(
        "--model-tokenizer",
        "--models",
        dest="models",
        action="append",
        type=_model,
        metavar="NAME=PATH",
        help="tokenizer and chat template of a model; default: asked of its workers; may be repeated",
    )
    common.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for knob in knobs():
        if knob.path in (("workers",), ("models",)):
            continue
        section = knob.path[0] if len(knob.path) > 1 else "log"
        if knob.path in SHORT or section == "log":
            group = common
        else:
            if section not in groups:
                groups[section] = parser.add_argument_group(section)
            group = groups[section]
        _add(group, knob)
    return parser


def _keys(of: str, model: type[BaseModel]) -> str:
    """What stands in the help of the keys of one entry of a list."""
    told = (f"{name:<15} {field.description}" for name, field in model.model_fields.items())
    return "\n".join(
        [of, *(textwrap.fill(line, 100, initial_indent="  ", subsequent_indent=" " * 18) for line in told), "", ""]
    )


def _add(group: argparse._ArgumentGroup, knob: Knob) -> None:
    long_flag = "--" + knob.key.replace("_", "-")
    short = SHORT.get(knob.path)
    group.add_argument(
        *([short] if short else []),
        long_flag,
        dest=knob.key,
        type=_commas if knob.is_list else str,
        metavar=_metavar(knob),
        help=_help(knob).replace("%", "%%"),
    )


def _help(knob: Knob) -> str:
    default = knob.field.default
    shown = (
        ",".join(default)
        if isinstance(default, tuple)
        else str(default).lower()
        if isinstance(default, bool)
        else default
    )
    note = f"default: {shown}" if shown not in ("", None) else ""
    return " ".join(part for part in (knob.field.description, f"({note})" if note else "") if part)


def _metavar(knob: Knob) -> str:
    kind = knob.field.annotation
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "|".join(kind)
    for constraint in knob.field.metadata:
        pattern: str = getattr(constraint, "pattern", None) or ""
        if pattern.startswith("^("):
            return pattern[2:-2]
    if kind is bool:
        return "true|false"
    if kind is int:
        return "N"
    if kind is float:
        return "SECONDS" if knob.path[-1].endswith("_seconds") else "NUMBER"
    if kind == Path | None:
        return "FILE"
    return "A,B" if knob.is_list else "HOST" if knob.path[-1] == "host" else "TEXT"


def _commas(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _worker(text: str) -> object:
    try:
        return json.loads(text) if text.startswith("{") else text
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{masked(repr(text))} is not JSON: {error}") from error


def _model(text: str) -> Layer:
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH, such as my-model=/models/my-model")
    return {"name": name, "tokenizer": path}
