"""The RMS norm of every model."""

from __future__ import annotations

import torch
from torch import Tensor


class RmsNorm:
    """Over the last axis. ``weight`` ``[..., size]`` is float32, whatever the model computes in."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight
        self._eps = eps
        # The length of a vector is the root of its size times as long as its root mean square is.
        self._stretched = weight * size**0.5
        self._least = torch.tensor((eps * size) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[rows, ..., size]`` normed, of its own type."""
        weight = self.weight
        if x.dtype is not weight.dtype:
            return self(x.to(weight.dtype)).to(x.dtype)
        if x.is_cuda and weight.dim() == 1:
            return torch.rms_norm(x, weight.shape, weight, self._eps)
        if x.is_cuda:
            return torch.rms_norm(x, weight.shape[-1:], None, self._eps).mul_(weight)
        # On the CPU torch's own is nine operators, which on the few rows of a decode step take twice as long.
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(length, self._least)).mul_(self._stretched)


def normed(x: Tensor, norm: RmsNorm | None) -> Tensor:
    """What has no norm is left as it is."""
    return x if norm is None else norm(x)
