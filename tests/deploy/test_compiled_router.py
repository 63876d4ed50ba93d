"""What `pip install .` compiles serves, reloads and stops as the sources do: the tests of whole processes on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: They start routers and shims as an operator does, and patch nothing.
OF_PROCESSES = (
    "tests/integration/control/test_router_process.py",
    "tests/integration/control/test_router_reload.py",
    "tests/integration/proxy/test_worker_tokenize_live.py",
)
#: Not optimised it does the same, only more slowly, and mypyc's C is compiled with its assertions.
BUILD = {"HOMING_COMPILE": "1", "MYPYC_OPT_LEVEL": "0"}
BUILD_SECONDS = 1_200
TEST_SECONDS = 600

pytestmark = pytest.mark.timeout(BUILD_SECONDS + TEST_SECONDS)


def run(tree: Path, *arguments: str, seconds: float, **environment: str) -> tuple[int, str]:
    """Exit status and output of Python in the tree, whose packages come before installed ones."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with what setup.py makes of them."""
    tree = tmp_path_factory.mktemp("compiled")
    for folder in ("router", "engine_shim", "loadtest", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__", "data"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    status, words = run(tree, "setup.py", "--quiet", "build_ext", "--inplace", seconds=BUILD_SECONDS, **BUILD)
    if "there is no C compiler" in words:
        pytest.skip(words.strip())
    assert status == 0, words[-2_000:]
    return tree


def test_it_is_compiled(compiled: Path) -> None:
    """Else the next test says nothing."""
    status, words = run(compiled, "-m", "router.cli", "version", seconds=60)

    assert (status, words.strip().endswith("compiled")) == (0, True), words


def test_processes_do_what_the_sources_do(compiled: Path) -> None:
    """Among others: exit status 0 and no word on stderr after a signal, with a stream under way."""
    status, words = run(compiled, "-m", "pytest", "-q", "-p", "no:cacheprovider", *OF_PROCESSES, seconds=TEST_SECONDS)

    assert status == 0, words[-4_000:]
