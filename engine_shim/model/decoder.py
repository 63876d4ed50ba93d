"""The decoder: every supported model is this one loop, driven by its ``ModelConfig``.

Tokens of all sequences of a batch are laid end to end, ``[tokens, ...]``; only attention knows which belong
together, and it is passed in. Weights are plain tensors, shared by every rank of the process and never written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from engine_shim.model.config import Activation, ModelConfig, Rope
from engine_shim.model.linear import linear
from engine_shim.model.norm import RmsNorm, normed

#: Twice GELU's sqrt(2/pi) (x + 0.044715 x^3).
_GELU_LINEAR = torch.tensor(math.sqrt(8 / math.pi), dtype=torch.float64)
_GELU_CUBIC = 0.044715 * math.sqrt(8 / math.pi)


class Attention(Protocol):
    """Writes ``key`` and ``value`` of ``layer`` into the cache, then attends.

    ``query`` is ``[tokens, heads, head_dim]``, ``key`` and ``value`` ``[tokens, kv_heads, head_dim]``; the result
    has the query's shape.
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class Recurrence(Protocol):
    """Runs a recurrent layer's tokens from the cached states, and leaves the states after them in the cache.

    ``mixed`` ``[tokens, channels]``: queries, keys and values before the convolution, ``conv`` ``[channels, kernel]``;
    ``log_decay`` and ``strength`` are ``[tokens, value_heads]``. The result is ``[tokens, value_heads, value_dim]``.
    """

    def __call__(self, layer: int, mixed: Tensor, *, conv: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """What a recurrent layer has beside its projections. Rates and biases are float32; ``decay_rate`` is above 0."""

    conv: Tensor
    decay_rate: Tensor
    decay_bias: Tensor
    norm: RmsNorm


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections are ``[out, in]``; query, key and value are one matrix, gate and up another.

    With gated attention the first matrix has the gate behind the values; of a recurrent layer (``delta_net``) it has
    query, key, value, gate, strength and decay.
    Norms have float32 weights (Gemma's ``1 + w`` is already added); ``query_key_norm`` has a row for each query head,
    then one for each key head. None: the model has no such part.
    """

    qkv: Tensor
    output: Tensor
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    attention_norm: RmsNorm | None = None
    query_key_norm: RmsNorm | None = None
    post_attention_norm: RmsNorm | None = None
    mlp_norm: RmsNorm | None = None
    post_mlp_norm: RmsNorm | None = None
    delta_net: DeltaNetWeights | None = None


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft head: what mixes the last token's embedding with the hidden state before it, and one full layer.

    ``mix`` is ``[hidden, 2 * hidden]``, for the two norms' results side by side, the embedding first.
    """

    mix: Tensor
    embedding_norm: RmsNorm | None
    hidden_norm: RmsNorm | None
    layer: LayerWeights
    final_norm: RmsNorm | None


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model. ``head`` is ``embedding`` itself where they are tied; most have no draft head."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: RmsNorm | None
    head: Tensor
    draft: DraftWeights | None = None


class Decoder:
    """``hidden`` runs the layers, ``logits`` reads them out. Immutable; safe to share between threads."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        device = weights.embedding.device
        self._ropes: Mapping[Rope, _Turns] = {
            layer.rope: _turns(rope_frequencies(layer.rope, config.head_dim).to(device), config.head_dim)
            for layer in config.layers
            if layer.rope is not None
        }

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights, and so the activations and the cache, are made of."""
        return self.weights.embedding.dtype

    def hidden(
        self, tokens: Tensor, positions: Tensor, *, attention: Attention, recurrence: Recurrence | None = None
    ) -> Tensor:
        """Residual stream after the last layer, ``[tokens, hidden_size]``, for token ids and positions ``[tokens]``.

        ``recurrence`` is needed by models with recurrent layers.
        """
        return self.run(self.embed(tokens), positions, attention=attention, recurrence=recurrence)

    def embed(self, tokens: Tensor) -> Tensor:
        """What the residual stream begins with, ``[tokens, hidden_size]``."""
        x = F.embedding(tokens, self.weights.embedding)
        if self.config.embedding_scale != 1.0:
            # Rounded to the weights' type first, as transformers does.
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)
        return x

    def run(
        self, x: Tensor, positions: Tensor, *, attention: Attention, recurrence: Recurrence | None = None
    ) -> Tensor:
        """The layers alone: the residual stream behind them, in the place of ``x``."""
        config = self.config
        rotations = {rope: turns.at(positions, dtype=x.dtype) for rope, turns in self._ropes.items()}
        for index, (layer, weights) in enumerate(zip(config.layers, self.weights.layers, strict=True)):
            rotation = None if layer.rope is None else rotations[layer.rope]
            y = normed(x, weights.attention_norm)
            if weights.delta_net is None:
                y = self._attend(index, y, weights, rotation=rotation, attention=attention)
            else:
                assert recurrence is not None, "the model has recurrent layers"
                y = self._recur(index, y, weights, net=weights.delta_net, recurrence=recurrence)
            x += normed(y, weights.post_attention_norm)
            if weights.gate_up is not None and weights.down is not None:
                y = normed(x, weights.mlp_norm)
                y = self._mlp(y, weights.gate_up, down=weights.down)
                x += normed(y, weights.post_mlp_norm)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[rows, vocab_size]`` of rows of the residual stream."""
        return self.read_out(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """The residual stream as the head reads it, and a draft head too."""
        return normed(hidden, self.weights.final_norm)

    def read_out(self, normed: Tensor) -> Tensor:
        """Logits of what was normed already."""
        logits = linear(normed, self.weights.head)
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _attend(
        self,
        index: int,
        x: Tensor,
        weights: LayerWeights,
        *,
        rotation: tuple[Tensor, Tensor] | None,
        attention: Attention,
    ) -> Tensor:
        config = self.config
        qkv = linear(x, weights.qkv, weights.qkv_bias)
        qkv = qkv.view(x.shape[0], -1, config.head_dim)
        gates = config.heads if config.gated_attention else 0
        turned, value, gate = qkv.split_with_sizes((config.heads + config.kv_heads, config.kv_heads, gates), dim=1)
        turned = normed(turned, weights.query_key_norm)
        if rotation is not None:
            turned = _rotate(turned, *rotation)
        query, key = turned.split_with_sizes((config.heads, config.kv_heads), dim=1)
        attended = attention(index, query, key, value)
        if config.gated_attention:
            attended = attended * torch.sigmoid(gate)
        return linear(attended.flatten(1), weights.output, weights.output_bias)

    def _recur(
        self, index: int, x: Tensor, weights: LayerWeights, *, net: DeltaNetWeights, recurrence: Recurrence
    ) -> Tensor:
        shape = self.config.delta_net
        assert shape is not None, "weights of a recurrent layer need its shape"
        heads, channels = shape.value_heads, shape.channels
        sizes = [channels, heads * shape.value_dim, heads, heads]
        mixed, gate, strength, decay = torch.split(linear(x, weights.qkv), sizes, dim=-1)
        log_decay = -net.decay_rate * F.softplus(decay.float() + net.decay_bias)
        read = recurrence(index, mixed, conv=net.conv, log_decay=log_decay, strength=torch.sigmoid(strength))
        gate = F.silu(gate.view(read.shape).float())
        return linear((net.norm(read) * gate).to(x.dtype).flatten(1), weights.output)

    def _mlp(self, x: Tensor, gate_up: Tensor, *, down: Tensor) -> Tensor:
        gate, up = linear(x, gate_up).chunk(2, dim=-1)
        match self.config.activation:
            case Activation.SILU:
                gate = F.silu(gate)
            case Activation.GELU_TANH:
                gate = _gelu(gate)
        return linear(gate.mul_(up), down)


def _gelu(x: Tensor) -> Tensor:
    """GELU by its tanh form.

    x (1 + tanh(y)) / 2 is x sigmoid(2 y): on the CPU torch's sigmoid takes a sixth of its tanh's time.
    """
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64):
        return F.gelu(x, approximate="tanh")
    return x * torch.sigmoid(torch.addcmul(_GELU_LINEAR, x, x, value=_GELU_CUBIC).mul_(x))


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair of turned dimensions, float32.

    Rounded as transformers' formulas are, operation by operation: at 16,000 tokens a last bit is 0.001 radians.
    """
    turned = int(head_dim * rope.turned_ratio)
    frequencies = 1.0 / (rope.base ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned))
    frequencies = frequencies / rope.scale
    if rope.llama3 is None:
        return frequencies
    scaling = rope.llama3
    turns = scaling.original_positions / (2 * math.pi / frequencies)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


@dataclass(frozen=True, slots=True)
class _Turns:
    """A rope over a whole head: radians per position ``[head_dim]``, 0 where nothing turns."""

    radians: Tensor
    pairs: int

    def at(self, positions: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What ``_rotate`` needs: cosines ``[tokens, 1, head_dim]``, sines of the pairs ``[tokens, 1, pairs]``.

        Angles are float32 whatever the model is.
        """
        angles = positions[:, None, None].float() * self.radians
        return angles.cos().to(dtype), angles[..., : self.pairs].sin().to(dtype)


def _turns(frequencies: Tensor, head_dim: int) -> _Turns:
    pairs = len(frequencies)
    unmoved = frequencies.new_zeros(head_dim - 2 * pairs)
    return _Turns(torch.cat((frequencies, frequencies, unmoved)), pairs)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + pairs) of ``x`` ``[tokens, heads, head_dim]``; what lies behind them stays."""
    pairs = sin.shape[-1]
    sizes = (pairs, pairs, x.shape[-1] - 2 * pairs)
    turned = x * cos
    first, second, _ = x.split_with_sizes(sizes, dim=-1)
    turned[..., :pairs].addcmul_(second, sin, value=-1.0)
    turned[..., pairs : 2 * pairs].addcmul_(first, sin)
    return turned
