"""``homing bench NAME``: how fast the router's own parts and its engine are on this machine. A table of benches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from router.bench.running import CannotRun

#: Each module has a ``main(argv) -> exit status``. The sentence is the help's.
BENCHES = {
    "decide": ("router.bench.decide", "tokens, keys, lookup and decision of a long conversation's next turn"),
    "proxy": ("router.bench.proxy", "processor time of a request on its way through, beside a bare relay"),
    "memory": ("router.bench.memory", "what idle clients, streams, and clients that do not read keep in memory"),
    "index": ("router.bench.index", "hashing, events and lookups of the cache index"),
    "cpu": (
        "engine_shim.bench.cpu",
        "prefill and decode of the shim's engine beside transformers and vLLM, on one core",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run one bench. Returns its exit status: 1 where it cannot run here, 2 for a name that is none."""
    if argv and argv[0] in BENCHES:
        bench: Callable[[Sequence[str]], int] = import_module(BENCHES[argv[0]][0]).main
        try:
            return bench(argv[1:])
        except CannotRun as error:
            print(f"homing bench {argv[0]}: {error}", file=sys.stderr)
            return 1
    lines = "\n".join(f"  {name:8}  {sentence}" for name, (_, sentence) in BENCHES.items())
    text = f"usage: homing bench NAME [OPTIONS]\n\nbenches:\n{lines}\n"
    if not argv or argv[0] in ("-h", "--help"):
        print(text, end="")
        return 0
    print(f"homing bench: unknown bench {argv[0]!r}\n\n{text}", end="", file=sys.stderr)
    return 2
