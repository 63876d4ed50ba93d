"""What attends over the cache: as the settings ask, or the best that there is."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from engine_shim.settings import AttentionKind, Device, KvCacheDtype, ShimSettings
from engine_shim.types import WindowTails

#: What FlashInfer has kernels for.
_HEAD_DIMS = (64, 128, 256)
_TYPES = (torch.float16, torch.bfloat16)


def choose_attention(settings: ShimSettings, *, head_dim: int, dtype: torch.dtype) -> AttentionKind:
    """Never ``AUTO``. Raises ``ValueError``, with the setting's name in front, for what is asked for and cannot be."""
    chosen = _best(settings, head_dim, dtype) if settings.attention is AttentionKind.AUTO else settings.attention
    on_cuda = settings.device is Device.CUDA
    if chosen is AttentionKind.FLASHINFER:
        if find_spec("flashinfer") is None:
            raise ValueError("attention: flashinfer is not installed: pip install flashinfer-python")
        if not on_cuda:
            raise ValueError("attention: flashinfer runs on CUDA alone")
        if settings.kv_cache_dtype is KvCacheDtype.FP8:
            raise ValueError("attention: flashinfer is not given a cache of eight bits here; use triton or torch")
        if not _fits_flashinfer(head_dim, dtype):
            raise ValueError(
                f"attention: flashinfer attends for heads of {_HEAD_DIMS} dimensions in float16 or bfloat16, "
                f"not for {head_dim} in {str(dtype).removeprefix('torch.')}"
            )
    if chosen is AttentionKind.TRITON:
        if find_spec("triton") is None:
            raise ValueError("attention: triton is not installed: pip install 'homing[kernels]'")
        if not on_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("attention: on the CPU Triton only has its interpreter, for tests: TRITON_INTERPRET=1")
    if settings.graph_decodes and chosen is not AttentionKind.TRITON:
        raise ValueError("graph_decodes: only Triton's kernels can be captured; use --attention triton")
    if settings.graph_decodes and settings.drafts is not None:
        raise ValueError("graph_decodes: steps with drafts are not captured; leave out one of the two")
    return chosen


def _best(settings: ShimSettings, head_dim: int, dtype: torch.dtype) -> AttentionKind:
    """On CUDA kernels that read pages in place, FlashInfer's where they fit and nothing is to be captured."""
    if settings.device is not Device.CUDA or settings.window_tails is not WindowTails.STORED:
        return AttentionKind.TORCH
    fits = _fits_flashinfer(head_dim, dtype) and settings.kv_cache_dtype is KvCacheDtype.AUTO
    if find_spec("flashinfer") is not None and fits and not settings.graph_decodes:
        return AttentionKind.FLASHINFER
    return AttentionKind.TRITON if find_spec("triton") is not None else AttentionKind.TORCH


def _fits_flashinfer(head_dim: int, dtype: torch.dtype) -> bool:
    return head_dim in _HEAD_DIMS and dtype in _TYPES
