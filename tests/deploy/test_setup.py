"""What setup.py compiles: by default what is installed for good, where that can be done, and otherwise what is said."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import mypyc.build
import pytest
import setuptools

SETUP = Path(__file__).parents[2] / "setup.py"
#: What stands for the modules that mypyc would make.
MADE = [setuptools.Extension("router.core.cost", ["cost.c"])]

Run = Callable[..., list[setuptools.Extension]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs setup.py for a command of setuptools; returns what it would build. mypyc's part is played here."""

    def run(command: str, *, asked: str | None = None, compiler: str = "cc", refuses: bool = False) -> object:
        given: dict[str, object] = {}

        def mypycify(paths: list[str], **_: object) -> list[setuptools.Extension]:
            if refuses:
                sys.exit(1)
            assert any(path.endswith("router/proxy/server.py") for path in paths)
            return MADE

        monkeypatch.setattr(sys, "argv", ["setup.py", command])
        monkeypatch.setattr(setuptools, "setup", given.update)
        monkeypatch.setattr(mypyc.build, "mypycify", mypycify)
        monkeypatch.setenv("CC", compiler)
        if asked is None:
            monkeypatch.delenv("HOMING_COMPILE", raising=False)
        else:
            monkeypatch.setenv("HOMING_COMPILE", asked)
        runpy.run_path(str(SETUP))
        return given["ext_modules"]

    return run


def test_an_ordinary_install_is_compiled(run: Run) -> None:
    """Pip builds a wheel."""
    assert run("bdist_wheel") == MADE


@pytest.mark.parametrize("command", ["editable_wheel", "egg_info", "dist_info", "sdist"])
def test_what_runs_from_sources_or_only_asks_is_not(run: Run, command: str) -> None:
    """An editable install, and pip's questions before it builds."""
    assert run(command) == []


def test_it_can_be_declined(run: Run) -> None:
    """By the variable."""
    assert run("bdist_wheel", asked="0") == []


@pytest.mark.parametrize(("how", "why"), [({"compiler": "/bin/false"}, "no C compiler"), ({"refuses": True}, "mypyc")])
def test_what_is_missing_is_said_and_no_failure(
    run: Run, capfd: pytest.CaptureFixture[str], how: dict[str, object], why: str
) -> None:
    """The install goes on in pure Python; asked for by name, it fails with the same words."""
    assert run("bdist_wheel", **how) == []
    said = capfd.readouterr().out
    assert said.startswith("Homing stays pure Python: ")
    assert why in said
    with pytest.raises(SystemExit, match=why):
        run("bdist_wheel", asked="1", **how)
