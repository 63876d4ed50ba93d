"""``homing bench cpu``: prefill and decode of this engine beside transformers and vLLM, on one core of this machine.

Each round gives all of them the same new prompts, one after the other; a ratio is the median over the rounds of how
many times as many tokens a processor second this engine does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_shim.bench.contenders import Contender

_DESCRIPTION = """\
Prefill and decode of this engine beside transformers' generate, and vLLM's CPU build, with the same random weights.

  prefill   prompt tokens a processor second, until every prompt has its first token
  decode    tokens a processor second from there on
  warm      prefill where all but the last 32 tokens of each prompt were computed before; transformers, which keeps
            nothing from one call to the next, computes them again
  same      share of the prompts whose greedy tokens are the same in both engines

One core, one thread, greedy, no stop tokens. Every round all engines get the same new prompts in turn.
"""
_EPILOG = """\
examples:
  homing bench cpu                                         all models, beside transformers
  homing bench cpu --models qwen3,135m --rounds 9          fewer models, more rounds
  homing bench cpu --beside-vllm /path/to/venv/bin/python  beside vLLM's CPU build as well
"""
_MODELS = ("qwen3", "gemma3", "llama", "qwen3_next", "135m")
_VOCABULARY = 2048
_FIRST_PLAIN = 3
_TAIL_TOKENS = 32
_BATCH = 8


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked at once: as many prompts as ``lengths``. ``warm``: they share all but their last tokens, known."""

    name: str
    lengths: tuple[int, ...]
    new_tokens: int
    warm: bool = False


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a processor second in one round; ``decode`` None where only prefill was measured."""

    prefill: float
    decode: float | None
    tokens: list[list[int]]


def cases(model: str) -> tuple[Case, ...]:
    """The cases of a model, shorter ones where arithmetic takes seconds."""
    prompt, new = (128, 16) if model == "135m" else (512, 64)
    mixed = tuple(prompt * (place + 1) // _BATCH for place in range(_BATCH))
    return (
        Case("batch 1", (prompt,), new),
        Case("batch 8", (prompt,) * _BATCH, new),
        Case("batch 8, padded", mixed, new),
        Case("batch 8, warm", (4 * prompt + _TAIL_TOKENS,) * _BATCH, 1, warm=True),
    )


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns 0, 1 if something needed is not installed, 2 for options that make no sense."""
    options = _parser().parse_args(argv)
    models = options.models.split(",")
    if unknown := sorted(set(models) - set(_MODELS)):
        return _refuse(f"no model {', '.join(unknown)}; there are {', '.join(_MODELS)}", status=2)
    if options.rounds < 1:
        return _refuse("--rounds is at least 1", status=2)
    os.environ["OMP_NUM_THREADS"] = "1"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    try:
        import torch
        from transformers.utils import logging
    except ImportError as error:
        return _refuse(f"{error.name} is needed: pip install 'homing[engine]' transformers", status=1)
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    peers = ["transformers", *(["vllm"] if options.beside_vllm else [])]
    rows: list[dict[str, object]] = []
    if not options.json:
        _print_head(peers)
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for row in _measure(model, Path(folder), options):
                rows.append(row)
                if not options.json:
                    _print_row(row, peers)
    if options.json:
        print(json.dumps({"dtype": options.dtype, "rounds": options.rounds, "rows": rows}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="homing bench cpu",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--models", default=",".join(_MODELS), help="which, separated by commas (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, behind one that warms up (default: 5)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside-vllm", metavar="PYTHON", help="an interpreter that has vLLM's CPU build")
    return parser


def _refuse(message: str, *, status: int) -> int:
    print(f"homing bench cpu: {message}", file=sys.stderr)
    return status


def _measure(model: str, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """The rows of one model, as they are measured."""
    from engine_shim.bench.shapes import write_model

    _tell(f"{model}: loading")
    path = write_model(model, folder, seed=options.seed)
    contenders, absent = _contenders(model, path, options)
    rng = random.Random(options.seed)
    try:
        for case in cases(model):
            _tell(f"{model}: {case.name}")
            rounds = [_round(case, contenders, rng) for _ in range(1 + options.rounds)][1:]
            yield {"model": model, "case": case.name, **_summary(rounds), **absent}
    finally:
        for contender in contenders.values():
            contender.close()


def _contenders(
    model: str, path: Path, options: argparse.Namespace
) -> tuple[Mapping[str, Contender], Mapping[str, str]]:
    """Who takes part, this engine first, and why others do not."""
    import torch

    from engine_shim.bench.contenders import ContenderError, Homing, Transformers, Vllm

    context_tokens = max(max(case.lengths) + case.new_tokens for case in cases(model))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    contenders: dict[str, Contender] = {
        "homing": Homing(path, dtype=dtype, context_tokens=context_tokens, batch=_BATCH),
        "transformers": Transformers(path, dtype=dtype),
    }
    if options.beside_vllm:
        try:
            contenders["vllm"] = Vllm(
                options.beside_vllm,
                path,
                dtype=options.dtype,
                context_tokens=context_tokens,
                batch=_BATCH,
                log=path / "vllm.log",
            )
        except ContenderError as error:
            _tell(f"{model}: {error}")
            return contenders, {"vllm": str(error)}
    return contenders, {}


def _round(case: Case, contenders: Mapping[str, Contender], rng: random.Random) -> dict[str, Speeds]:
    """The same new prompts for everybody: one token each for the prefill's time, then all for the decode's."""
    prefix, *asked = (_prompts(case, rng) for _ in range(3))
    if case.warm:
        shared = prefix[0][:-_TAIL_TOKENS]
        asked = [[shared + prompt[-_TAIL_TOKENS:] for prompt in prompts] for prompts in asked]
    speeds = {}
    for name, contender in contenders.items():
        if case.warm and contender.keeps_prefixes:
            contender.run([shared], new_tokens=1)
        run = contender.run(asked[0], new_tokens=1)
        prefill, decode = sum(case.lengths) / run.prefill_seconds, None
        if case.new_tokens > 1:
            run = contender.run(asked[1], new_tokens=case.new_tokens)
            decode = run.decoded_tokens / run.decode_seconds
        speeds[name] = Speeds(prefill, decode, run.tokens)
    return speeds


def _prompts(case: Case, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(_FIRST_PLAIN, _VOCABULARY) for _ in range(length)] for length in case.lengths]


def _summary(rounds: Sequence[Mapping[str, Speeds]]) -> dict[str, object]:
    """Medians over the rounds: each engine's speeds, and this engine's over the other's."""
    summary: dict[str, object] = {}
    for name in rounds[0]:
        figures: dict[str, float] = {}
        for phase in ("prefill", "decode"):
            pairs = [(getattr(each["homing"], phase), getattr(each[name], phase)) for each in rounds]
            if None in pairs[0]:
                continue
            figures[f"{phase}_tokens_per_s"] = round(statistics.median(theirs for _, theirs in pairs))
            figures[f"{phase}_ratio"] = round(statistics.median(ours / theirs for ours, theirs in pairs), 2)
        same = [
            ours == theirs
            for each in rounds
            for ours, theirs in zip(each["homing"].tokens, each[name].tokens, strict=True)
        ]
        figures["same"] = round(sum(same) / len(same), 3)
        summary[name] = figures
    return summary


def _print_head(peers: Sequence[str]) -> None:
    print("tokens a processor second, and how many times as many as each of the others\n")
    print(f"{'':28}{'prefill':>9}{'decode':>8}" + "".join(f"{f'x {peer}':>26}" for peer in peers))
    print(f"{'':45}" + f"{'prefill  decode    same':>26}" * len(peers), flush=True)


def _print_row(row: Mapping[str, object], peers: Sequence[str]) -> None:
    own = row["homing"]
    assert isinstance(own, Mapping)
    line = f"{row['model']!s:11}{row['case']!s:17}{_cell(own, 'prefill_tokens_per_s', ','):>9}"
    line += f"{_cell(own, 'decode_tokens_per_s', ','):>8}"
    for peer in peers:
        theirs = row.get(peer)
        ratios = (("prefill_ratio", ".2f"), ("decode_ratio", ".2f"), ("same", ".0%"))
        cells = [_cell(theirs, *ratio) if isinstance(theirs, Mapping) else "-" for ratio in ratios]
        line += f"{cells[0]:>10}{cells[1]:>8}{cells[2]:>8}"
    print(line, flush=True)


def _cell(figures: Mapping[str, float], name: str, form: str) -> str:
    return format(figures[name], form) if name in figures else "-"


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
