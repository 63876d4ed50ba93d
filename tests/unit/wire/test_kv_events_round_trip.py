"""What a shim writes is read back as it was, whatever it is; and what only looks like a number is none."""

from __future__ import annotations

from array import array
from itertools import product
from typing import Any

import msgspec
import pytest

from router.errors import WireError
from router.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Snapshot,
    decode_batch,
    decode_snapshot,
    decode_sources,
    encode_batch,
    encode_snapshot,
)

HASHES: tuple[tuple[int | bytes, ...], ...] = ((), (0,), ((1 << 64) - 1, 7), (b"\x01" * 32,))


@pytest.mark.parametrize(("hashes", "group", "medium"), [*product(HASHES, (0, 3), ("GPU", "CPU", "DISK"))])
def test_events_are_read_back_as_they_were(hashes: tuple[int | bytes, ...], group: int, medium: str) -> None:
    """Groups, media, names of both kinds, with and without what is seldom told."""
    events = (
        BlockStored(hashes, None, array("I", [1, 2, 3, 4]), 2, medium=medium, group=group),
        BlockStored(
            hashes,
            (*hashes, 5)[0],
            array("I"),
            16,
            medium=medium,
            group=group,
            kind="sliding_window",
            window_tokens=64,
            lora_name="adapter",
            extra_keys=(["salt", 1], None),
        ),
        BlockRemoved(hashes, medium=medium, group=group),
        AllBlocksCleared(),
    )
    batch = EventBatch(1.5, events, 2, "epoch")
    assert decode_batch(encode_batch(batch)) == batch
    assert decode_snapshot(encode_snapshot(Snapshot(9, batch))) == Snapshot(9, batch)


@pytest.mark.parametrize("epoch", [7, True, 1.5, b"e", ["e"], {"e": 1}, None])
def test_an_epoch_is_a_text(epoch: Any) -> None:
    """Another publisher may have something else there."""
    assert decode_batch(msgspec.msgpack.encode([1.0, [], 0, epoch])).epoch is None


@pytest.mark.parametrize("rank", ["²", "-1", "1.0", " ", "x", ""])
def test_sources_are_keyed_by_digits(rank: str) -> None:
    """A superscript is none."""
    with pytest.raises(WireError, match="keyed by a rank"):
        decode_sources({rank: {"publisher": "zmq", "endpoint": "tcp://h:1"}})
