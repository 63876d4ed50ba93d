"""Cache events of inference engines: bytes to values and back. No sockets.

A ZMQ message is ``[topic, sequence u64 big-endian, payload]``; the payload is msgpack
``[timestamp, [event, ...], rank | nil]`` and, from our shims, a fourth item: the epoch id of the publisher.
Events are maps with a ``type`` key (today) or arrays that begin with the type name (older releases).

The decoder is lenient about what it does not know (keys, event types, media) and strict about damage:
anything that is not such a batch raises ``WireError``, and the caller resynchronises.
Source: vLLM ``distributed/kv_events.py``, SGLang ``disaggregation/kv_events.py``.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from router.errors import WireError

#: An engine's own name for a block: u64, signed i64 (SGLang; normalised to u64 here) or 32 bytes.
EngineHash = int | bytes

FULL: Final = "full_attention"
SLIDING_WINDOW: Final = "sliding_window"
REPLAY_END: Final = b"\xff" * 8
GPU: Final = "GPU"
REMOTE: Final = "REMOTE"
_HOST: Final = "CPU"
_U64 = (1 << 64) - 1
_MAX_BLOCK_TOKENS = 1 << 20
_MAX_GROUPS = 64  # engines number theirs from 0; models have a handful
_MAX_WINDOW_TOKENS = 1 << 31
_MAX_HASH_BYTES = 64  # engines' have 32
_SLICE_BYTES = 1 << 16
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became resident.

    ``token_ids`` covers the whole span after ``parent``; for dense groups it is ``len(hashes) * block_tokens`` long,
    for sparse ones (window, recurrent) hashes may name fewer blocks than it has, at positions the event does not tell.
    ``next_tokens``: what is behind each block, and part of its name (SGLang with EAGLE).
    """

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: Sequence[int]
    block_tokens: int
    medium: str = GPU
    group: int = 0
    kind: str | None = None
    window_tokens: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    locality: str | None = None
    next_tokens: Sequence[int] = ()

    @property
    def is_dense(self) -> bool:
        """Each hash names the block at its own place in ``token_ids``."""
        return len(self.hashes) * self.block_tokens == len(self.token_ids)

    @property
    def is_on_device(self) -> bool:
        """There are blocks, and they lie where prompts find them without a load."""
        return bool(self.hashes) and self.medium == GPU and self.locality != REMOTE


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks are no longer resident in this medium and group. One removal takes one copy."""

    hashes: tuple[EngineHash, ...]
    medium: str = GPU
    group: int = 0
    locality: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The publisher's cache is empty."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """An event of a type this decoder does not know; counted, otherwise ignored."""

    type: str


Event = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What one scheduler step of one rank published."""

    timestamp: float
    events: tuple[Event, ...]
    rank: int | None = None
    epoch: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is resident on a rank after message ``sequence`` (-1: before the first one)."""

    sequence: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one rank publishes, by ``GET /kv_event_sources``; ``epoch`` and ``snapshot_path`` are our shims' only."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    epoch: str | None = None
    snapshot_path: str | None = None
    block_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def tier_of(medium: str) -> str:
    """The tier of a medium: SGLang copies into CPU_PINNED memory what it then removes from the CPU."""
    return _HOST if medium.upper().startswith(_HOST) else medium


# --- decoding -----------------------------------------------------------------------------------


def decode_batch(payload: bytes | msgspec.Raw) -> EventBatch:
    """Decode one payload. Raises ``WireError`` on anything that is not an event batch."""
    steps = decode_in_slices(payload)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            batch: EventBatch = end.value
            return batch


def decode_in_slices(payload: bytes | msgspec.Raw) -> Generator[None, None, EventBatch]:
    """The same, with a pause after each slice of a payload that is large."""
    raw = _decoded(_RAW_LIST, payload)
    if len(raw) < 2:
        raise WireError("an event batch is [timestamp, [events], rank]")
    timestamp, *tail = [_decoded(_ANY, part) for part in (raw[0], *raw[2:])]
    rank, epoch, *_ = (*tail, None, None)
    if not isinstance(timestamp, int | float) or not (rank is None or isinstance(rank, int)):
        raise WireError("an event batch begins with a number and ends with a rank or nil")
    events, size = list[Event](), 0
    for part in _decoded(_RAW_LIST, raw[1]):
        if size >= _SLICE_BYTES:
            yield
            size = 0
        size += memoryview(part).nbytes
        events.append(_event(_decoded(_ANY, part)))
    return EventBatch(
        timestamp=float(timestamp) if math.isfinite(timestamp) else 0.0,  # one that equals itself, as others do
        events=tuple(events),
        rank=rank,
        epoch=epoch if isinstance(epoch, str) else None,
    )


def decode_sequence(frame: bytes) -> int:
    """The sequence number of a message. Raises ``WireError`` unless it is eight bytes."""
    if len(frame) != 8:
        raise WireError(f"sequence frame of {len(frame)} bytes, expected 8")
    return int.from_bytes(frame, "big")


def decode_snapshot(body: bytes) -> Snapshot:
    """Decode the body of a shim's snapshot endpoint. Raises ``WireError``."""
    sequence, batch = split_snapshot(body)
    return Snapshot(sequence=sequence, batch=decode_batch(batch))


def split_snapshot(body: bytes) -> tuple[int, msgspec.Raw]:
    """A snapshot's sequence number, and its batch yet to be decoded. Raises ``WireError``."""
    parts = _decoded(_RAW_LIST, body)
    sequence = _decoded(_ANY, parts[0]) if len(parts) == 2 else None
    if not isinstance(sequence, int) or sequence < -1:
        raise WireError("not a snapshot: it is [sequence, batch]")
    return sequence, parts[1]


def decode_sources(body: Mapping[str, Any]) -> tuple[EventSource, ...]:
    """Read ``GET /kv_event_sources``; ranks that publish nothing are left out."""
    sources: list[EventSource] = []
    for rank, entry in body.items():
        if not isinstance(entry, Mapping) or not str(rank).isdecimal():
            raise WireError(f"event source {rank!r} is not an object keyed by a rank")
        if entry.get("publisher") != "zmq" or not entry.get("enable_kv_cache_events", True):
            continue
        sources.append(
            EventSource(
                rank=int(rank),
                endpoint=str(entry["endpoint"]),
                replay_endpoint=entry.get("replay_endpoint"),
                topic=entry.get("topic") or "",
                epoch=entry.get("epoch"),
                snapshot_path=entry.get("snapshot_path"),
                block_tokens=entry.get("block_size"),
                extra=dict(entry),
            )
        )
    return tuple(sorted(sources, key=lambda source: source.rank))


_RAW_LIST: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ANY: Final = msgspec.msgpack.Decoder(Any)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], part: bytes | msgspec.Raw) -> _T:
    try:
        return decoder.decode(part)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not the msgpack of an event batch: {error}") from error


#: In the order of vLLM's own classes, which have only ever been added to at their ends. Older releases send fewer.
_ARRAY_FIELDS: Final = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}


def _event(raw: object) -> Event:
    if isinstance(raw, list) and raw and isinstance(raw[0], str):
        names = _ARRAY_FIELDS.get(raw[0])
        if names is None:
            return UnknownEvent(raw[0])
        raw = {"type": raw[0], **dict(zip(names, raw[1:], strict=False))}
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise WireError("an event is a map with a type, or an array that begins with one")
    try:
        match raw["type"]:
            case "BlockStored":
                return _stored(raw)
            case "BlockRemoved":
                return BlockRemoved(
                    hashes=_hashes(raw["block_hashes"]),
                    medium=_optional(raw, "medium", str) or GPU,
                    group=_group(raw),
                    locality=_optional(raw, "locality", str),
                )
            case "AllBlocksCleared":
                return AllBlocksCleared()
            case other:
                return UnknownEvent(other)
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise WireError(f"damaged {raw['type']}: {error!r}") from error


def _stored(raw: dict[str, Any]) -> BlockStored:
    token_ids, block_tokens = raw["token_ids"], raw["block_size"]
    if not isinstance(block_tokens, int) or not 0 < block_tokens <= _MAX_BLOCK_TOKENS:
        raise ValueError(f"block_size {block_tokens!r}")
    next_tokens: Sequence[int] = ()
    if token_ids and isinstance(token_ids[0], list):  # EAGLE bigram pages: (t[i], t[i+1])
        next_tokens = array("I", [pair[1] for pair in token_ids[block_tokens - 1 :: block_tokens]])
        token_ids = [pair[0] for pair in token_ids]
    parent = raw.get("parent_block_hash")
    extra = _optional(raw, "extra_keys", list)
    if not all(keys is None or isinstance(keys, list) for keys in extra or ()):
        raise TypeError("extra_keys are a list for each block, or nil")
    return BlockStored(
        hashes=_hashes(raw["block_hashes"]),
        parent=None if parent is None else _hash(parent),
        token_ids=array("I", token_ids),  # 32 bits, or it is none
        block_tokens=block_tokens,
        medium=_optional(raw, "medium", str) or GPU,
        group=_group(raw),
        kind=_optional(raw, "kv_cache_spec_kind", str),
        window_tokens=_window(raw),
        lora_name=_adapter(raw),
        cache_salt=_optional(raw, "cache_salt", str),
        extra_keys=None if extra is None else tuple(extra),
        locality=_optional(raw, "locality", str),
        next_tokens=next_tokens,
    )


def _optional(raw: Mapping[str, Any], name: str, kind: type[_T]) -> _T | None:
    value = raw.get(name)
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} is of type {type(value).__name__}")
    return value


def _group(raw: Mapping[str, Any]) -> int:
    group = _optional(raw, "group_idx", int) or 0
    if not 0 <= group < _MAX_GROUPS:
        raise ValueError(f"group_idx {group}")
    return group


def _window(raw: Mapping[str, Any]) -> int | None:
    window_tokens = _optional(raw, "kv_cache_spec_sliding_window", int)
    if window_tokens is not None and not 0 < window_tokens <= _MAX_WINDOW_TOKENS:
        raise ValueError(f"kv_cache_spec_sliding_window {window_tokens}")
    return window_tokens


def _adapter(raw: Mapping[str, Any]) -> str | None:
    """An adapter's name. Older releases of vLLM give its number only: no prompt's, but not the base model's either."""
    number = _optional(raw, "lora_id", int)
    return _optional(raw, "lora_name", str) or (None if number is None else f"lora_id={number}")


def _hashes(raw: Sequence[object]) -> tuple[EngineHash, ...]:
    if not isinstance(raw, list):
        raise TypeError("block_hashes is not a list")
    return tuple(_hash(value) for value in raw)


def _hash(raw: object) -> EngineHash:
    if isinstance(raw, int):
        return raw & _U64
    if isinstance(raw, bytes) and len(raw) <= _MAX_HASH_BYTES:
        return raw
    raise TypeError(f"a block hash is an integer or up to {_MAX_HASH_BYTES} bytes, not {type(raw).__name__}")


# --- encoding (the shim publishes in vLLM's current form) ----------------------------------------


def encode_batch(batch: EventBatch) -> bytes:
    """The msgpack payload of a batch; the epoch follows as a fourth item that other readers skip."""
    return msgspec.msgpack.encode(_raw_batch(batch))


def encode_sequence(sequence: int) -> bytes:
    """Eight bytes, big-endian."""
    return struct.pack(">Q", sequence)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The body of the snapshot endpoint: msgpack ``[sequence, batch]``."""
    return msgspec.msgpack.encode([snapshot.sequence, _raw_batch(snapshot.batch)])


def _raw_batch(batch: EventBatch) -> list[Any]:
    return [batch.timestamp, [_raw_event(event) for event in batch.events], batch.rank, batch.epoch]


def _raw_event(event: Event) -> dict[str, Any]:
    match event:
        case BlockStored():
            raw: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": list(event.hashes),
                "parent_block_hash": event.parent,
                "token_ids": list(event.token_ids),
                "block_size": event.block_tokens,
                "lora_id": None,
                "medium": event.medium,
                "lora_name": event.lora_name,
            }
            if event.extra_keys is not None:
                raw["extra_keys"] = [list(keys) if keys else None for keys in event.extra_keys]
            raw["group_idx"] = event.group
            if event.kind is not None:
                raw["kv_cache_spec_kind"] = event.kind
            if event.window_tokens is not None:
                raw["kv_cache_spec_sliding_window"] = event.window_tokens
            return raw
        case BlockRemoved():
            names = list(event.hashes)
            return {"type": "BlockRemoved", "block_hashes": names, "medium": event.medium, "group_idx": event.group}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}
        case UnknownEvent():
            return {"type": event.type}
