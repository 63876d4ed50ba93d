"""Record what SGLang's own radix cache publishes and finds. Where SGLang is installed:

    python tests/data/kv_scheduler/record_sglang.py [NAME...]

No model runs: tokens are drawn at random, and requests take their slots as the scheduler does: a prompt is matched,
locked and computed in pieces, each of which enters the tree, and so does the answer once it has ended. Each file has,
in order, the requests sent, the event batches published and what a prompt would reuse at that moment. The files
``sglang-*`` beside this one are from SGLang 0.5.23.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"

import msgspec
import sglang.srt.mem_cache.pool_host.common as pool_host
import torch
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

MOST_TOKENS, STEPS, VOCABULARY = 1024, 300, 60
LORA = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Case:
    """Pages of ``page`` tokens. ``is_plain``: ``RadixCache``, else ``UnifiedRadixCache``, as SGLang has it. ``host`` is
    when it writes into host memory (HiCache); no bytes are copied here.
    """

    page: int
    eagle: bool = False
    is_plain: bool = False
    host: str | None = None
    namespaces: tuple[tuple[str, str, str], ...] = (("", "", ""),)  # of extra key, salt, adapter


SALTED = (("", "", ""), ("", "salt", ""), ("", "other", ""))
ADAPTED = (("", "", ""), ("", "", "adapter"), ("", "salt", "adapter"))
CASES = {
    "page1": Case(1),
    "page16": Case(16),
    "page64": Case(64),
    "radix16": Case(16, is_plain=True),
    "eagle1": Case(1, eagle=True),
    "eagle16": Case(16, eagle=True),
    "eagle64": Case(64, eagle=True),
    "salts": Case(16, namespaces=SALTED),
    "adapters": Case(16, namespaces=ADAPTED),
    "host": Case(16, host="write_through"),
    "host-eagle": Case(16, eagle=True, host="write_through"),
    "host-late": Case(16, host="write_back"),
}


class Copied:
    """Events of a copy that is done as soon as it is asked for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def copy_at_once(*_: Any, **__: Any) -> l2_transfer.TransferCompletion:
    return l2_transfer.TransferCompletion(Copied(), Copied(), timing_enabled=False)


class Engine:
    """The cache with its pools, and what of the scheduler touches them."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        self.case, self.rng, self.page = case, rng, case.page
        self.live: list[Req] = []
        self.waiting: list[Req] = []
        self.chunk = rng.choice([2, 6]) * max(64, self.page)
        tiers: dict[str, Any] = {"hicache_write_policy": case.host, "hicache_ratio": 1.5} if case.host else {}
        args = ServerArgs(
            model_path="dummy",
            page_size=case.page,
            enable_hierarchical_cache=bool(case.host),
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
            **tiers,
        )
        set_global_server_args_for_scheduler(args)
        size = 1280 // self.page * self.page
        self.rows = ReqToTokenPool(size=10, max_context_len=MOST_TOKENS, device="cpu", enable_memory_saver=False)
        shape: dict[str, Any] = {"page_size": self.page, "dtype": torch.float32, "head_num": 1, "head_dim": 1}
        common: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "need_sort": False}
        pool = MHATokenToKVPool(size=size, layer_num=1, device="cpu", enable_memory_saver=False, **shape)
        if self.page == 1:
            self.slots = TokenToKVPoolAllocator(size=size, kvcache=pool, **common)
        else:
            self.slots = PagedTokenToKVPoolAllocator(size=size, page_size=self.page, kvcache=pool, **common)
        self.names = KvEventLoraNames()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots,
            page_size=self.page,
            is_eagle=case.eagle,
            enable_kv_cache_events=True,
            kv_event_lora_names=self.names,
            chunked_prefill_size=self.chunk,
            tree_components=(ComponentType.FULL,),
        )
        self.cache = RadixCache(params) if case.is_plain else UnifiedRadixCache(params)
        if case.host:
            pool_host._cuda_host_register = lambda *_, **__: None
            l2_transfer.L2TransferEngine.submit_device_to_host = copy_at_once
            l2_transfer.L2TransferEngine.submit_host_to_device = copy_at_once
            self.cache.init_hicache(args, params)
        self.cache.take_events()

    def request(self, name: str, prompt: list[int], most_tokens: int, namespace: tuple[str, str, str]) -> Req:
        extra_key, salt, adapter = namespace
        request = Req(
            name,
            "",
            array("q", prompt),
            SamplingParams(temperature=0, max_new_tokens=most_tokens),
            extra_key=extra_key or None,
            cache_salt=salt or None,
            lora_id=LORA if adapter else None,
        )
        self.names.register(request, adapter or None)
        return request

    def step(self) -> None:
        """A piece of one prompt, or a token for each answer."""
        computed = next((each for each in self.live if each.extend_end < len(each.origin_input_ids)), None)
        if computed is None and self.waiting and self._admit(self.waiting[0]):
            computed = self.waiting.pop(0)
            self.live.append(computed)
        if computed is not None:
            self._extend(computed)
            return
        for each in list(self.live):
            self._take(each, each.kv.kv_committed_len + 1)
            each.output_ids.append(self.rng.randrange(VOCABULARY))
            self._check_end(each)

    def _admit(self, request: Req) -> bool:
        need = len(request.origin_input_ids) + request.sampling_params.max_new_tokens + 2 * self.page
        held = sum(len(each.origin_input_ids) + each.sampling_params.max_new_tokens + self.page for each in self.live)
        if held + need > 1000 or len(self.live) == 3:
            return False
        request.extend_end = 0
        return True

    def _extend(self, request: Req) -> None:
        cache = self.cache
        is_first = not request.kv.holds_kv
        request.init_next_round_input(cache if is_first else None)
        start = request.prefix_len
        if is_first and request.host_hit_length:
            wanted = InitLoadBackParams(request.best_match_node, request.host_hit_length, req=request)
            loaded, request.last_node = cache.init_load_back(wanted)
            cache.ready_to_load_host_cache()
            start += loaded
            request.kv.cache_protected_len = start
        if is_first:
            request.lock = cache.lock(request.last_node)
            assert self.rows.alloc([request])
            indices = cache.path_device_indices(request.last_node)
            self.rows.write((request.kv.req_pool_idx, slice(0, start)), indices[:start])
            request.kv.kv_committed_len = request.kv.kv_allocated_len = start
        end = min(len(request.origin_input_ids), start + self.chunk)
        request.extend_end = end
        self._take(request, end)
        if end == len(request.origin_input_ids):
            request.output_ids.append(self.rng.randrange(VOCABULARY))
            if not self._check_end(request):
                checkpoint_kv_cache(request, cache)
        else:
            checkpoint_kv_cache(request, cache)

    def _take(self, request: Req, end: int) -> None:
        """Slots for its tokens up to ``end``."""
        start = request.kv.kv_committed_len
        have = -(-start // self.page) * self.page
        if end > have:
            need = -(-(end - have) // self.page) * self.page
            evict_from_tree_cache(self.cache, need)
            taken = self.slots.alloc(need)
            assert taken is not None
        else:
            taken = torch.empty(0, dtype=torch.int64)
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        if start < have:
            last = int(row[start - 1])
            taken = torch.cat([torch.arange(last + 1, last + 1 + have - start), taken])
        self.rows.write((request.kv.req_pool_idx, slice(start, end)), taken[: end - start].to(torch.int32))
        request.kv.kv_committed_len = request.kv.kv_allocated_len = end

    def _check_end(self, request: Req) -> bool:
        if len(request.output_ids) < request.sampling_params.max_new_tokens:
            return False
        request.finished_reason = FINISH_LENGTH(length=len(request.output_ids))
        release_kv_cache(request, self.cache, checkpoint=True)
        self.live.remove(request)
        return True

    def settle(self) -> None:
        """Copies between the tiers are over."""
        if self.case.host:
            self.cache.flush_pending_backups()
            self.cache.check_hicache_events()

    def found(self, prompt: list[int], namespace: tuple[str, str, str]) -> tuple[int, int]:
        """On the device, and with what could be loaded."""
        probe = self.request("probe", prompt, 1, namespace)
        probe.init_next_round_input(self.cache)
        return int(probe.prefix_len), int(probe.prefix_len + probe.host_hit_length)


def record(case: Case, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    engine = Engine(case, rng)

    def some(most: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(most)]

    heads = [some(rng.randrange(20, 160)) for _ in range(2)]
    sent: list[tuple[Req, tuple[str, str, str]]] = []
    happened: list[list[Any]] = []
    lives: dict[str, Req] = {}
    for _ in range(STEPS if case.host is None else 2 * STEPS):
        if len(lives) < 3 and rng.random() < 0.2:
            namespace = rng.choice(case.namespaces)
            prompt = rng.choice(heads) + some(rng.randrange(1, 90))
            if sent and rng.random() < 0.6:
                last, _ = rng.choice(sent)
                whole = list(last.origin_input_ids) + list(last.output_ids)
                end = rng.choice([len(whole), len(last.origin_input_ids), rng.randrange(1, len(whole) + 1)])
                prompt = whole[:end] + some(rng.choice([0, 1, 5, 16, 30, 90]))
            if rng.random() < 0.2:
                prompt = prompt[: len(prompt) // 16 * 16] or prompt
            if 1 < len(prompt) < MOST_TOKENS // 2:
                name = str(len(sent))
                request = engine.request(name, prompt, rng.choice([1, 2, 20, 40]), namespace)
                engine.waiting.append(request)
                lives[name] = request
                sent.append((request, namespace))
                happened.append(["sent", name, prompt, *namespace])
        engine.step()
        engine.settle()
        if not lives and rng.random() < 0.02:
            engine.cache.reset()
            engine.rows.clear()
            engine.slots.clear()
        if events := engine.cache.take_events():
            batch = KVEventBatch(ts=0.0, events=events, attn_dp_rank=0)
            happened.append(["told", msgspec.msgpack.encode(batch).hex()])
        for name in [name for name, each in lives.items() if each.finished()]:
            whole = list(lives[name].origin_input_ids) + list(lives[name].output_ids)
            del lives[name]
            happened.append(["ended", name, whole])
        if sent and rng.random() < 0.5:
            last, namespace = rng.choice(sent[-60 if case.host else -12 :])
            whole = list(last.origin_input_ids) + list(last.output_ids)
            end = rng.choice([len(whole), len(last.origin_input_ids), rng.randrange(1, len(whole) + 1)])
            prompt = whole[:end] + some(rng.choice([0, 0, 1, 5, 16, 30]))
            if rng.random() < 0.3:
                namespace = rng.choice(case.namespaces)
            found, below = engine.found(prompt, namespace)
            happened.append(["found", prompt, found, *namespace, below])
    return {"unit_tokens": engine.page, "eagle": case.eagle, "happened": happened}


def main(*names: str) -> None:
    for seed, (name, case) in enumerate(CASES.items()):
        if not names or name in names:
            text = json.dumps(record(case, seed), separators=(",", ":"))
            path = Path(__file__).with_name(f"sglang-{name}.json.gz")
            path.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
