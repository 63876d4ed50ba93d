"""What it costs not to keep the windows of prefixes: stored, rebuilt or in rings.

    python -m engine_shim.bench.tails

Two long prompts are asked in turn of a device with room for one, so that each comes back from host memory. The model is
random, with five sliding-window layers for each full one, as Gemma 3 has. On CPUs; prints a table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine_shim.bench.gpu import random_decoder
from engine_shim.cache.transfers import BackgroundMover, Place, WritePolicy
from engine_shim.model.config import from_hugging_face
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import layout_for
from engine_shim.offload.compose import BelowDevice, torch_mover
from engine_shim.runner.torch_runner import TorchRunner
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import Request, Sampling, WindowTails
from router.wire.kv_events import BlockStored

PAGE_TOKENS, CHUNK_TOKENS, FULL_EVERY = 16, 512, 6
_SHAPE = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "max_position_embeddings": 131_072,
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2 * FULL_EVERY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one way, for a prompt that comes back: tokens run, seconds to its first token, bytes kept on the host."""

    computed_tokens: float
    seconds: float
    host_bytes: int


class Rank:
    """Scheduler, runner and host of one way to have windows, stepped by hand."""

    def __init__(self, decoder: Decoder, tails: WindowTails, *, prompt_tokens: int) -> None:
        self.layout = layout_for(
            decoder.config,
            page_tokens=PAGE_TOKENS,
            pool_tokens=prompt_tokens + 2 * CHUNK_TOKENS,
            window_tails=tails,
            chunk_tokens=CHUNK_TOKENS,
        )
        self._runner = TorchRunner(decoder, self.layout)
        below = BelowDevice(4 * prompt_tokens, None, 0, WritePolicy.THROUGH, 4096)
        plan = below.plan(self.layout)
        self._mover: BackgroundMover = torch_mover(self._runner, plan, folder=None)
        self._scheduler = Scheduler(
            self.layout, chunk_tokens=CHUNK_TOKENS, max_context_tokens=131_072, offload=plan, mover=self._mover
        )
        self._asked = 0

    def ask(self, prompt: Sequence[int]) -> tuple[int, float]:
        """(tokens run, seconds to the first token); then waits until all is copied."""
        before, started = self._scheduler.stats().computed_tokens, time.perf_counter()
        self._asked += 1
        self._scheduler.add(Request(str(self._asked), tuple(prompt), Sampling(max_tokens=1)))
        while self._scheduler.has_work:
            batch = self._scheduler.schedule()
            if batch is None:
                time.sleep(0.0002)
            else:
                self._scheduler.commit(batch, self._runner.run(batch))
        seconds = time.perf_counter() - started
        while self._scheduler.awaits_transfers:
            time.sleep(0.001)
            self._scheduler.poll()
        return self._scheduler.stats().computed_tokens - before, seconds

    def host_bytes(self) -> int:
        """What the copies of all groups take, by what routers are told of them."""
        sizes = [sum(tensor[:, 0].nbytes for tensor in tensors) for tensors in self._runner.buffers]
        told = (event for event in self._scheduler.snapshot_events() if isinstance(event, BlockStored))
        return sum(len(event.hashes) * sizes[event.group] for event in told if event.medium == Place.HOST)

    def close(self) -> None:
        """End the threads."""
        self._mover.close()


def measure(*, prompt_tokens: int, window_tokens: int, rounds: int) -> dict[WindowTails, Cost]:
    """The ways side by side, a question of each in turn; medians over the rounds."""
    config = from_hugging_face(_SHAPE)
    layers = tuple(
        replace(layer, window_tokens=None if number % FULL_EVERY == FULL_EVERY - 1 else window_tokens)
        for number, layer in enumerate(config.layers)
    )
    decoder = random_decoder(
        replace(config, layers=layers), device=torch.device("cpu"), dtype=torch.float32, spread=0.02
    )
    prompts = [[3 + (i * i * (7 + n)) % 2000 for i in range(prompt_tokens)] for n in range(2)]
    ranks = {tails: Rank(decoder, tails, prompt_tokens=prompt_tokens) for tails in WindowTails}
    for rank in ranks.values():
        for prompt in prompts:
            rank.ask(prompt)
    asked: dict[WindowTails, list[tuple[int, float]]] = {tails: [] for tails in ranks}
    for number in range(rounds):
        for tails, rank in ranks.items():
            asked[tails].append(rank.ask([*prompts[number % 2], *range(3, 40)]))
    costs = {}
    for tails, rank in ranks.items():
        tokens, seconds = zip(*asked[tails], strict=True)
        costs[tails] = Cost(statistics.median(tokens), statistics.median(seconds), rank.host_bytes())
        rank.close()
    return costs


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m engine_shim.bench.tails")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--window-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    costs = measure(prompt_tokens=options.prompt_tokens, window_tokens=options.window_tokens, rounds=options.rounds)
    print(f"{options.prompt_tokens:,} tokens come back from the host; windows of {options.window_tokens}")
    print(" windows   tokens run   ms to first token   MB on the host")
    for tails, cost in costs.items():
        milliseconds, megabytes = 1000 * cost.seconds, cost.host_bytes / 1e6
        print(f" {tails.value:8} {cost.computed_tokens:11,.0f} {milliseconds:19,.0f} {megabytes:16,.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
