"""Where the deployment files lie, and Prometheus' programs where the machine has them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def deploy() -> Path:
    """The folder under test."""
    return ROOT / "deploy"


def _program(name: str) -> str:
    # `.ci/run` unpacks them here, and `make test` puts the folder on PATH; pytest alone finds it too.
    unpacked = ROOT / "build/debian/prometheus/usr/bin"
    found = shutil.which(name) or shutil.which(name, path=str(unpacked))
    if found is None:
        pytest.skip(f"{name} is not installed; .ci/run fetches it (Debian package prometheus)")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus' own checker."""
    return _program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    """The server."""
    return _program("prometheus")
