"""Products with weight matrices, the most of a model's arithmetic.

On the CPU large matrices are kept as oneDNN blocks them: of AMD's AVX-512 cores that gets a tenth more than MKL on long
prompts, and twice as much on the few rows of a decode step (``homing bench cpu``). Small ones are not worth the call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

#: From so many elements on a matrix is blocked.
_LARGE = 1 << 18


def blocked(weight: Tensor) -> Tensor:
    """The matrix ``[out, in]`` as ``linear`` wants it here: blocked, or as it was.

    A blocked one has a shape and a type, and is good for ``linear`` alone.
    """
    large = weight.device.type == "cpu" and weight.dtype is torch.float32 and weight.numel() >= _LARGE
    if not large or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return weight
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return reordered


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` ``[rows, in]`` times a matrix ``[out, in]``, ``[rows, out]``."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)
