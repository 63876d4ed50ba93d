"""One short run on a GPU: are the kernels and graphs right there, and how fast is a large random model?

    python -m engine_shim.bench.gpu --shape 8b

prints JSON. Without CUDA it says so and checks what a CPU can: the kernels in Triton's interpreter, and decode steps
over fixed inputs without a capture.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from engine_shim.attention.paged import PagedAttention, Pools
from engine_shim.attention.plan import make_plan
from engine_shim.attention.tables import page_tables
from engine_shim.bench.dense import DenseLoop
from engine_shim.model.config import ModelConfig, from_hugging_face
from engine_shim.model.decoder import Attention, Decoder, LayerWeights, Weights
from engine_shim.model.loading import layout_for
from engine_shim.model.norm import RmsNorm
from engine_shim.runner.torch_runner import TorchRunner
from engine_shim.types import Batch, CacheGroup, CacheLayout, Chunk, GroupKind, Request, Sampling

_LLAMA: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
#: Llama 3.2 1B and Llama 3.1 8B; and what an interpreter gets through.
SHAPES: Mapping[str, Mapping[str, object]] = {
    "1b": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "8b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128},
    "tiny": {
        **_LLAMA,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 1024,
    },
}
PAGE_TOKENS = 16
CHUNK_TOKENS = 2048
#: Of what is measured: tokens before the first decode, and decoded ones of each sequence.
CONTEXT_TOKENS, DECODED_TOKENS = 4096, 64
_WARM_UP_TOKENS = 4
BATCHES = (1, 32)
_WINDOW_TOKENS = 100
#: Kernels against torch in float32 on the same pages, values around one: bfloat16 has 8 bits of mantissa.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m engine_shim.bench.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"], default="1b")
    shape = parser.parse_args(argv).shape
    on_gpu = torch.cuda.is_available()
    report: dict[str, object] = {"torch": torch.__version__, "device": "cpu"}
    if on_gpu:
        report["device"] = torch.cuda.get_device_name()
    else:
        report["note"] = "no CUDA device is usable: interpreted kernels, no capture, no speeds"
        # Read when triton is imported, which is below.
        os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is None:
        report["note"] = "triton is not installed: pip install 'homing[kernels]'"
        return _print(report, status=0 if not on_gpu else 1)
    device = torch.device("cuda" if on_gpu else "cpu")
    checks = {"kernels": check_kernels(device), "decode_steps": check_decode_steps(device)}
    if on_gpu:
        checks["far_pages"] = check_far_pages(device)
        if find_spec("flashinfer") is not None:
            checks["flashinfer"] = check_flashinfer(device)
        report["speeds"] = {"shape": shape, **measure(shape, device)}
    report["checks"] = checks
    return _print(report, status=0 if all(check["passed"] for check in checks.values()) else 1)


def _print(report: Mapping[str, object], *, status: int) -> int:
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return status


# --- checks ------------------------------------------------------------------------------------------


def check_kernels(device: torch.device) -> dict[str, object]:
    """Both kernels on random pages, full and with a window, against torch; no length compiles anew."""
    from engine_shim.attention.kernels import decode_kernel, extend_kernel

    on_gpu = device.type == "cuda"
    lengths = [[(3, 1), (900, 1), (0, 70), (333, 90)], [(1500, 1), (31, 1), (7, 300)]]
    if not on_gpu:
        lengths = [[(3, 1), (130, 1), (40, 30)]]
    found: dict[str, object] = {}
    passed = True
    for dtype in _TOLERANCES if on_gpu else (torch.float32,):
        worst = [_kernel_difference(batch, device, dtype) for batch in lengths]
        found[str(dtype).removeprefix("torch.")] = max(worst)
        passed &= max(worst) < _TOLERANCES[dtype]
        if on_gpu:
            before = _variants(decode_kernel), _variants(extend_kernel)
            _kernel_difference([(2777, 1), (64, 1), (11, 5)], device, dtype)
            found["compiled_for_a_length"] = before != (_variants(decode_kernel), _variants(extend_kernel))
            passed &= not found["compiled_for_a_length"]
    return {"passed": passed, "greatest_difference": found}


def check_flashinfer(device: torch.device) -> dict[str, object]:
    """FlashInfer's kernels on random pages, decodes alone and beside chunks, against torch."""
    from engine_shim.attention.flashinfer_attention import FlashInfer

    def attention(pools: Pools, chunks: Sequence[Chunk], heads: int, scale: float) -> Attention:
        return FlashInfer(pools, heads=heads, scale=scale).plan(chunks)

    batches = [[(3, 1), (900, 1), (31, 1)], [(900, 1), (0, 70), (333, 90)]]
    worst = max(_difference(batch, device, torch.bfloat16, attention) for batch in batches)
    return {"passed": worst < _TOLERANCES[torch.bfloat16], "greatest_difference": worst}


def _kernel_difference(lengths: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> float:
    from engine_shim.attention.kernel_attention import KernelAttention

    def attention(pools: Pools, chunks: Sequence[Chunk], heads: int, scale: float) -> Attention:
        return KernelAttention(pools, page_tables(chunks, pools.layout, device=device), scale=scale)

    return _difference(lengths, device, dtype, attention)


def _difference(
    lengths: Sequence[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    attention: Callable[[Pools, Sequence[Chunk], int, float], Attention],
) -> float:
    """Of sequences of so many tokens in the cache and in the batch. How many decode decides how they are split."""
    torch.manual_seed(0)
    kv_heads, repeats, head_dim = (8, 4, 128) if device.type == "cuda" else (2, 2, 16)
    chunks, page = [], 1
    for start, count in lengths:
        table = _table(page, start + count)
        chunks.append(Chunk(_request([0] * (start + count)), start, count, (table, table), samples=True, draws=0))
        page += len(table)
    layout = _layout(pages=page)
    tokens = sum(count for _, count in lengths)
    pools = Pools.allocate(layout, kv_heads=kv_heads, head_dim=head_dim, device=device, dtype=dtype)
    for pool in (*pools.keys, *pools.values):
        pool.normal_()
    query = torch.randn(tokens, kv_heads * repeats, head_dim, device=device, dtype=dtype)
    key, value = torch.randn(2, tokens, kv_heads, head_dim, device=device, dtype=dtype)
    exact = Pools(
        layout=layout,
        keys=tuple(pool.float() for pool in pools.keys),
        values=tuple(pool.float() for pool in pools.values),
        barrier=pools.barrier,
    )
    scale = head_dim**-0.5
    by_torch = PagedAttention(
        exact, make_plan(Batch(tuple(chunks)), layout, device=device, dtype=torch.float32), scale=scale
    )
    by_kernels = attention(pools, chunks, kv_heads * repeats, scale)
    differences = [
        by_kernels(layer, query, key, value).float() - by_torch(layer, query.float(), key.float(), value.float())
        for layer in (0, 1)
    ]
    return max(float(difference.abs().max()) for difference in differences)


def _layout(*, pages: int) -> CacheLayout:
    """Layer 0 looks back over everything, layer 1 has a window."""
    return CacheLayout(
        page_tokens=PAGE_TOKENS,
        groups=(
            CacheGroup(index=0, kind=GroupKind.FULL, layers=(0,)),
            CacheGroup(index=1, kind=GroupKind.WINDOW, layers=(1,), window_tokens=_WINDOW_TOKENS),
        ),
        pages=(pages, pages),
    )


def _variants(kernel: Any) -> int:
    """How often Triton has compiled a kernel."""
    return sum(len(compiled) for compiled, *_ in kernel.device_caches.values())


def check_decode_steps(device: torch.device) -> dict[str, object]:
    """Sequences of several lengths say the same by torch's attention, by kernels, and replayed from graphs."""
    config = from_hugging_face(SHAPES["tiny"])
    decoder = random_decoder(config, device=device, dtype=torch.float32, spread=0.2)
    prompts = [[(7 * n + 3 * i) % 290 + 3 for i in range(length)] for n, length in enumerate((5, 40, 17))]
    answers = {}
    for name, kernels, graphs in (("torch", False, 0), ("kernels", True, 0), ("graphs", True, 4)):
        loop = PagedLoop(decoder, rows=len(prompts), max_tokens=64, kernels=kernels, graph_decodes=graphs)
        loop.start(prompts)
        for _ in range(8):
            loop.decode()
        answers[name] = [request.output for request in loop.requests]
    return {
        "passed": answers["torch"] == answers["kernels"] == answers["graphs"],
        "captured": device.type == "cuda",
        "tokens": sum(map(len, answers["graphs"])),
    }


def check_far_pages(device: torch.device) -> dict[str, object]:
    """Decodes and a chunk whose pages lie behind the 2^31st element of a pool read what they read before it."""
    from engine_shim.attention.kernel_attention import attend_pages

    torch.manual_seed(0)
    kv_heads, head_dim = 8, 128
    page_elements = PAGE_TOKENS * kv_heads * head_dim
    pool = torch.empty(
        2**31 // page_elements + 64, PAGE_TOKENS, kv_heads, head_dim, device=device, dtype=torch.bfloat16
    )
    near, far = torch.arange(1, 21), torch.arange(pool.shape[0] - 20, pool.shape[0])
    pool[near] = torch.randn(20, *pool.shape[1:], device=device).to(pool.dtype)
    pool[far] = pool[near]
    layout = _layout(pages=pool.shape[0])
    query = torch.randn(1 + 40, 4 * kv_heads, head_dim, device=device, dtype=torch.bfloat16)
    read = []
    for pages in (near.tolist(), far.tolist()):
        chunks = [
            Chunk(_request([0] * 160), 159, 1, (pages[:10], pages[:10]), samples=True, draws=0),
            Chunk(_request([0] * 150), 110, 40, (pages[10:], pages[10:]), samples=True, draws=0),
        ]
        tables = page_tables(chunks, layout, device=device)
        read.append(attend_pages(query, pool, pool, tables=tables, group=0, window_tokens=None, scale=0.1))
    return {"passed": bool(torch.equal(*read)), "elements": pool.numel()}


# --- speeds ------------------------------------------------------------------------------------------


class PagedLoop:
    """A runner driven by hand: prompts in chunks, then decodes side by side; each sequence has its pages in a row."""

    def __init__(self, decoder: Decoder, *, rows: int, max_tokens: int, kernels: bool, graph_decodes: int) -> None:
        self._pages = -(-max_tokens // PAGE_TOKENS)
        layout = layout_for(decoder.config, page_tokens=PAGE_TOKENS, pool_tokens=rows * self._pages * PAGE_TOKENS)
        self._runner = TorchRunner(decoder, layout, kernels=kernels, graph_decodes=graph_decodes)
        self.requests: list[Request] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run the prompts, one after the other, to their first tokens."""
        self.requests = [_request(prompt) for prompt in prompts]
        for row, request in enumerate(self.requests):
            for start in range(0, len(request.prompt), CHUNK_TOKENS):
                count = min(CHUNK_TOKENS, len(request.prompt) - start)
                chunk = self._chunk(row, start, count, samples=start + count == len(request.prompt))
                for sampled in self._runner.run(Batch((chunk,))):
                    request.tokens.extend(sampled.tokens)

    def decode(self) -> None:
        """One more token of each."""
        chunks = [self._chunk(row, len(each.tokens) - 1, 1, samples=True) for row, each in enumerate(self.requests)]
        for request, sampled in zip(self.requests, self._runner.run(Batch(tuple(chunks))), strict=True):
            request.tokens.extend(sampled.tokens)

    def _chunk(self, row: int, start: int, count: int, *, samples: bool) -> Chunk:
        request = self.requests[row]
        table = _table(1 + row * self._pages, start + count)
        return Chunk(request, start, count, (table,), samples=samples, draws=len(request.output))


class _Loop(Protocol):
    def start(self, prompts: Sequence[Sequence[int]]) -> None: ...

    def decode(self) -> None: ...


def measure(shape: str, device: torch.device) -> dict[str, object]:
    """Tokens a second of prefill and decode: by the plain loop, torch's attention over pages, kernels, graphs."""
    decoder = random_decoder(from_hugging_face(SHAPES[shape]), device=device, dtype=torch.bfloat16, spread=0.02)
    found: dict[str, object] = {"context_tokens": CONTEXT_TOKENS}
    generator = torch.Generator().manual_seed(0)
    for rows in BATCHES:
        prompts = torch.randint(0, decoder.config.vocab_size, (rows, CONTEXT_TOKENS), generator=generator).tolist()
        most = CONTEXT_TOKENS + _WARM_UP_TOKENS + DECODED_TOKENS + 1
        contenders: dict[str, Callable[[], _Loop]] = {
            "plain_loop": functools.partial(DenseLoop, decoder, rows=rows, max_tokens=most),
            **{
                name: functools.partial(
                    PagedLoop, decoder, rows=rows, max_tokens=most, kernels=kernels, graph_decodes=graphs
                )
                for name, kernels, graphs in (("torch", False, 0), ("kernels", True, 0), ("graphs", True, rows))
            },
        }
        # One after the other, so that one cache is held at a time.
        found[f"batch_{rows}"] = {name: _speeds(make(), prompts) for name, make in contenders.items()}
    return found


def _speeds(loop: _Loop, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Tokens a second of all rows together. What is first run, compiled and captured is not counted."""
    loop.start(prompts)
    prefill_seconds = _seconds(lambda: loop.start(prompts), times=1)
    _seconds(loop.decode, times=_WARM_UP_TOKENS)
    decode_seconds = _seconds(loop.decode, times=DECODED_TOKENS)
    return {
        "prefill_tokens_per_second": round(len(prompts) * CONTEXT_TOKENS / prefill_seconds, 1),
        "decode_tokens_per_second": round(len(prompts) * DECODED_TOKENS / decode_seconds, 1),
    }


def _seconds(work: Callable[[], None], *, times: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def random_decoder(config: ModelConfig, *, device: torch.device, dtype: torch.dtype, spread: float) -> Decoder:
    """A llama with random weights of that standard deviation, made on the device; embeddings are not tied."""
    torch.manual_seed(0)
    width, query, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, device=device, dtype=dtype).normal_(0.0, spread)

    norm = RmsNorm(torch.ones(width, device=device), config.norm_eps)
    layers = tuple(
        LayerWeights(
            qkv=matrix(query + 2 * kv, width),
            output=matrix(width, query),
            gate_up=matrix(2 * config.mlp_size, width),
            down=matrix(width, config.mlp_size),
            attention_norm=norm,
            mlp_norm=norm,
        )
        for _ in config.layers
    )
    return Decoder(
        config,
        Weights(
            embedding=matrix(config.vocab_size, width),
            layers=layers,
            final_norm=norm,
            head=matrix(config.vocab_size, width),
        ),
    )


def _request(tokens: Sequence[int]) -> Request:
    return Request(id="measured", prompt=tuple(tokens), sampling=Sampling(max_tokens=1 << 20, ignore_eos=True))


def _table(first_page: int, tokens: int) -> list[int]:
    return list(range(first_page, first_page - (-tokens // PAGE_TOKENS)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
