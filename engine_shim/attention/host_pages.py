"""Pages that attention reads on the host: those of contexts that are longer than the device's pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

#: So much is brought to a CUDA device at a time, of one layer's keys or values.
_STAGED_BYTES = 16 << 20


class Staging:
    """Two pieces of pinned memory, filled in turn while the other is copied to a CUDA device."""

    def __init__(self, page_bytes: int) -> None:
        self.pages = max(1, _STAGED_BYTES // page_bytes)
        size = self.pages * page_bytes
        self._pieces = [(_pinned(size), torch.cuda.Event()) for _ in range(2)]  # type: ignore[no-untyped-call]

    def copy(self, rows: Tensor, slots: Tensor, out: Tensor) -> None:
        """Put up to ``pages`` rows ``[slots, n]`` of the host into ``out`` ``[len(slots), n]`` on the device.

        The host has been read when this returns.
        """
        piece, copied = self._pieces[0]
        self._pieces.reverse()
        copied.synchronize()
        staged = piece.view(rows.dtype)[: out.numel()].view(out.shape)
        torch.index_select(rows, 0, slots, out=staged)
        out.copy_(staged, non_blocking=True)
        copied.record()


@dataclass(slots=True)
class HostLayer:
    """One layer's keys or values on the host, ``[slots, page_tokens, kv_heads, head_dim]``."""

    pages: Tensor
    staging: Staging | None

    def fetch(self, slots: Tensor, out: Tensor) -> None:
        """Put the pages in ``slots`` ``[P]``, on the host, into ``out`` ``[P, page_size]``, on the device."""
        rows = self.pages.view(self.pages.shape[0], -1)
        if self.staging is None:
            torch.index_select(rows, 0, slots, out=out)
            return
        for start in range(0, len(slots), self.staging.pages):
            piece = slice(start, start + self.staging.pages)
            self.staging.copy(rows, slots[piece], out[piece])


@dataclass(slots=True)
class HostPages:
    """The host's pool of the full group, ``[layers, slots, page_tokens, kv_heads, head_dim]``, for a device."""

    keys: Tensor
    values: Tensor
    device: torch.device
    _staging: Staging | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self._staging = Staging(self.keys[0, 0].nbytes)

    def of_layer(self, row: int) -> tuple[HostLayer, HostLayer]:
        """Keys and values of one layer of the group."""
        return HostLayer(self.keys[row], self._staging), HostLayer(self.values[row], self._staging)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
