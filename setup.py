"""Native modules: an ordinary install compiles the path of a request with mypyc, where that can be done.

The same sources, compiled; it takes a C compiler with Python's headers, and a minute or two. Where something is missing
the install goes on in pure Python and says so. ``HOMING_COMPILE=1`` fails there, ``HOMING_COMPILE=0`` compiles nothing.
``MYPYC_OPT_LEVEL``, as mypyc's own command reads it, is how much the C compiler optimises: 2, or 0 to be soon done.
An editable install runs the sources as they are edited. Everything else is in pyproject.toml.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

#: What runs for each request, and for each cache event. Left out are what msgspec reads annotations of, ``core/types``,
#: which the simulator derives from, and ``eager``, whose coroutine must be an interpreted one.
COMPILED = {
    "router/core": (
        "breaker chunked_prefill cost draining fair_queue forecast fullness guard index keys load names namespaces "
        "pace pd policy provisional radix_forecast radix_pool radix_requests rank_state recency retry ring seen "
        "session session_table tables usable ways"
    ),
    "router/fleet": "decisions fleet member target",
    "router/proxy": (
        "answers arrival brain exchange forward forwarder gate holding instruments knowledge leases limits models "
        "outbound pair plane prepared promises receiver relay server splitting types upstream watchdog"
    ),
    "router/telemetry": "tallies",
    "router/wire": "anthropic block_keys headers http1 known_heads openai responses sse taps text_keys",
}
#: Of packages that are there only where their feature is installed, mypy has nothing to look at.
MYPY_OPTIONS = (
    "--ignore-missing-imports",
    "--no-warn-unused-ignores",
    "--no-warn-return-any",
    "--allow-subclassing-any",
    "--allow-untyped-decorators",
)
#: Commands of setuptools that make what is installed. The others ask for names and versions, or for links to sources.
BUILDING = frozenset({"bdist_wheel", "build", "build_ext", "install"})

#: gcc looks for every line anew from the start of the file to see how it is indented, and mypyc writes 400,000 of them.
QUICK = "-Wno-misleading-indentation"

ASKED = os.environ.get("HOMING_COMPILE", "")
OPTIMISED = os.environ.get("MYPYC_OPT_LEVEL", "2")


class BuildModules(build_ext):
    """Builds all modules or none: a part of them alone could not be imported."""

    def run(self) -> None:
        self._remove_earlier()
        try:
            super().run()
        except CCompilerError as error:
            self._remove_earlier()
            for extension in self.extensions:
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            self.extensions.clear()
            stay_pure(f"the C compiler failed ({error})")

    def _remove_earlier(self) -> None:
        """Modules of a build before, which may have had others, would be installed as well."""
        for place in Path(self.build_lib).rglob("*" + sysconfig.get_config_var("EXT_SUFFIX")):
            place.unlink()


def modules() -> list[Extension]:
    """What is to be compiled, as C; nothing where that cannot be."""
    is_wanted = ASKED == "1" or (ASKED != "0" and not BUILDING.isdisjoint(sys.argv))
    if not is_wanted:
        return []
    if find_spec("mypyc") is None:
        return stay_pure("mypy is not installed")
    if not has_c_compiler():
        return stay_pure("there is no C compiler, or Python's headers are not (python3-dev)")
    from mypyc.build import mypycify

    paths = [f"{folder}/{name}.py" for folder, names in COMPILED.items() for name in names.split()]
    try:
        made = mypycify([*MYPY_OPTIONS, *paths], opt_level=OPTIMISED, debug_level="0")
    except SystemExit:
        return stay_pure("mypyc does not take the sources")
    if os.name == "posix":
        for extension in made:
            extension.extra_compile_args.append(QUICK)
    return made


def has_c_compiler() -> bool:
    """Whether a file that includes Python's headers compiles."""
    # Only there once setuptools has been imported.
    from distutils.ccompiler import new_compiler
    from distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    customize_compiler(compiler)
    compiler.add_include_dir(sysconfig.get_path("include"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "headers.c")
        source.write_text("#include <Python.h>\n")
        try:
            compiler.compile([str(source)], output_dir=folder)
        except CCompilerError:
            return False
    return True


def stay_pure(why: str) -> list[Extension]:
    """Say that nothing is compiled, and why. Exits where it was asked for."""
    if ASKED == "1":
        sys.exit(f"HOMING_COMPILE=1, but {why}.")
    print(f"Homing stays pure Python: {why}.")
    return []


setup(ext_modules=modules(), cmdclass={"build_ext": BuildModules})
