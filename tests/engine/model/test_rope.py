"""Frequencies of rotary positions against transformers', to the last bit: long contexts multiply what differs."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine_shim.model.config import from_hugging_face
from engine_shim.model.decoder import rope_frequencies

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("base", [1e3, 1e4, 5e5])
@pytest.mark.parametrize("original", [64, 8192])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_frequencies(kind: str, base: float, original: int, head_dim: int) -> None:
    """The plain kind, the stretched one, and Llama 3.1's."""
    parameters = {
        "default": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 3.0},
        "llama3": {**_LLAMA3, "original_max_position_embeddings": original},
    }[kind]
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters={**parameters, "rope_theta": base},
    )
    rope = from_hugging_face(config.to_dict()).layers[0].rope
    assert rope is not None
    expected = LlamaRotaryEmbedding(config).inv_freq
    assert kind == "default" or kind in ROPE_INIT_FUNCTIONS
    assert torch.equal(rope_frequencies(rope, head_dim), expected)
