"""What a decoder looks like: one description for Llama, Qwen3, Qwen3-Next, Gemma 3 and the needle model. No torch.

``from_hugging_face`` reads a ``config.json``, ``from_gguf`` the metadata of a GGUF file. What the decoder cannot
run is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class UnsupportedModelError(ValueError):
    """The model is readable but needs something that this engine does not do; the message names it."""


class Norm(StrEnum):
    """RMS norm: none at all, weight w as stored, or weight 1 + w (Gemma)."""

    NONE = "none"
    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"


class Activation(StrEnum):
    """The gate of the MLP; the values are transformers' names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch: long wavelengths divided by ``factor``, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions, half-split layout. ``scale`` divides every frequency (transformers' "linear").

    ``turned_ratio`` of each head, its first dimensions, is turned; the rest has no position.
    """

    base: float
    scale: float = 1.0
    turned_ratio: float = 1.0
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """How one layer looks back. ``window_tokens`` counts the query itself; None is full attention.

    ``recurrent``: not by attention at all, but by a gated delta net (``ModelConfig.delta_net``).
    """

    window_tokens: int | None
    rope: Rope | None
    recurrent: bool = False


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Shape of recurrent layers. Each key head serves ``value_heads / key_heads`` value heads in a row."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Width of queries, keys and values together: what the convolution runs over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of a decoder. ``mlp_size`` 0: the layers have no MLP."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: tuple[LayerConfig, ...]
    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    norm: Norm
    norm_eps: float
    activation: Activation
    max_positions: int
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    gated_attention: bool = False
    delta_net: DeltaNet | None = None
    final_softcap: float | None = None


# Gemma's and Qwen's config.json leave out what equals the class default of their family.
_FAMILIES: dict[str, Mapping[str, object]] = {
    "llama": {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    "qwen3": {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": 128},
    "qwen3_next": {
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "num_experts": 512,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
}
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


class _Fields:
    """Typed look-ups in a ``config.json``; a missing or mistyped field is an ``UnsupportedModelError``."""

    def __init__(self, values: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        self._values = values
        self._defaults = defaults

    def get(self, name: str) -> object:
        """The value as it stands, the family's default, or None."""
        value = self._values.get(name)
        return self._defaults.get(name) if value is None else value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModelError(f"config field {name!r} must be a number, it is {value!r}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise UnsupportedModelError(f"config field {name!r} must be a whole number, it is {value!r}")
        return int(value)

    def flag(self, name: str) -> bool:
        return bool(self.get(name))

    def mapping(self, name: str) -> Mapping[str, object]:
        value = self.get(name) or {}
        if not isinstance(value, Mapping):
            raise UnsupportedModelError(f"config field {name!r} must be an object, it is {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) for item in items):
            raise UnsupportedModelError(f"config field {name!r} must hold token ids, it is {value!r}")
        return tuple(items)

    def refuse(self, name: str) -> None:
        """Refuse the model if ``name`` is set to anything but nothing."""
        if self.get(name):
            raise UnsupportedModelError(f"config field {name!r} = {self.get(name)!r} is not supported")


def from_hugging_face(config: Mapping[str, object]) -> ModelConfig:
    """Read a ``config.json``; a multimodal Gemma 3 is read as its text model."""
    if config.get("model_type") == "gemma3":
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise UnsupportedModelError("config field 'text_config' of a gemma3 model is missing")
        config = {**text, "model_type": "gemma3_text", "eos_token_id": config.get("eos_token_id")}
    family = config.get("model_type")
    if family == "homing_needle":
        return _needle(_Fields(config, {}))
    if not isinstance(family, str) or family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModelError(f"model_type {family!r} is not supported; supported are {known}")

    fields = _Fields(config, _FAMILIES[family])
    for name in ("attn_logit_softcapping", "use_bidirectional_attention", "mlp_bias", "quantization_config"):
        fields.refuse(name)
    heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // heads)
    gemma, hybrid = family == "gemma3_text", family == "qwen3_next"
    if hybrid:
        fields.refuse("num_experts")
        fields.refuse("attention_bias")
    activation = fields.get("hidden_activation" if gemma else "hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(f"activation {activation!r} is not supported")
    softcap = fields.get("final_logit_softcapping") if gemma else None
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        mlp_size=fields.integer("intermediate_size"),
        layers=_layers(fields, local_rope=gemma, hybrid=hybrid),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        attention_scale=(fields.number("query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
        norm=Norm.RMS_PLUS_ONE if gemma or hybrid else Norm.RMS,
        norm_eps=fields.number("rms_norm_eps"),
        activation=_ACTIVATIONS[str(activation)],
        max_positions=fields.integer("max_position_embeddings"),
        eos_token_ids=fields.integers("eos_token_id"),
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=fields.flag("attention_bias"),
        output_bias=fields.flag("attention_bias"),
        qk_norm=family in ("qwen3", "qwen3_next", "gemma3_text"),
        post_norms=gemma,
        gated_attention=hybrid,
        delta_net=_delta_net(fields) if hybrid else None,
        final_softcap=None if softcap is None else fields.number("final_logit_softcapping"),
    )


def from_gguf(fields: Mapping[str, object]) -> ModelConfig:
    """Read GGUF metadata of the ``llama`` architecture (embeddings count as untied until the weights say so)."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(f"GGUF architecture {architecture!r} is not supported; supported is 'llama'")
    read = _Fields({name.removeprefix("llama."): value for name, value in fields.items()}, {"rope.freq_base": 10_000.0})
    for name in ("rope.scaling.type", "rope.scaling.factor"):
        if read.get(name) not in (None, "none"):
            raise UnsupportedModelError(f"GGUF field 'llama.{name}' = {read.get(name)!r} is not supported")
    heads = read.integer("attention.head_count")
    hidden_size = read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", hidden_size // heads)
    layer = LayerConfig(window_tokens=None, rope=Rope(base=read.number("rope.freq_base")))
    return ModelConfig(
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden_size,
        mlp_size=read.integer("feed_forward_length"),
        layers=(layer,) * read.integer("block_count"),
        heads=heads,
        kv_heads=read.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        norm=Norm.RMS,
        norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        activation=Activation.SILU,
        max_positions=read.integer("context_length"),
        eos_token_ids=read.integers("tokenizer.ggml.eos_token_id"),
    )


def _needle(fields: _Fields) -> ModelConfig:
    """The needle model: a rope layer with a window, then a full layer without positions; no norm, no MLP."""
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        mlp_size=0,
        layers=(
            LayerConfig(fields.integer("sliding_window"), Rope(base=fields.number("rope_theta"))),
            LayerConfig(None, None),
        ),
        heads=2,
        kv_heads=1,
        head_dim=fields.integer("head_dim"),
        attention_scale=1.0,
        norm=Norm.NONE,
        norm_eps=0.0,
        activation=Activation.SILU,
        max_positions=fields.integer("max_position_embeddings"),
        eos_token_ids=fields.integers("eos_token_id"),
    )


def _delta_net(fields: _Fields) -> DeltaNet:
    return DeltaNet(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        kernel=fields.integer("linear_conv_kernel_dim"),
    )


def _layers(fields: _Fields, *, local_rope: bool, hybrid: bool) -> tuple[LayerConfig, ...]:
    """Layer kinds from ``layer_types`` or the older pattern; rope from either of transformers' two spellings."""
    count = fields.integer("num_hidden_layers")
    types = fields.get("layer_types")
    if types is None and hybrid:
        period = fields.integer("full_attention_interval")
        types = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(count)]
    if types is None and local_rope:
        period = fields.integer("_sliding_window_pattern", fields.integer("sliding_window_pattern"))
        types = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)]
    if types is None:
        if fields.flag("use_sliding_window"):
            raise UnsupportedModelError("config field 'use_sliding_window' without 'layer_types' is not supported")
        types = ["full_attention"] * count
    if not isinstance(types, list) or len(types) != count:
        raise UnsupportedModelError(f"config field 'layer_types' must name {count} layers, it is {types!r}")

    parameters = fields.mapping("rope_parameters")
    if local_rope:
        full = parameters.get("full_attention") or fields.mapping("rope_scaling")
        local = parameters.get("sliding_attention") or {}
        ropes = {
            "full_attention": _rope(full, fields.number("rope_theta")),
            "sliding_attention": _rope(local, fields.number("rope_local_base_freq")),
        }
    else:
        rope = _rope(
            parameters or fields.mapping("rope_scaling"),
            fields.number("rope_theta"),
            turned_ratio=fields.number("partial_rotary_factor", 1.0) if hybrid else None,
        )
        ropes = {"full_attention": rope, "sliding_attention": rope}

    layers = []
    for kind in types:
        if hybrid and kind == "linear_attention":
            layers.append(LayerConfig(window_tokens=None, rope=None, recurrent=True))
            continue
        if kind not in ropes:
            raise UnsupportedModelError(f"layer type {kind!r} is not supported")
        window = fields.integer("sliding_window") if kind == "sliding_attention" else None
        layers.append(LayerConfig(window_tokens=window, rope=ropes[kind]))
    return tuple(layers)


def _rope(parameters: object, base: float, *, turned_ratio: float | None = None) -> Rope:
    """One rope of ``rope_parameters`` or ``rope_scaling``; ``base`` and ``turned_ratio`` where they name none.

    Without a ``turned_ratio`` the family turns whole heads, and parameters that say otherwise are refused.
    """
    if not isinstance(parameters, Mapping):
        raise UnsupportedModelError(f"rope parameters must be an object, they are {parameters!r}")
    fields = _Fields(parameters, {})
    base = fields.number("rope_theta", base)
    ratio = fields.number("partial_rotary_factor", turned_ratio or 1.0)
    if ratio != 1.0 and turned_ratio is None:
        raise UnsupportedModelError("config field 'partial_rotary_factor' is not supported")
    match fields.get("rope_type") or fields.get("type") or "default":
        case "default":
            return Rope(base=base, turned_ratio=ratio)
        case "linear" if turned_ratio is None:
            return Rope(base=base, scale=fields.number("factor"))
        case "llama3" if turned_ratio is None:
            scaling = Llama3Scaling(
                factor=fields.number("factor"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_positions=fields.integer("original_max_position_embeddings"),
            )
            return Rope(base=base, llama3=scaling)
        case other:
            raise UnsupportedModelError(f"rope type {other!r} is not supported")
