"""Reading ``config.json``: transformers' own configuration classes are the reference."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from engine_shim.model.config import (
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
