"""Record what vLLM's own scheduler publishes and finds, for groups of layers of every kind. Where vLLM is installed:

    python tests/data/kv_scheduler/record.py MODEL_FOLDER [NAME...]

No model runs: tokens are drawn at random. Each file has, in order, the requests sent, the event batches published and
what a prompt would reuse at that moment (``KVCacheManager.get_computed_blocks``). The files beside this one are from
vLLM 0.32.0.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MOST_TOKENS, STEPS, VOCABULARY = 1024, 150, 60
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def full(block: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block, **SHAPE)


def window(block: int, tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **SHAPE)


def chunk(block: int, tokens: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=tokens, **SHAPE)


def state(block: int, drafts: int = 0) -> KVCacheSpec:
    return MambaSpec(
        block_size=block,
        shapes=((1, 1),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
    )


@dataclass(frozen=True)
class Case:
    """Groups of layers. ``drafts``: the groups that are told to have the draft's layers; of none, all are taken to."""

    groups: tuple[KVCacheSpec, ...]
    eagle: bool = False
    drafts: tuple[int, ...] = ()
    retention: int | None = 0
    unit: int | None = None
    chunk: int | None = None


CASES = {
    "full": Case((full(16),)),
    "full-eagle": Case((full(16),), eagle=True),
    "two-full": Case((full(16), full(16), window(16, 33))),
    "window": Case((window(16, 40),)),
    "window-eagle": Case((window(16, 40),), eagle=True),
    "two-windows": Case((window(16, 40), window(16, 80))),
    "two-windows-eagle": Case((window(16, 40), window(16, 80)), eagle=True),
    "hybrid": Case((window(16, 40), full(16))),
    "hybrid-dense": Case((window(16, 40), full(16)), retention=None),
    "hybrid-segments": Case((window(16, 40), full(16)), retention=96),
    "hybrid-eagle": Case((window(16, 40), full(16)), eagle=True),
    "hybrid-eagle-dense": Case((window(16, 40), full(16)), eagle=True, retention=None),
    "hybrid-eagle-segments": Case((window(16, 40), full(16)), eagle=True, retention=96),
    "hybrid-mtp": Case((window(16, 40), full(16)), eagle=True, drafts=(1,)),
    "hybrid-mtp-window": Case((window(16, 40), window(16, 70), full(16)), eagle=True, drafts=(0,)),
    "state": Case((state(16), state(16), full(16))),
    "state-dense": Case((state(16), full(16)), retention=None),
    "state-eagle": Case((state(16, 1), state(16, 1), full(16)), eagle=True),
    "state-mtp": Case((state(16, 1), full(16)), eagle=True, drafts=(1,)),
    "state-units": Case((state(48), full(48)), unit=16),
    "state-units-mtp": Case((state(48, 1), full(48)), unit=16, eagle=True, drafts=(1,)),
    "state-window": Case((state(16), window(16, 40), full(16))),
    "state-window-mtp": Case((state(16, 1), window(16, 40), full(16)), eagle=True, drafts=(2,)),
    "small-full": Case((window(32, 40), full(16))),
    "small-full-eagle": Case((window(32, 40), full(16)), eagle=True),
    "large-full": Case((window(16, 40), full(32))),
    "large-full-dense": Case((window(16, 20), full(32)), retention=None),
    "large-full-eagle": Case((window(16, 40), full(32)), eagle=True),
    "three-sizes": Case((window(16, 40), window(32, 100), full(64))),
    "chunk": Case((chunk(16, 64), full(16)), chunk=64),
    "chunk-odd": Case((chunk(16, 72), full(16)), chunk=72),
}


class Engine:
    """A scheduler whose model answers at random."""

    def __init__(self, case: Case, model_folder: str, rng: random.Random) -> None:
        sizes = [group.block_size for group in case.groups]
        block = math.lcm(*sizes)
        self.unit = block if len(sizes) == 1 else case.unit or math.gcd(*sizes)
        self.rng, self.batches, self.live = rng, list[bytes](), dict[str, Request]()
        config = VllmConfig(
            model_config=ModelConfig(
                model=model_folder, tokenizer=model_folder, skip_tokenizer_init=True, max_model_len=MOST_TOKENS
            ),
            cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=rng.choice([96, 512]),
                max_model_len=MOST_TOKENS,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        blocks = 120 * len(sizes)
        config.cache_config.block_size, config.cache_config.num_gpu_blocks = block, blocks
        config.cache_config.mamba_cache_mode = "align"
        groups = [
            KVCacheGroupSpec([f"layer{at}"], group, is_eagle_group=at in case.drafts)
            for at, group in enumerate(case.groups)
        ]
        kept = KVCacheConfig(blocks, [], groups, prefix_cache_retention_interval=case.retention)
        outputs = StructuredOutputManager(config)
        self.scheduler = Scheduler(config, kept, outputs, block_size=block, hash_block_size=self.unit)
        if case.eagle:
            self._draft(config, kept, block)
        self.scheduler.kv_event_publisher = self
        self.hasher = get_request_block_hasher(self.unit, sha256)

    def _draft(self, config: VllmConfig, kept: KVCacheConfig, block: int) -> None:
        scheduler = self.scheduler
        scheduler.use_eagle = scheduler.use_eagle_block_drop = True
        scheduler.num_spec_tokens = scheduler.num_lookahead_tokens = 1
        scheduler.kv_cache_manager = KVCacheManager(
            kept,
            MOST_TOKENS,
            block,
            self.unit,
            max_in_flight_tokens=config.max_in_flight_tokens,
            use_eagle=True,
            enable_kv_cache_events=True,
        )
        is_fine = scheduler.kv_cache_manager.coordinator.enable_partial_hash_hits
        scheduler.mamba_partial_cache_hit = scheduler.need_mamba_block_aligned_split and is_fine

    def publish(self, batch: Any) -> None:
        batch.ts, batch.data_parallel_rank = 0.0, 0
        self.batches.append(msgspec.msgpack.encode(batch))

    def request(self, name: str, prompt: list[int], most_tokens: int) -> Request:
        sampling = SamplingParams(max_tokens=most_tokens, ignore_eos=True)
        return Request(name, prompt, sampling, None, block_hasher=self.hasher)

    def send(self, name: str, prompt: list[int], most_tokens: int) -> Request:
        self.live[name] = request = self.request(name, prompt, most_tokens)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        tokens = [
            [self.rng.randrange(VOCABULARY)] if each.num_computed_tokens >= each.num_tokens else [] for each in requests
        ]
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(scheduled, ModelRunnerOutput(names, places, sampled_token_ids=tokens))

    def found(self, prompt: list[int]) -> int:
        return self.scheduler.kv_cache_manager.get_computed_blocks(self.request("probe", prompt, 1))[1]


def record(case: Case, model_folder: str, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    engine = Engine(case, model_folder, rng)

    def some(most: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(most)]

    heads = [some(rng.randrange(20, 160)) for _ in range(2)]
    sent, happened = list[Request](), list[list[Any]]()
    for _ in range(STEPS):
        if len(engine.live) < 3 and rng.random() < 0.3:
            prompt = rng.choice(heads) + some(rng.randrange(1, 90))
            if sent and rng.random() < 0.6:
                last = rng.choice(sent)
                end = rng.choice([last.num_tokens, last.num_prompt_tokens, rng.randrange(1, last.num_tokens + 1)])
                prompt = list(last.all_token_ids)[:end] + some(rng.choice([0, 1, 5, 16, 30, 90]))
            if rng.random() < 0.2:
                prompt = prompt[: len(prompt) // 16 * 16] or prompt
            if 1 < len(prompt) < MOST_TOKENS // 2:
                sent.append(engine.send(str(len(sent)), prompt, rng.choice([1, 2, 20, 40])))
                happened.append(["sent", sent[-1].request_id, prompt])
        engine.step()
        if not engine.live and rng.random() < 0.05:
            engine.scheduler.reset_prefix_cache()
        happened += [["told", batch.hex()] for batch in engine.batches]
        engine.batches.clear()
        for name in [name for name, each in engine.live.items() if each.is_finished()]:
            del engine.live[name]
            happened.append(["ended", name])
        is_computed = all(each.num_computed_tokens >= each.num_prompt_tokens for each in engine.live.values())
        if sent and is_computed and not engine.scheduler.kv_cache_manager.block_pool.kv_event_queue:
            last = rng.choice(sent[-12:])
            end = rng.choice([last.num_tokens, last.num_prompt_tokens, rng.randrange(1, last.num_tokens + 1)])
            prompt = list(last.all_token_ids)[:end] + some(rng.choice([0, 0, 1, 5, 16, 30]))
            happened.append(["found", prompt, engine.found(prompt)])
    told = {"eagle": case.eagle, "chunk_tokens": case.chunk, "retention_tokens": case.retention}
    return {"unit_tokens": engine.unit, **told, "happened": happened}


def main(model_folder: str, *names: str) -> None:
    init_none_hash(sha256)
    for seed, (name, case) in enumerate(CASES.items()):
        if not names or name in names:
            text = json.dumps(record(case, model_folder, seed), separators=(",", ":"))
            path = Path(__file__).with_name(f"{name}.json.gz")
            path.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
