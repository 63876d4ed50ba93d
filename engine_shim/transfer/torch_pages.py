"""What a torch rank's pages hold, as bytes: keys, then values, of all the group's layers; of a state its two parts."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_shim.runner.torch_runner import TorchRunner
from engine_shim.types import GroupKind


class TorchPages:
    """Reads and writes a runner's pools, in the rank's own thread."""

    def __init__(self, runner: TorchRunner) -> None:
        self._tensors: list[tuple[Tensor, Tensor]] = []
        for group in runner.layout.groups:
            if group.kind is GroupKind.STATE:
                assert runner.states is not None, "a state group has states"
                self._tensors.append((runner.states.inputs, runner.states.memories))
            else:
                self._tensors.append((runner.pools.keys[group.index], runner.pools.values[group.index]))

    def read(self, group: int, page: int) -> bytes:
        """A copy of a page, on the host."""
        return b"".join(
            tensor[:, page].contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in self._tensors[group]
        )

    def write(self, group: int, page: int, data: bytes) -> None:
        """Put such a copy in place of a page."""
        at = 0
        for tensor in self._tensors[group]:
            place = tensor[:, page]
            size = place.numel() * place.element_size()
            copy = torch.frombuffer(bytearray(data[at : at + size]), dtype=tensor.dtype).view(place.shape)
            place.copy_(copy)
            at += size
        assert at == len(data), "a page of another layout"
