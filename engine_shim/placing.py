"""Values on their way between the host and the device: nobody waits for them but who reads them on the host.

CUDA copies in the background from and to pinned memory alone; of pageable memory, a new tensor's among it, it copies
while the caller stands still.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: What there is on the host: numbers, rows of numbers, arrays, tensors.
HostValues = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | npt.NDArray[np.generic] | Tensor


def to_device(values: HostValues, device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """Values of the host as a tensor that stands on ``device`` for whatever is launched from here on.

    On the CPU an array or tensor is not copied.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy that is there once the device has come that far; on the CPU the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
