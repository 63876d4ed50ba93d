"""Settings from the command line, the environment (``HOMING__``, nested by ``__``) and a YAML file, in that order.

An unknown key or a bad value refuses to start, also where another source overrides it: ``load_settings`` raises
``ConfigError`` with one line that names the key, where it came from, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from router.errors import ConfigError
from router.knobs import knobs
from router.plain_words import masked, what_is_allowed
from router.settings import ModelSpec, Settings, WorkerSpec

ENV_PREFIX: Final = "HOMING__"
SHIM_PREFIX: Final = "HOMING_SHIM__"
#: What Kubernetes tells a pod of Services named ``homing`` or ``homing-...``.
_SERVICE_LINK: Final = re.compile(r"HOMING_(SERVICE|PORT)|HOMING_\w+_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))")

#: A nested mapping, as one source gives it.
Layer = Mapping[str, Any]


def load_settings(
    flags: Layer | None = None, *, environ: Mapping[str, str] | None = None, config: Path | None = None
) -> Settings:
    """Merge the command line, the environment and a YAML file, in that order of precedence.

    Raises ``ConfigError`` for a key nobody knows, a value that is not allowed, a file that cannot be read.
    """
    environ = os.environ if environ is None else environ
    layers: list[tuple[str, Layer]] = [
        ("the command line", flags or {}),
        ("the environment", _read_environment(environ)),
    ]
    if config is not None:
        layers.append((str(config), _read_yaml(config)))
    for layer in layers:
        _check_alone(*layer)
    merged: dict[str, Any] = {}
    for _, values in reversed(layers):
        merged = _over(merged, values)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise ConfigError(_one_line(error.errors(include_url=False)[0], layers)) from None


def _check_alone(name: str, layer: Layer) -> None:
    """A value that another source overrides today would be the surprise of the day on which it does not."""
    try:
        Settings(**layer)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            # What a whole section's values say together is judged when all sources are merged.
            if (
                details["type"] != "value_error"
                or details["loc"][0] in ("workers", "models")
                or len(details["loc"]) > 1
            ):
                raise ConfigError(_one_line(details, [(name, layer)])) from None


def _sections() -> set[tuple[int | str, ...]]:
    return {knob.path[:1] for knob in knobs() if len(knob.path) > 1}


# --- the environment -------------------------------------------------------------------------------


def _read_environment(environ: Mapping[str, str]) -> Layer:
    known = {(ENV_PREFIX + "__".join(knob.path)).upper(): knob for knob in knobs()}
    values: dict[str, Any] = {}
    for given, text in environ.items():
        name = given.upper()
        if not name.startswith("HOMING_") or name.startswith(SHIM_PREFIX) or _is_service_link(name, text):
            continue
        knob = known.get(name)
        if knob is None:
            raise ConfigError(f"unknown setting {given} in the environment{_right_name(name, list(known))}")
        *sections, leaf = knob.path
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = _list(knob.key, text) if knob.is_list else text
    return values


def _is_service_link(name: str, text: str) -> bool:
    is_address = name.endswith("_PORT") and text.startswith(("tcp://", "udp://", "sctp://"))
    return is_address or _SERVICE_LINK.match(name) is not None


def _right_name(wrong: str, known: list[str]) -> str:
    """Most often only an underscore is missing or too much; the shim's names are known by their beginning alone."""
    if wrong.startswith("HOMING_SHIM_"):
        return f"; did you mean {SHIM_PREFIX}{wrong.removeprefix('HOMING_SHIM_').lstrip('_')}, of the shim?"
    by_words = {re.sub("_+", "_", name): name for name in known}
    exact = by_words.get(re.sub("_+", "_", wrong))
    if exact:
        return f"; did you mean {exact}?"
    ends = [name.removeprefix(ENV_PREFIX) for name in known]
    close = difflib.get_close_matches(wrong.removeprefix("HOMING_").lstrip("_"), ends, n=1)
    if close:
        return f"; did you mean {ENV_PREFIX}{close[0]}?"
    return f"; the router's variables look like {ENV_PREFIX}SERVER__PORT"


def _list(key: str, text: str) -> list[Any]:
    """Values separated by commas, or a JSON list."""
    if not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return list(json.loads(text))
    except ValueError as error:
        raise ConfigError(f"bad value for {key} in the environment: the list is not JSON: {error}") from error


# --- the file --------------------------------------------------------------------------------------


def _read_yaml(path: Path) -> Layer:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path} must hold a mapping of settings, such as 'server: {{port: 8000}}'")
    # A section of which all lines are comments says nothing.
    return {key: value for key, value in data.items() if value is not None or (key,) not in _sections()}


def _over(below: Mapping[str, Any], above: Layer) -> dict[str, Any]:
    """``above`` laid over ``below``; mappings merge, everything else replaces."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _over(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


# --- telling what is wrong -----------------------------------------------------------------------


def _one_line(details: ErrorDetails, layers: list[tuple[str, Layer]]) -> str:
    path, kind = details["loc"], details["type"]
    key = ".".join(str(part) for part in path)
    given = path[:-1] if kind == "missing" else path
    origin = next((name for name, layer in layers if _holds(layer, given)), "the defaults")
    if kind == "extra_forbidden":
        return f"unknown setting {key} in {origin}{_suggestion(key, _siblings(path))}"
    if kind == "missing":
        return f"{key} is missing in {origin}"
    return f"bad value for {key} in {origin}{_shown(key, details['input'])}; {what_is_allowed(details)}"


def _shown(key: str, value: object) -> str:
    """The value, unless it is, or holds, one that may be secret."""
    if any(knob.is_secret and f"{knob.key}.".startswith(f"{key}.") for knob in knobs()):
        return ""
    return f": {masked(repr(value))}"


def _holds(layer: object, path: tuple[int | str, ...]) -> bool:
    for part in path:
        if isinstance(layer, str) and part == "url":
            return True  # a worker given as a bare URL
        is_item = isinstance(layer, list | tuple) and isinstance(part, int) and part < len(layer)
        if not is_item and not (isinstance(layer, Mapping) and part in layer):
            return False
        layer = cast("Any", layer)[part]
    return True


def _siblings(path: tuple[int | str, ...]) -> list[str]:
    """The keys that would have been right where ``path`` is wrong."""
    parent = path[:-1]
    items: dict[str, type[BaseModel]] = {"workers": WorkerSpec, "models": ModelSpec}
    if len(parent) == 2 and isinstance(parent[1], int):
        names = set(items[str(parent[0])].model_fields)
    else:
        names = {knob.path[len(parent)] for knob in knobs() if knob.path[: len(parent)] == parent}
    return sorted(".".join(map(str, (*parent, name))) for name in names)


def _suggestion(wrong: str, known: list[str]) -> str:
    close = difflib.get_close_matches(wrong, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(known)}" if 0 < len(known) <= 12 else ""
