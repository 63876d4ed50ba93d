"""Models to measure with: known shapes, random weights, written as Hugging Face directories that every engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

_TINY: Mapping[str, object] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
#: transformers' ``config.json`` of each model. "135m" is SmolLM2-135M's shape: here arithmetic is what takes the time.
SHAPES: Mapping[str, Mapping[str, object]] = {
    "qwen3": {**_TINY, "model_type": "qwen3"},
    "gemma3": {
        **_TINY,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "llama": {**_TINY, "model_type": "llama"},
    "qwen3_next": {
        **_TINY,
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_experts": 0,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "135m": {
        **_TINY,
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}


def write_model(name: str, folder: Path, *, seed: int) -> Path:
    """A directory under ``folder`` with a model of ``SHAPES[name]``, float32; returns it."""
    torch.manual_seed(seed)
    fields = dict(SHAPES[name])
    config = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    path = folder / name
    AutoModelForCausalLM.from_config(config).save_pretrained(path)  # type: ignore[no-untyped-call, unused-ignore]
    # Prompts are ids; a tokenizer is only there because readers of such a directory want one.
    Tokenizer(models.BPE()).save(str(path / "tokenizer.json"))
    return path
