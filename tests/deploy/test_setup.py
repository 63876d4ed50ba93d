"""What setup.py compiles: by default what is installed for good, where that can be done, and otherwise what is said."""

from __future__ import annotations

import runpy
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mypyc.build
import pytest
import setuptools
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SETUP = Path(__file__).parents[2] / "setup.py"
#: What stands for the modules that mypyc would make.
MADE = [setuptools.Extension("router.core.cost", ["cost.c"])]

Run = Callable[..., list[setuptools.Extension]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, namespace: dict[str, Any]) -> Run:
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
        namespace.update(runpy.run_path(str(SETUP)))
        return given["ext_modules"]

    return run


@pytest.fixture
def namespace() -> dict[str, Any]:
    """What setup.py has defined, once it has been run."""
    return {}


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


@pytest.mark.parametrize("fails", [False, True])
def test_no_module_of_an_earlier_build_is_installed(
    run: Run,
    namespace: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    fails: bool,
) -> None:
    """Nor a part of this one, where the C compiler fails half way."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    old, new, source = (tmp_path / f"router/core/{name}" for name in (f"gone{suffix}", f"cost{suffix}", "cost.py"))
    source.parent.mkdir(parents=True)
    old.touch()
    source.touch()

    def build(self: build_ext) -> None:
        assert not old.exists()
        new.touch()
        if fails:
            raise CompileError("killed")

    made = run("bdist_wheel")
    monkeypatch.setattr(build_ext, "run", build)
    command = namespace["BuildModules"](setuptools.Distribution({"ext_modules": list(made)}))
    command.build_lib = str(tmp_path)
    command.finalize_options()
    command.run()
    assert new.exists() is not fails
    assert source.exists()
    assert ("the C compiler failed (killed)" in capfd.readouterr().out) is fails
    assert bool(command.extensions) is not fails
