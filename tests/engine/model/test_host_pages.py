"""What is read on the host is brought to a CUDA device piece by piece, and no piece is overwritten too early."""

from __future__ import annotations

import pytest
import torch

from engine_shim.attention import host_pages
from engine_shim.attention.host_pages import HostPages


class Event:
    """Of a stream that is late: what was recorded last is done only when somebody waits for it."""

    log: list[tuple[str, int]]

    def __init__(self) -> None:
        self.number = sum(what == "made" for what, _ in self.log)
        self.log.append(("made", self.number))

    def record(self) -> None:
        self.log.append(("copied", self.number))

    def synchronize(self) -> None:
        self.log.append(("waited", self.number))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pages_come_in_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any pages of a layer, on the CPU at once, for CUDA through two pieces in turn, each waited for before it is used.

    Without a GPU the copies are real and the stream is not.
    """
    Event.log = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(host_pages, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    shape = (2, 9, 4, 2, 8)  # layers, slots, page_tokens, kv_heads, head_dim
    keys, values = torch.rand(shape), torch.rand(shape)
    monkeypatch.setattr(host_pages, "_STAGED_BYTES", 3 * keys[0, 0].nbytes + 1)
    layers = HostPages(keys, values, torch.device(device)).of_layer(1)
    slots = [7, 2, 8, 1, 4, 3, 6]
    for layer, pool in zip(layers, (keys, values), strict=True):
        out = torch.zeros(len(slots), 64)
        layer.fetch(torch.tensor(slots), out)
        assert torch.equal(out, pool[1, slots].view(len(slots), -1))
    turns = [(what, piece) for piece in (0, 1, 0, 1, 0, 1) for what in ("waited", "copied")]
    assert Event.log == ([("made", 0), ("made", 1), *turns] if device == "cuda" else [])
