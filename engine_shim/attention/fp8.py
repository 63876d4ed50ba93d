"""A cache of eight-bit keys and values: float8 "e4m3fn" (no infinities, 448 at most), with a scale for each head's own.

::

    one head of one token   | head_dim codes, a byte each | scale, float32 |     value = code * scale

The scale is the greatest magnitude of the vector over 448. It hangs on nothing else in the batch or the page, so what
is cached is the same whoever computed it beside whom, and a page is moved, kept and handed over as the bytes that it
is. Half a step at most is lost of a value: a 16th of it, or 2^-10 of the scale if that is more.
Source: Micikevicius et al., FP8 Formats for Deep Learning (2022); scales for each token and head are FlashInfer's
``use_token_head_sf``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_shim.attention.host_pages import HostLayer
from engine_shim.attention.paged import Below, Gathered, fetch
from engine_shim.attention.plan import Segment

GREATEST = 448.0
_SCALE_BYTES = 4


def packed_size(head_dim: int) -> int:
    """Bytes of one head of one token. Raises ``ValueError`` where a scale would not lie on a multiple of its size."""
    if head_dim % _SCALE_BYTES:
        raise ValueError(f"heads of {head_dim} dimensions are no multiple of {_SCALE_BYTES}")
    return head_dim + _SCALE_BYTES


def pack(x: Tensor) -> Tensor:
    """``[..., head_dim]`` as bytes, ``[..., packed_size]``. What is not finite is not a number afterwards."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / GREATEST).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = (x / scale).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), dim=-1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """What bytes ``[..., packed_size]`` stand for, ``[..., head_dim]``."""
    codes, scale = packed[..., :-_SCALE_BYTES], packed[..., -_SCALE_BYTES:].contiguous()
    return (codes.view(torch.float8_e4m3fn).float() * scale.view(torch.float32)).to(dtype)


class DecodedPages(Gathered):
    """Brings together what attention reads, and decodes that alone; nothing is kept from step to step."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __call__(
        self, keys: Tensor, values: Tensor, segment: Segment, below: Below | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``Gathered``; the pools are packed."""
        key_layer, value_layer = below or (None, None)
        return self._decoded(keys, segment, key_layer), self._decoded(values, segment, value_layer)

    def stored(self, x: Tensor) -> Tensor:
        """See ``Gathered``."""
        return pack(x)

    def _decoded(self, pool: Tensor, segment: Segment, below: HostLayer | None) -> Tensor:
        buffer = pool.new_empty(segment.pages.count * pool[0].numel())
        return unpack(fetch(pool, segment.pages, buffer, below), self._dtype)[:, segment.keys]
