"""What `pip install .` brings is enough for all that says so; every package of extras or of development is hidden."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
NO_PORTS = ("--port", "0", "--kv-events-port", "0", "--replay-port", "0")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def brought(requirements: list[str]) -> set[str]:
    """Distributions that come with these requirements, themselves included."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonical(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            waiting += requires(name) or []
        except PackageNotFoundError:  # of another platform or an optional part
            continue
    return found


def hidden() -> list[str]:
    """Top-level modules installed here that the package's ``dependencies`` do not bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = brought(project["dependencies"]) | {canonical(project["name"])}
    return [module for module, owners in packages_distributions().items() if there.isdisjoint(map(canonical, owners))]


@contextmanager
def started(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs ``program`` and finds none of the ``hidden`` modules."""
    hiding = f"import sys\nsys.modules.update(dict.fromkeys({hidden()!r}))\n"
    process = subprocess.Popen(
        [sys.executable, "-c", hiding + program, *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def homing(*arguments: str) -> tuple[int, str, str]:
    with started("from router.cli import main; sys.exit(main())", *arguments) as process:
        out, err = process.communicate(timeout=200)
        return process.returncode, out, err


def test_what_extras_bring_is_hidden() -> None:
    """The other tests here would prove nothing otherwise."""
    assert {"torch", "safetensors", "gguf", "redis", "llguidance"} <= set(hidden())


@pytest.mark.parametrize("command", ["router", "shim", "replay", "simulate", "bench", "check-events", "record-events"])
def test_every_command_explains_itself(command: str) -> None:
    """With the dependencies alone."""
    status, out, err = homing(command, "--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("shim", "--runner", "sim", *NO_PORTS),
        ("shim", "--runner", "sim", "--host-pool-tokens", "4096", *NO_PORTS),
        ("router", "--port", "0", "--admin.port", "0"),
    ],
)
def test_router_and_timing_model_serve(arguments: tuple[str, ...]) -> None:
    """They come up and go with the dependencies alone."""
    with started("from router.cli import main; sys.exit(main())", *arguments) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=200)
    assert " ready " in line, err
    assert process.returncode == 0, err


@pytest.mark.parametrize("model", ["needle", "smollm2"])
def test_a_shim_that_computes_names_what_it_lacks(model: str) -> None:
    """One line with the cause and the remedy."""
    status, out, err = homing("shim", "--model", model, *NO_PORTS)
    assert (status, out) == (1, "")
    assert err.startswith("homing shim: ")
    assert "homing[engine]" in err or "pip install" in err
    assert err.count("\n") == 1


def test_a_library_that_lacks_torch_says_so() -> None:
    """Card and cache layout are read without torch; weights name the extra."""
    program = """
from engine_shim.model.loading import layout_for, load_decoder
from engine_shim.model.tokenizer import MissingExtraError, read_card
card = read_card("needle")
assert layout_for(card.config, page_tokens=16, pool_tokens=1024).window is not None
try:
    load_decoder(card)
except MissingExtraError as error:
    print(error)
"""
    with started(program) as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "homing[engine]" in out
