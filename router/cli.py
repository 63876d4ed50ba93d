"""The command ``homing``: one word for what to run, then that part's own options.

Nothing heavy is imported before it is known which part runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

HELP = """\
usage: homing COMMAND [OPTIONS]

Homing sends each LLM request home: to the data-parallel rank whose KV cache already holds its
prefix. It stands in front of vLLM, SGLang or its own engine shim; OpenAI clients stay unchanged.

commands:
  router    route requests over workers: OpenAI API on :8000, admin, metrics and console on :8001
  shim      run a worker of our own: paged-KV engine with prefix cache and cache events, on :8100
  replay    load a router or worker with coding-agent sessions; report latency and cache hits
  record-events, check-events
            record an engine's cache events and requests; compare them with what the router predicts
  bench     measure the router's own parts: homing bench index
  simulate  compare routing policies over a recorded trace, in simulated time
  version   print the version, and whether its request path is compiled

try it on one machine, without a GPU:
  homing shim --runner sim --dp-size 2 --port 8100 &
  homing router --worker http://127.0.0.1:8100

in front of vLLM:
  vllm serve MODEL --data-parallel-size 2 --enable-prompt-tokens-details --kv-events-config \\
    '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv-events",
      "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
  homing router --worker http://HOST:8000 --port 9000 --model-tokenizer MODEL=/path/to/MODEL

in front of SGLang:
  python -m sglang.launch_server --model-path MODEL --dp-size 2 --enable-cache-report --kv-events-config \\
    '{"publisher": "zmq", "topic": "kv-events", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
  homing router --worker http://HOST:30000 --model-tokenizer MODEL=/path/to/MODEL

Each command explains its options: homing router --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 1 could not run, 2 was asked for something unknown, 130 Ctrl-C, and 141 if
    whoever reads its output has left (``| head``).
    """
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return 141
    except KeyboardInterrupt:  # while it loads, or of a command that has nothing to end first
        return 130


def _run(arguments: list[str]) -> int:
    match arguments:
        case [] | ["-h" | "--help" | "help"]:
            print(HELP, end="")
            return 0
        case ["version", "-h" | "--help"]:
            print("usage: homing version\n\nPrint the version, and whether the path of a request is compiled.")
            return 0
        case ["version" | "--version" | "-V"]:
            print(f"homing {_version()}, {_build()}")
            return 0
        case ["router", *rest]:
            return _part("router.options", extra=None)(rest)
        case ["shim", *rest]:
            return _part("engine_shim.cli", extra="engine")(rest)
        case ["replay", *rest]:
            return _part("loadtest.cli", extra=None)(rest)
        case ["simulate", *rest]:
            return _part("loadtest.simulate.cli", extra=None)(rest)
        case ["bench", *rest]:
            return _part("router.bench.cli", extra=None)(rest)
        case ["check-events" | "record-events", *_]:
            return _part("router.capture.cli", extra=None)(arguments)
        case [unknown, *_]:
            print(
                f"homing: unknown command {unknown!r}; homing --help names them all",
                file=sys.stderr,
            )
            return 2
    return 2


def _part(module: str, *, extra: str | None) -> Callable[[Sequence[str]], int]:
    """The ``main`` of a part; one that only prints the remedy where its libraries are missing."""
    try:
        main: Callable[[Sequence[str]], int] = import_module(module).main
    except ModuleNotFoundError as error:
        missing = error.name or module
        wanted = f"homing[{extra}]" if extra else "homing"
        sentence = f"homing: this command needs the package {missing}; install it with: pip install '{wanted}'"

        def explain(_: Sequence[str]) -> int:
            print(sentence, file=sys.stderr)
            return 1

        return explain
    return main


def _version() -> str:
    try:
        return version("homing")
    except PackageNotFoundError:
        return "0 (not installed)"


def _build() -> str:
    """Whether the path of a request runs as native code (see setup.py)."""
    found = find_spec("router.core.policy")
    return "pure Python" if found is None or (found.origin or "").endswith(".py") else "compiled"


if __name__ == "__main__":
    sys.exit(main())
