"""What the README lists is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from router import cli
from router.core.types import Reason


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text()


def test_every_reason_is_explained(readme: str) -> None:
    """One sentence has all values of the header, and no other."""
    (sentence,) = re.findall(r"^`x-homing-reason` is (.*?)\.\n\n", readme, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(Reason)


def test_every_command_is_named(readme: str) -> None:
    """As in the command's own help."""
    listed = cli.HELP.partition("commands:\n")[2].partition("\n\n")[0]
    heads = " ".join(re.findall(r"^  ([a-z-]+(?:, [a-z-]+)*)", listed, re.MULTILINE))
    commands = re.findall(r"[a-z-]+", heads)
    assert {"router", "simulate", "check-events", "version"} <= set(commands)
    assert [name for name in commands if f"homing {name}" not in readme] == []


def test_the_cpu_builds_of_torch_come_from_where_the_image_takes_them(readme: str, deploy: Path) -> None:
    """One address."""
    (index,) = re.findall(r"^ARG TORCH_INDEX=(\S+)$", (deploy / "docker/shim.Dockerfile").read_text(), re.MULTILINE)
    assert f"--extra-index-url {index}`" in readme
