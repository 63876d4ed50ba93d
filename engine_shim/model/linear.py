"""Products with weight matrices, the most of a model's arithmetic.

On the CPU large matrices are kept as oneDNN blocks them: of AMD's AVX-512 cores that gets a tenth more than MKL on long
prompts, and twice as much on the few rows of a decode step (``homing bench cpu``). Small ones are not worth the call,
but where it is for many rows: then it is ahead with plain matrices, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

#: From so many elements on a matrix is blocked.
_LARGE = 1 << 18
#: From so many rows on oneDNN multiplies with plain matrices.
_MANY_ROWS = 256


def blocked(weight: Tensor) -> Tensor:
    """The matrix ``[out, in]`` as ``linear`` wants it here: blocked, or as it was.

    A blocked one has a shape and a type, and is good for ``linear`` and ``plain`` alone.
    """
    if weight.numel() < _LARGE or not _is_for_onednn(weight):
        return weight
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return reordered


def plain(weight: Tensor) -> Tensor:
    """The matrix as it was before ``blocked``, to the last bit; a copy where it has been blocked."""
    return weight.to_dense() if weight.is_mkldnn else weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` ``[rows, in]`` times a matrix ``[out, in]``, ``[rows, out]``."""
    if weight.is_mkldnn or (x.shape[0] >= _MANY_ROWS and _is_for_onednn(weight)):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def _is_for_onednn(weight: Tensor) -> bool:
    fits = weight.device.type == "cpu" and weight.dtype is torch.float32
    return fits and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
