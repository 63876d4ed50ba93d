"""Reads weights: safetensors directories and GGUF files, both into transformers' names, then into ``Weights``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine_shim.model.config import ModelConfig, Norm, UnsupportedModelError
from engine_shim.model.decoder import DeltaNetWeights, DraftWeights, LayerWeights, Weights
from engine_shim.model.gguf_file import read_gguf_file
from engine_shim.model.linear import blocked
from engine_shim.model.norm import RmsNorm

# Multimodal checkpoints hold the text model below one of these; the vision half is left unread.
_TEXT_PREFIXES = ("language_model.", "model.language_model.")
_UNREAD = re.compile(r"(vision_tower|multi_modal_projector)\.|.*rotary_emb\.inv_freq$")

_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a directory, from one ``model.safetensors`` or from the shards its index names."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no weights file {name}")
        tensors.update(load_file(folder / name))
    return {_text_name(name): tensor for name, tensor in tensors.items() if not _UNREAD.match(name)}


def read_gguf(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """All tensors of a GGUF file of the llama architecture, as transformers lays them out."""
    heads = {"q_proj.weight": config.heads, "k_proj.weight": config.kv_heads}
    return {
        name: _half_split(tensor, heads[kind]) if (kind := ".".join(name.split(".")[-2:])) in heads else tensor
        for name, tensor in read_gguf_tensors(path).items()
    }


def read_gguf_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a GGUF file by transformers' names, dequantised to float32, in GGUF's own layout."""
    data = np.memmap(path, mode="r")
    tensors = {}
    for entry in read_gguf_file(path).tensors:
        kind = gguf.GGMLQuantizationType(entry.kind)
        shape = gguf.quant_shape_to_byte_shape(entry.shape, kind)
        raw = data[entry.offset : entry.offset + math.prod(shape)].reshape(shape)
        try:
            values = gguf.quants.dequantize(raw, kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"GGUF tensor {entry.name!r}: {error}") from error
        # A copy: float32 tensors would be views of the read-only file.
        tensors[_gguf_name(entry.name)] = torch.tensor(values)
    return tensors


def assemble(
    config: ModelConfig, tensors: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Sort tensors of transformers' names into ``Weights``; a draft head is named as Qwen3-Next's "mtp" is.

    Raises ``UnsupportedModelError`` naming a tensor that is missing, has another shape than the config says,
    or is left over: a tensor nobody reads means that the config describes another model.
    """
    left = dict(tensors)
    width, head_dim = config.hidden_size, config.head_dim

    def take(name: str, *shape: int) -> Tensor:
        if name not in left:
            raise UnsupportedModelError(f"the weights lack tensor {name!r}")
        tensor = left.pop(name)
        if tensor.shape != shape:
            raise UnsupportedModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the config says {shape}")
        return tensor.to(device, dtype)

    def norm_weight(name: str, size: int) -> Tensor:
        weight = take(f"{name}.weight", size).float()
        return weight + 1.0 if config.norm is Norm.RMS_PLUS_ONE else weight

    def norm(name: str, size: int) -> RmsNorm | None:
        return None if config.norm is Norm.NONE else RmsNorm(norm_weight(name, size), config.norm_eps)

    def head_norm(attention: str) -> RmsNorm | None:
        if config.norm is Norm.NONE:
            return None
        query, key = (norm_weight(f"{attention}.{name}", head_dim) for name in ("q_norm", "k_norm"))
        return RmsNorm(torch.cat((query.expand(config.heads, -1), key.expand(config.kv_heads, -1))), config.norm_eps)

    def layer(prefix: str, *, recurrent: bool) -> LayerWeights:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        query_size, kv_size = config.heads * head_dim, config.kv_heads * head_dim
        projections = (("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size))
        # With norms after the sublayers too, transformers gives the MLP's own norm another name.
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        gate_up = down = None
        if config.mlp_size:
            gate_up = torch.cat([take(f"{mlp}.{n}.weight", config.mlp_size, width) for n in ("gate_proj", "up_proj")])
            down = take(f"{mlp}.down_proj.weight", width, config.mlp_size)
        attention_norm = norm(f"{prefix}.input_layernorm", width)
        if recurrent:
            qkv, output, delta_net = _delta_net(config, take, f"{prefix}.linear_attn")
            return LayerWeights(
                qkv=qkv,
                output=output,
                delta_net=delta_net,
                gate_up=gate_up,
                down=down,
                attention_norm=attention_norm,
                mlp_norm=norm(f"{prefix}.{mlp_norm}", width) if config.mlp_size else None,
            )
        if config.gated_attention:
            both = take(f"{attention}.q_proj.weight", 2 * query_size, width).view(config.heads, 2, head_dim, width)
            query, gate = (both[:, i].reshape(query_size, width) for i in (0, 1))
            keys = [take(f"{attention}.{name}.weight", size, width) for name, size in projections[1:]]
            qkv = torch.cat([query, *keys, gate])
        else:
            qkv = torch.cat([take(f"{attention}.{name}.weight", size, width) for name, size in projections])
        return LayerWeights(
            qkv=qkv,
            qkv_bias=torch.cat([take(f"{attention}.{name}.bias", size) for name, size in projections])
            if config.qkv_bias
            else None,
            output=take(f"{attention}.o_proj.weight", width, query_size),
            output_bias=take(f"{attention}.o_proj.bias", width) if config.output_bias else None,
            query_key_norm=head_norm(attention) if config.qk_norm else None,
            post_attention_norm=norm(f"{prefix}.post_attention_layernorm", width) if config.post_norms else None,
            post_mlp_norm=norm(f"{prefix}.post_feedforward_layernorm", width) if config.post_norms else None,
            gate_up=gate_up,
            down=down,
            attention_norm=attention_norm,
            mlp_norm=norm(f"{prefix}.{mlp_norm}", width) if config.mlp_size else None,
        )

    embedding = take("model.embed_tokens.weight", config.vocab_size, width)
    if config.tied_embeddings:
        left.pop("lm_head.weight", None)
        head = embedding
    else:
        head = take("lm_head.weight", config.vocab_size, width)
    weights = Weights(
        embedding=embedding,
        layers=tuple(
            _blocked(layer(f"model.layers.{i}", recurrent=each.recurrent)) for i, each in enumerate(config.layers)
        ),
        final_norm=norm("model.norm", width),
        head=blocked(head),
        draft=DraftWeights(
            mix=take("mtp.fc.weight", width, 2 * width),
            embedding_norm=norm("mtp.pre_fc_norm_embedding", width),
            hidden_norm=norm("mtp.pre_fc_norm_hidden", width),
            layer=_blocked(layer("mtp.layers.0", recurrent=False)),
            final_norm=norm("mtp.norm", width),
        )
        if "mtp.fc.weight" in left
        else None,
    )
    if left:
        raise UnsupportedModelError(f"the config has no use for tensor {min(left)!r} and {len(left) - 1} others")
    return weights


def _blocked(layer: LayerWeights) -> LayerWeights:
    """The layer with its matrices as ``linear`` wants them."""
    return replace(
        layer,
        qkv=blocked(layer.qkv),
        output=blocked(layer.output),
        gate_up=None if layer.gate_up is None else blocked(layer.gate_up),
        down=None if layer.down is None else blocked(layer.down),
    )


def _delta_net(config: ModelConfig, take: Callable[..., Tensor], name: str) -> tuple[Tensor, Tensor, DeltaNetWeights]:
    """A recurrent layer: its two projections, and the rest. Checkpoints group rows by key head, we by what they are."""
    net, width = config.delta_net, config.hidden_size
    assert net is not None, "a recurrent layer needs its shape"
    values = net.value_heads // net.key_heads * net.value_dim
    value_size = net.value_heads * net.value_dim
    qkvz = take(f"{name}.in_proj_qkvz.weight", net.channels + value_size, width).view(net.key_heads, -1, width)
    ba = take(f"{name}.in_proj_ba.weight", 2 * net.value_heads, width).view(net.key_heads, -1, width)
    parts = (*torch.split(qkvz, [net.key_dim, net.key_dim, values, values], dim=1), *ba.chunk(2, dim=1))
    delta_net = DeltaNetWeights(
        conv=take(f"{name}.conv1d.weight", net.channels, 1, net.kernel).squeeze(1),
        decay_rate=take(f"{name}.A_log", net.value_heads).float().exp(),
        decay_bias=take(f"{name}.dt_bias", net.value_heads).float(),
        norm=RmsNorm(take(f"{name}.norm.weight", net.value_dim).float(), config.norm_eps),
    )
    return (
        torch.cat([part.flatten(0, 1) for part in parts]),
        take(f"{name}.out_proj.weight", width, value_size),
        delta_net,
    )


def _text_name(name: str) -> str:
    """The name of a multimodal checkpoint's tensor in its text model."""
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
    return name


def _gguf_name(name: str) -> str:
    """transformers' name of a GGUF tensor."""
    if name in _GGUF_MODEL:
        return _GGUF_MODEL[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _GGUF_LAYER:
        raise UnsupportedModelError(f"GGUF tensor {name!r} is not supported")
    return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.weight"


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Undo the converter's permutation: GGUF stores rope pairs side by side, the decoder wants them halves apart."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
