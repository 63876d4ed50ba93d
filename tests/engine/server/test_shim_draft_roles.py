"""A prefill and a decode shim that both try drafts of the model's draft head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from shim_process import ShimProcess, metric, running_shim
from tokenizers import Tokenizer, models
from torch import Tensor

WIDTH, HEADS, HEAD_DIM, VOCAB = 32, 2, 16, 16
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "eos_token_id": 2,
}


def layer() -> dict[str, Tensor]:
    shapes = {
        **{f"self_attn.{name}_proj": (HEADS * HEAD_DIM, WIDTH) for name in "qkv"},
        "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
        **{f"mlp.{name}_proj": (32, WIDTH) for name in ("gate", "up", "down")},
    }
    norms = {"input_layernorm": WIDTH, "post_attention_layernorm": WIDTH}
    norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    return {
        **{f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()},
        **{f"{name}.weight": torch.ones(size) for name, size in norms.items()},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, and a draft head that has the model's layer and nearly its input."""
    torch.manual_seed(6)
    folder = tmp_path_factory.mktemp("model")
    norms = ("model.norm", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, WIDTH),
        "lm_head.weight": torch.randn(VOCAB, WIDTH),
        "mtp.fc.weight": torch.eye(WIDTH, 2 * WIDTH) + torch.randn(WIDTH, 2 * WIDTH) * 0.1,
        **{f"{name}.weight": torch.ones(WIDTH) for name in norms},
    }
    for name, tensor in layer().items():
        tensors[f"model.layers.0.{name}"], tensors[f"mtp.layers.0.{name}"] = tensor, tensor.clone()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def decode(folder: Path) -> Iterator[ShimProcess]:
    with running_shim("--model", str(folder), "--speculative", "draft:3", "--role", "decode") as shim:
        yield shim


def ask(shim: ShimProcess, **fields: object) -> httpx.Response:
    prompt = [(3 + i * i) % VOCAB for i in range(150)]
    body = {
        "prompt": prompt,
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    return httpx.post(shim.url + "/v1/completions", json=body, timeout=60)


def both(prefill: ShimProcess, decode: ShimProcess, *, room: int) -> list[httpx.Response]:
    meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": int(prefill.ready["bootstrap"]), "bootstrap_room": room}
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda shim: ask(shim, **meeting), (prefill, decode)))


def counts(shim: ShimProcess) -> list[float]:
    """Drafts tried, drafts that held, prompt tokens computed, so far."""
    names = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    with httpx.Client(base_url=shim.url, timeout=60) as client:
        return [metric(client, f"vllm:{name}") for name in (*names, "request_prefill_kv_computed_tokens_sum")]


@pytest.mark.timeout(400)
def test_drafts_hold_as_often_behind_a_handover(folder: Path, decode: ShimProcess) -> None:
    """The decode shim answers as it does alone, without computing the prompt, and as many of its drafts hold."""
    start = counts(decode)
    alone = ask(decode, cache_salt="alone").json()["choices"][0]["token_ids"]
    first = counts(decode)
    options = ("--speculative", "draft:3", "--role", "prefill", "--bootstrap-port", "0")
    with running_shim("--model", str(folder), *options) as prefill:
        one, handed = both(prefill, decode, room=1)
        assert (one.status_code, handed.status_code) == (200, 200)
    assert handed.json()["choices"][0]["token_ids"] == alone
    own, behind = (
        [now - before for now, before in zip(*pair, strict=True)] for pair in ((first, start), (counts(decode), first))
    )
    assert own[:2] == behind[:2]
    assert 0 < own[1] < own[0]
    assert behind[2] <= 16 < own[2]


@pytest.mark.timeout(400)
def test_a_head_on_one_side_alone_is_refused_by_name(folder: Path, decode: ShimProcess) -> None:
    """The prefill shim's pages lack what a decode shim with a draft head needs: both say which layouts differ."""
    with running_shim("--model", str(folder), "--role", "prefill", "--bootstrap-port", "0") as prefill:
        one, other = both(prefill, decode, room=2)
    assert (one.status_code, other.status_code) == (500, 500)
    error = other.json()["error"]
    assert error["code"] == "handover_failed"
    assert "are of no use to" in error["message"]
    assert error["message"].count("draft:1") == 1
