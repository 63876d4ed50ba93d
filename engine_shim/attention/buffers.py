"""What pages hold, group by group, whatever kind of layer it is for; and as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

#: For each group its tensors, ``[layers, pages, ...]`` each: keys and values, or the two parts of a state.
Buffers = tuple[tuple[Tensor, ...], ...]


class TensorPages:
    """Reads and writes pages as bytes: the group's tensors one after the other, all layers of each."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers

    @property
    def contents(self) -> str:
        """What a page of each group is made of: the type and the shape of each tensor's part."""
        return ",".join(
            "+".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor[:, 0].shape)}" for tensor in tensors)
            for tensors in self._buffers
        ).replace(" ", "")

    def read(self, group: int, page: int) -> bytes:
        """A copy of a page, on the host."""
        return b"".join(
            tensor[:, page].contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in self._buffers[group]
        )

    def write(self, group: int, page: int, data: bytes) -> None:
        """Put such a copy in place of a page."""
        at = 0
        for tensor in self._buffers[group]:
            place = tensor[:, page]
            size = place.numel() * place.element_size()
            copy = torch.frombuffer(bytearray(data[at : at + size]), dtype=tensor.dtype).view(place.shape)
            place.copy_(copy)
            at += size
        assert at == len(data), "a page of another layout"
