"""Who is measured: this engine, transformers' ``generate``, and vLLM in a process of its own.

All are given the same prompts as token ids, choose greedily, stop at nothing, and use one thread. Seconds are processor
time, so that what else a machine does matters little.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList

from engine_shim.model.loading import layout_for, load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.runner.shadow import ShadowRunner
from engine_shim.runner.torch_runner import TorchRunner
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.settings import ShimSettings
from engine_shim.types import Request, Sampling

Prompts = Sequence[Sequence[int]]
_PEER = Path(__file__).with_name("vllm_peer.py")


class ContenderError(Exception):
    """A contender cannot be had, or has failed; the message says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """Processor seconds until the last prompt had its first token, and from there on for ``decoded_tokens`` more.

    ``tokens`` are those chosen, of each prompt.
    """

    prefill_seconds: float
    decode_seconds: float
    decoded_tokens: int
    tokens: list[list[int]]


class Contender(Protocol):
    """One engine with one model. ``keeps_prefixes``: what it has computed of a prompt serves the next one."""

    keeps_prefixes: bool

    def run(self, prompts: Prompts, *, new_tokens: int) -> Run:
        """All prompts together, ``new_tokens`` of each."""
        ...

    def close(self) -> None: ...


class Homing:
    """A rank as ``homing shim`` makes it, its shadow included, without the server and the thread around it."""

    keeps_prefixes = True

    def __init__(self, folder: Path, *, dtype: torch.dtype, context_tokens: int, batch: int) -> None:
        settings = ShimSettings()
        decoder = load_decoder(read_card(str(folder)), dtype=dtype)
        layout = layout_for(
            decoder.config,
            page_tokens=settings.page_tokens,
            pool_tokens=max(settings.pool_tokens, batch * context_tokens),
        )
        self._scheduler = Scheduler(
            layout, max_running=batch, chunk_tokens=settings.chunk_tokens, max_context_tokens=context_tokens
        )
        self._runner = ShadowRunner(
            TorchRunner(decoder, layout),
            layout,
            generations=self._scheduler.generations,
            every_steps=settings.shadow_steps,
            sample=True,
        )

    def run(self, prompts: Prompts, *, new_tokens: int) -> Run:
        scheduler = self._scheduler
        sampling = Sampling(max_tokens=new_tokens, ignore_eos=True)
        first, early = 0.0, 0
        start = time.process_time()
        requests = [Request(str(place), tuple(prompt), sampling) for place, prompt in enumerate(prompts)]
        for request in requests:
            scheduler.add(request)
        while (batch := scheduler.schedule()) is not None:
            scheduler.commit(batch, self._runner.run(batch))
            scheduler.take_events()
            if not first and all(len(request.tokens) > len(request.prompt) for request in requests):
                first, early = time.process_time(), sum(len(request.output) for request in requests)
        tokens = [request.output for request in requests]
        return Run(first - start, time.process_time() - first, sum(map(len, tokens)) - early, tokens)

    def close(self) -> None:
        """Nothing stays behind."""


class Transformers:
    """``generate`` with its own cache, prompts padded on the left."""

    keeps_prefixes = False

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model.eval()  # type: ignore[no-untyped-call, unused-ignore]
        self._model.generation_config.eos_token_id = None  # as the others, it stops at nothing

    @torch.inference_mode()
    def run(self, prompts: Prompts, *, new_tokens: int) -> Run:
        first = 0.0

        def note(ids: torch.Tensor, _: object, **__: object) -> torch.Tensor:
            nonlocal first
            first = first or time.process_time()
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        start = time.process_time()
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
        chosen = self._model.generate(
            ids,
            attention_mask=(torch.arange(width) >= torch.tensor(padding)[:, None]).long(),
            max_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([note]),
        )
        end = time.process_time()
        return Run(first - start, end - first, len(prompts) * (new_tokens - 1), chosen[:, width:].tolist())

    def close(self) -> None:
        """Nothing stays behind."""


class Vllm:
    """vLLM under the interpreter ``python``; the process waits for work while the others are measured."""

    keeps_prefixes = True

    def __init__(self, python: str, folder: Path, *, dtype: str, context_tokens: int, batch: int, log: Path) -> None:
        """Raises ``ContenderError`` where it does not come up; ``log`` is where vLLM's own words go."""
        self._log = log
        with log.open("w") as stderr:
            try:
                self._process = subprocess.Popen(
                    [python, str(_PEER), str(folder), dtype, str(context_tokens), str(batch)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
            except OSError as error:
                raise ContenderError(f"{python} cannot be run: {error.strerror}") from error
        if self._line().strip() != "ready":
            self._fail()

    def run(self, prompts: Prompts, *, new_tokens: int) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._line()
        if not answer:
            self._fail()
        return Run(**json.loads(answer))

    def close(self) -> None:
        """End the process, and wait for that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _fail(self) -> NoReturn:
        self.close()
        errors = [line.strip() for line in self._log.read_text().splitlines() if "Error" in line]
        status = self._process.returncode
        raise ContenderError(f"vLLM ended with status {status}: {errors[-1] if errors else f'see {self._log}'}")
