"""The host's copies: pools of the same shape as the device's, in CPU memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_shim.attention.buffers import Buffers, TensorPages
from engine_shim.types import CacheLayout


@dataclass(frozen=True, slots=True)
class HostPool:
    """Slots in host memory, pinned if the device is a CUDA one. ``names[g][slot]``: block key of what is there."""

    buffers: Buffers
    names: tuple[array[int], ...]

    @classmethod
    def allocate(cls, device: Buffers, pages: Sequence[int]) -> HostPool:
        """As many slots for each group as ``pages`` says, the null slot among them."""
        return cls(
            buffers=tuple(
                tuple(_host_tensor(tensor, count) for tensor in tensors)
                for tensors, count in zip(device, pages, strict=True)
            ),
            names=tuple(array("Q", bytes(8 * count)) for count in pages),
        )

    def holds(self, group: int, slots: Iterable[int], names: Iterable[int]) -> bool:
        """Whether each slot holds what it is asked for."""
        return all(self.names[group][slot] == name for slot, name in zip(slots, names, strict=True))

    def page_bytes(self, group: int) -> int:
        """Size of one page, all layers of it."""
        return sum(tensor[:, 0].numel() * tensor.element_size() for tensor in self.buffers[group])

    @property
    def pages(self) -> TensorPages:
        """Slots as bytes."""
        return TensorPages(self.buffers)


def rows_of_layers(layout: CacheLayout) -> list[tuple[int, int]]:
    """(group, row of its tensors) of each layer, in the model's order."""
    return [(group.index, row) for _, (group, row) in sorted(layout.places().items())]


def _host_tensor(like: Tensor, slots: int) -> Tensor:
    shape = (like.shape[0], slots, *like.shape[2:])
    return torch.zeros(shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
