"""Tiny random models of every supported family, written as Hugging Face directories, with their reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB = 300
WINDOW = 24
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "attn_implementation": "eager",
}


def _qwen3(shape: dict[str, Any]) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**shape, num_hidden_layers=2, tie_word_embeddings=True))


def _gemma3(shape: dict[str, Any]) -> PreTrainedModel:
    config = Gemma3TextConfig(
        **shape,
        num_hidden_layers=4,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        final_logit_softcapping=25.0,
    )
    return Gemma3ForCausalLM(config)


def _llama(shape: dict[str, Any]) -> PreTrainedModel:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e3,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, rope_parameters=rope, attention_bias=True))


def _qwen3_next(shape: dict[str, Any]) -> PreTrainedModel:
    config = Qwen3NextConfig(
        **shape,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_experts=0,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )
    return Qwen3NextForCausalLM(config)


FAMILIES = {"qwen3": _qwen3, "qwen3_next": _qwen3_next, "gemma3": _gemma3, "llama": _llama}


@dataclass(frozen=True)
class TinyModel:
    """A directory to load, and transformers' model on the same weights."""

    family: str
    folder: Path
    reference: PreTrainedModel

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """transformers' logits ``[tokens, vocab]``, in one pass without a cache."""
        return self.reference(torch.tensor([tokens]), use_cache=False).logits[0]


def make_tiny_model(family: str, folder: Path, *, seed: int = 0, max_positions: int = 1024) -> TinyModel:
    """Random weights large enough that attention, norms and biases all matter to the logits.

    Beyond 1024 positions the reference attends by torch's fused kernels: scores written out would not fit in memory.
    """
    torch.manual_seed(seed)
    shape = {**_SHAPE, "max_position_embeddings": max_positions}
    if max_positions > 1024:
        shape["attn_implementation"] = "sdpa"
    model = FAMILIES[family](shape).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
            else:
                weight.normal_(0.0, 0.2)
    # Several shards, so that the index is read too.
    model.save_pretrained(folder, max_shard_size="100KB")
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    return TinyModel(family=family, folder=folder, reference=model)
