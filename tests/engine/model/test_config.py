"""Reading ``config.json``: transformers' own configuration classes are the reference."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from engine_shim.model.config import (
    DeltaNet,
    LayerConfig,
    Llama3Scaling,
    Norm,
    Rope,
    UnsupportedModelError,
    from_gguf,
    from_hugging_face,
)

# As published with Llama 3.2 1B, Qwen3 0.6B and Gemma 3 1B: the spelling from before ``rope_parameters``.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "eos_token_id": [1, 106],
}


@pytest.mark.parametrize("published", [LLAMA, QWEN3, GEMMA3], ids=lambda config: config["model_type"])
def test_old_and_new_spellings_agree(published: dict[str, Any]) -> None:
    """A published config and what transformers writes after reading it describe the same decoder."""
    rewritten = CONFIG_MAPPING[published["model_type"]](**published).to_dict()
    assert "rope_parameters" in rewritten
    assert from_hugging_face(rewritten) == from_hugging_face(published)


def test_llama_fields() -> None:
    """Llama 3.2: scaled rope on every layer, scores divided by the root of the head size, three ends."""
    config = from_hugging_face(LLAMA)
    rope = Rope(base=500000.0, llama3=Llama3Scaling(32.0, 1.0, 4.0, 8192))
    assert config.layers == (LayerConfig(None, rope),) * 16
    assert config.attention_scale == 0.125
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.tied_embeddings
    assert not config.qk_norm


def test_gemma_fields() -> None:
    """Gemma 3: five window layers with a rope of their own to each full one, whose rope alone is stretched."""
    config = from_hugging_face(GEMMA3)
    local, full = LayerConfig(512, Rope(10000)), LayerConfig(None, Rope(1000000, scale=8.0))
    assert config.layers == ((local,) * 5 + (full,)) * 4 + (local,) * 2
    assert config.attention_scale == 1 / 16
    assert config.embedding_scale == pytest.approx(33.941125, abs=1e-6)
    assert config.norm is Norm.RMS_PLUS_ONE
    assert config.post_norms
    assert config.qk_norm


def test_multimodal_gemma_is_read_as_text() -> None:
    """A gemma3 config with a vision tower is its text config with the outer end tokens."""
    text = {name: value for name, value in GEMMA3.items() if name not in ("model_type", "eos_token_id")}
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    assert from_hugging_face(outer) == from_hugging_face(GEMMA3)


# The layer form of Qwen3-Next 80B, as published, with dense MLPs in place of its experts.
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_experts": 0,
    "eos_token_id": 151645,
}


def test_qwen3_next_fields() -> None:
    """Three delta nets to each full layer, whose rope turns a quarter of the head and whose output is gated."""
    config = from_hugging_face(QWEN3_NEXT)
    recurrent = LayerConfig(None, None, recurrent=True)
    full = LayerConfig(None, Rope(10000000, turned_ratio=0.25))
    assert config.layers == ((recurrent,) * 3 + (full,)) * 12
    assert config.delta_net == DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
    assert config.delta_net.channels == 8192
    assert config.gated_attention
    assert config.norm is Norm.RMS_PLUS_ONE
    assert not config.post_norms


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**LLAMA, "model_type": "mamba"}, "'mamba'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({**LLAMA, "hidden_act": "relu"}, "'relu'"),
        ({**LLAMA, "mlp_bias": True}, "'mlp_bias'"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "'quantization_config'"),
        ({**LLAMA, "hidden_size": None}, "'hidden_size'"),
        ({**LLAMA, "hidden_size": "2048"}, "'hidden_size'"),
        ({**QWEN3, "layer_types": ["chunked_attention"] * 28}, "'chunked_attention'"),
        ({**QWEN3, "layer_types": ["full_attention"] * 27}, "'layer_types'"),
        ({**QWEN3, "use_sliding_window": True}, "'use_sliding_window'"),
        ({**QWEN3_NEXT, "num_experts": 512}, "'num_experts'"),
        ({**QWEN3, "layer_types": ["linear_attention"] * 28}, "'linear_attention'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "'partial_rotary_factor'"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "'use_bidirectional_attention'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    """An unsupported model type, field or value is named in the refusal."""
    with pytest.raises(UnsupportedModelError, match=named):
        from_hugging_face(config)


def test_gguf_of_another_architecture_is_refused() -> None:
    """Only GGUF's llama architecture is read."""
    with pytest.raises(UnsupportedModelError, match="'gpt2'"):
        from_gguf({"general.architecture": "gpt2"})
