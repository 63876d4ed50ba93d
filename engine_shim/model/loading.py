"""Loads a model by its spec. torch is imported when weights are asked for, not before."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_shim.model.config import ModelConfig, UnsupportedModelError
from engine_shim.model.tokenizer import MissingExtraError, ModelCard, WeightsSource
from engine_shim.types import CacheGroup, CacheLayout, GroupKind, WindowTails

if TYPE_CHECKING:
    import torch

    from engine_shim.model.decoder import Decoder


#: Long prompts leave a recurrent state about this often.
CHECKPOINT_TOKENS = 2048


def load_decoder(card: ModelCard, *, device: str = "cpu", dtype: torch.dtype | None = None) -> Decoder:
    """The decoder of ``card`` with its weights on ``device``; share one between the ranks of a process.

    ``dtype`` is float32 on CPU and bfloat16 elsewhere unless given; the needle model, float32 on any device.
    Raises ``MissingExtraError`` without torch.
    """
    try:
        import torch

        from engine_shim.model.decoder import Decoder
        from engine_shim.model.needle.weights import needle_weights
        from engine_shim.model.weights import assemble, read_gguf, read_safetensors
    except ImportError as error:
        hint = "pip install 'homing[engine]'"
        raise MissingExtraError(f"running a model needs the engine extra: {hint} ({error})") from error

    place = torch.device(device)
    needle = card.weights is WeightsSource.NEEDLE
    if dtype is None:
        dtype = torch.float32 if place.type == "cpu" or needle else torch.bfloat16
    if needle:
        return Decoder(card.config, needle_weights(card, device=place, dtype=dtype))
    gguf = card.weights is WeightsSource.GGUF
    tensors = read_gguf(card.path, card.config) if gguf else read_safetensors(card.path)
    return Decoder(card.config, assemble(card.config, tensors, device=place, dtype=dtype))


def layout_for(
    config: ModelConfig,
    *,
    page_tokens: int,
    pool_tokens: int,
    window_pool_tokens: int | None = None,
    state_slots: int | None = None,
    draft_head: bool = False,
    window_tails: WindowTails = WindowTails.STORED,
    chunk_tokens: int = 512,
) -> CacheLayout:
    """The cache layout of a model: one group of its full layers, one of its window layers, one of its recurrent ones.

    With ``draft_head`` there is one more, for the layer behind the last.
    A pool of n tokens has room for n tokens (rounded up to pages) beside the null page. ``window_pool_tokens`` is
    ``pool_tokens`` unless given, ``state_slots`` one for every 256 of them (16 at least). A ring has room for the
    window and a chunk of ``chunk_tokens``, if the pool has.
    """
    full = tuple(i for i, layer in enumerate(config.layers) if layer.window_tokens is None and not layer.recurrent)
    windows = {layer.window_tokens for layer in config.layers if layer.window_tokens is not None}
    if not full:
        raise UnsupportedModelError("a model without full-attention layers is not supported")
    if len(windows) > 1:
        raise UnsupportedModelError(f"a model with several window sizes is not supported: {sorted(windows)}")
    groups = [CacheGroup(index=0, kind=GroupKind.FULL, layers=full)]
    pools = [pool_tokens]
    for window in windows:
        layers = tuple(i for i, layer in enumerate(config.layers) if layer.window_tokens is not None)
        groups.append(CacheGroup(index=1, kind=GroupKind.WINDOW, layers=layers, window_tokens=window))
        pools.append(pool_tokens if window_pool_tokens is None else window_pool_tokens)
    pages = [1 + -(-tokens // page_tokens) for tokens in pools]
    recurrent = tuple(i for i, layer in enumerate(config.layers) if layer.recurrent)
    if recurrent:
        groups.append(CacheGroup(index=len(groups), kind=GroupKind.STATE, layers=recurrent))
        pages.append(1 + (max(16, pool_tokens // 256) if state_slots is None else state_slots))
    if draft_head:
        groups.append(CacheGroup(index=len(groups), kind=GroupKind.DRAFT, layers=(len(config.layers),)))
        pages.append(pages[0])
    layout = CacheLayout(
        page_tokens=page_tokens,
        groups=tuple(groups),
        pages=tuple(pages),
        checkpoint_tokens=max(1, CHECKPOINT_TOKENS // page_tokens) * page_tokens,
        window_tails=window_tails,
    )
    if window_tails is WindowTails.RING and layout.window is not None:
        wanted = layout.window_pages() + 1 + -(-chunk_tokens // page_tokens)
        layout = replace(layout, ring_pages=min(wanted, pages[layout.window.index] - 1))
    return layout
