"""Arithmetic in which a position's result does not depend on which positions are computed beside it.

Matrix products and attention kernels sum in an order that depends on the shapes they are given, so the last bits of a
position differ between one pass and chunks. Here each row is summed by itself, in one order, from the same pools by the
same plan. Gates are worked out in whole vectors: what is left over behind them goes another way in torch, which rounds
differently. Slow, and for tests only.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine_shim.attention import paged, recurrent
from engine_shim.attention.plan import Segment

#: A multiple of what torch's loops take at once on any processor, for any type.
_VECTORS = 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product for each row, all of one shape: as exact as sums written out, and quicker."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.stack([torch.mv(weight, row) for row in rows]).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def conv1d(x: Tensor, weight: Tensor, *, groups: int) -> Tensor:
    """Depthwise: as many groups as channels."""
    assert groups == x.shape[1]
    return (x.unfold(2, weight.shape[2], 1) * weight[:, 0][None, :, None]).sum(-1)


def attend(query: Tensor, keys: Tensor, values: Tensor, *, segment: Segment, scale: float) -> Tensor:
    """Sums over keys go from the first to the last: hidden ones before or behind, which are zeros, change nothing."""
    batch, length = keys.shape[:2]
    heads, repeats = query.shape[1], query.shape[1] // keys.shape[2]
    q = query.view(batch, -1, 1, heads, query.shape[2])
    visible = torch.full((batch, q.shape[1], length), not segment.blocks)
    if segment.mask is not None:
        visible &= segment.mask[:, 0] == 0
    for block in segment.blocks:
        square = visible[0, block.queries, block.keys]
        square[:] = torch.ones_like(square).tril() if block.mask is None else block.mask == 0
    k, v = (each.repeat_interleave(repeats, dim=2)[:, None] for each in (keys, values))
    scores = ((k * q).sum(-1) * scale).masked_fill(~visible[..., None], float("-inf"))
    weights = (scores - scores.amax(2, keepdim=True)).exp()
    total = weights.cumsum(2)[:, :, -1]
    mixed = (weights[..., None] * v).cumsum(2)[:, :, -1]
    return (mixed / total[..., None]).view(query.shape)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, log_decay: Tensor, strength: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence itself, token by token."""
    reads = []
    for at in range(query.shape[2]):
        memory = memory * log_decay[:, :, at, None, None].exp()
        known = (memory.mT.contiguous() * key[:, :, at, None]).sum(-1)
        change = strength[:, :, at, None] * (value[:, :, at] - known)
        memory = memory + key[:, :, at, :, None] * change[:, :, None]
        reads.append((memory.mT.contiguous() * query[:, :, at, None]).sum(-1))
    return torch.stack(reads, dim=2), memory


def in_whole_vectors(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An elementwise function whose result at one element does not depend on how many there are."""

    def padded(x: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % _VECTORS))
        return function(rows)[: x.numel()].view(x.shape)

    return padded


@pytest.fixture(scope="module")
def exact_arithmetic() -> object:
    """Compute like this while a module's tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        patch.setattr(torch.nn.functional, "conv1d", conv1d)
        for module, name in ((torch.nn.functional, "softplus"), (torch.nn.functional, "silu"), (torch, "sigmoid")):
            patch.setattr(module, name, in_whole_vectors(getattr(module, name)))
        patch.setattr(paged, "attend", attend)
        patch.setattr(recurrent, "delta_rule", delta_rule)
        yield
