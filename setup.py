"""Native modules, on demand: ``HOMING_COMPILE=1 pip install --no-build-isolation .`` compiles the path of a request.

The same sources, compiled with mypyc: it comes with mypy, needs a C compiler and the packages that the sources import,
and takes a minute or two. Without the variable nothing is compiled. Everything else is in pyproject.toml.
"""

from __future__ import annotations

import os

from setuptools import setup

#: What runs for each request, and for each cache event. Left out are what msgspec reads annotations of, ``core/types``,
#: which the simulator derives from, and ``eager``, whose coroutine must be an interpreted one.
COMPILED = {
    "router/core": (
        "breaker cost draining fair_queue forecast index keys load namespaces pace pd policy provisional radix_pool "
        "rank_state recency retry ring seen session tables usable"
    ),
    "router/fleet": "decisions fleet member target",
    "router/proxy": (
        "answers arrival brain exchange forward gate holding instruments leases limits models outbound pair plane "
        "prepared promises relay server splitting types upstream watchdog"
    ),
    "router/telemetry": "tallies",
    "router/wire": "anthropic block_keys headers http1 known_heads openai responses sse text_keys",
}

extensions = []
if os.environ.get("HOMING_COMPILE") == "1":
    from mypyc.build import mypycify

    extensions = mypycify(
        [f"{folder}/{name}.py" for folder, names in COMPILED.items() for name in names.split()], opt_level="2"
    )
setup(ext_modules=extensions)
