"""Event bytes, against examples taken from the engines' own encoders."""

from __future__ import annotations

import contextlib
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import WireError
from router.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Snapshot,
    UnknownEvent,
    decode_batch,
    decode_in_slices,
    decode_sequence,
    decode_snapshot,
    decode_sources,
    encode_batch,
    encode_sequence,
    encode_snapshot,
)

U64 = 1 << 64
SGLANG_STORED = (
    "93cb3ff8000000000000918aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf4ebfa8a1f3c34151"
    "b1706172656e745f626c6f636b5f68617368d3cf97adeedb59e05ba9746f6b656e5f6964739405060708aa626c6f636b5f73697a65"
    "04a76c6f72615f6964c0a66d656469756da3475055aa63616368655f73616c74a173aa73657373696f6e5f6964a27531"
    "a96c6f72615f6e616d65a16100"
)
SGLANG_REMOVED = (
    "93cb3ff80000000000009183a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391d3cf97adeedb59e05b"
    "a66d656469756daa4350555f50494e4e454403"
)
VLLM_WINDOW = (
    "93cb3ff8000000000000918ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfd41bc1f76b956dde"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504"
    "a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647801"
    "b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77"
    "bc6b765f63616368655f737065635f736c6964696e675f77696e646f770400"
)
CLEARED = "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400"
LEGACY = "93cb3ff80000000000009196ab426c6f636b53746f72656491d3cf97adeedb59e05bc0940102030404c000"


def test_sglang_names_blocks_by_signed_numbers() -> None:
    """They are read modulo 2**64, parent and block alike, with salt and adapter."""
    batch = decode_batch(bytes.fromhex(SGLANG_STORED))

    assert batch == EventBatch(
        timestamp=1.5,
        rank=0,
        events=(
            BlockStored(
                hashes=(5674439469042975057,),
                parent=-3488128144981237669 % U64,
                token_ids=array("I", [5, 6, 7, 8]),
                block_tokens=4,
                cache_salt="s",
                lora_name="a",
            ),
        ),
    )


def test_removals_name_their_medium() -> None:
    """A removal from pinned host memory is not one from the device."""
    (event,) = decode_batch(bytes.fromhex(SGLANG_REMOVED)).events

    assert event == BlockRemoved(hashes=(-3488128144981237669 % U64,), medium="CPU_PINNED")


def test_vllm_window_events_are_ragged() -> None:
    """Eight tokens, one hash: the group's meaning is in its kind, and the event is not dense."""
    (event,) = decode_batch(bytes.fromhex(VLLM_WINDOW)).events

    assert isinstance(event, BlockStored)
    assert (event.kind, event.window_tokens, event.group) == ("sliding_window", 4, 1)
    assert not event.is_dense


def test_a_clear_has_no_fields() -> None:
    """Both engines send the same bytes."""
    assert decode_batch(bytes.fromhex(CLEARED)).events == (AllBlocksCleared(),)


def test_older_releases_send_arrays() -> None:
    """The same event as a positional array."""
    (event,) = decode_batch(bytes.fromhex(LEGACY)).events

    assert isinstance(event, BlockStored)
    assert event.hashes == (-3488128144981237669 % U64,)
    assert (event.parent, event.token_ids, event.block_tokens) == (None, array("I", [1, 2, 3, 4]), 4)


class _Array(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """How vLLM encoded events as arrays; the fields below are in its order (``distributed/kv_events.py``)."""


class _Stored(_Array, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class _Removed(_Array, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


def test_arrays_say_all_that_maps_say() -> None:
    """Adapter, salt, group, window and place are read by their positions; what lies behind is passed over."""
    stored = _Stored(
        [1, 2], 3, [4, 5], 1, 7, "CPU", "legal", [["a"], None], 2, "sliding_window", 64, "REMOTE", "x", "s"
    )
    removed = _Removed([1], "GPU", 2, "REMOTE", "x")

    assert decode_batch(msgspec.msgpack.encode([1.0, [stored, removed], 0])).events == (
        BlockStored(
            hashes=(1, 2),
            parent=3,
            token_ids=array("I", [4, 5]),
            block_tokens=1,
            medium="CPU",
            group=2,
            kind="sliding_window",
            window_tokens=64,
            lora_name="legal",
            extra_keys=(["a"], None),
            locality="REMOTE",
        ),
        BlockRemoved(hashes=(1,), medium="GPU", group=2, locality="REMOTE"),
    )


@pytest.mark.parametrize("fields", range(5, 15))
def test_arrays_end_where_their_release_ended(fields: int) -> None:
    """Each release of vLLM added fields at the end: five were the first, and what is not said has its default."""
    whole = [[1], None, [4], 1, None, "GPU", None, [["a"]], 1, "full_attention", None, None, None, None]
    (event,) = decode_batch(msgspec.msgpack.encode([1.0, [["BlockStored", *whole[:fields]]], 0])).events

    assert event == BlockStored(
        hashes=(1,),
        parent=None,
        token_ids=array("I", [4]),
        block_tokens=1,
        extra_keys=(["a"],) if fields > 7 else None,
        group=1 if fields > 8 else 0,
        kind="full_attention" if fields > 9 else None,
    )


def test_an_adapter_known_by_number_only_is_not_the_base_model() -> None:
    """vLLM gave ``lora_id`` alone before it had ``lora_name``; with a name the number says nothing more."""
    raw = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    names = []
    for fields in ({"lora_id": 3}, {"lora_id": 3, "lora_name": "legal"}, {"lora_id": None, "lora_name": None}):
        (event,) = decode_batch(msgspec.msgpack.encode([1.5, [{**raw, **fields}], 0])).events
        assert isinstance(event, BlockStored)
        names.append(event.lora_name)

    assert names == ["lora_id=3", "legal", None]


def test_unknown_types_and_keys_are_passed_over() -> None:
    """A newer engine's additions break nothing."""
    payload = msgspec.msgpack.encode([1.0, [{"type": "BlockMoved", "x": 1}, {"type": "AllBlocksCleared", "y": 2}], 0])

    assert decode_batch(payload).events == (UnknownEvent("BlockMoved"), AllBlocksCleared())


def test_eagle_pages_carry_pairs() -> None:
    """A bigram page names each token with the one after it; the block's tokens are the first ones, behind it is the
    last one.
    """
    raw = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [[1, 2], [2, 3]]}
    (event,) = decode_batch(msgspec.msgpack.encode([1.0, [{**raw, "block_size": 2}], None])).events

    assert isinstance(event, BlockStored)
    assert list(event.token_ids) == [1, 2]
    assert list(event.next_tokens) == [3]


@pytest.mark.parametrize(
    "raw",
    [
        {},
        [1.0],
        ["x", [], 0],
        [1.0, [5], 0],
        [1.0, [{"type": "BlockStored"}], 0],
        [1.0, [{"type": "BlockRemoved", "block_hashes": ["text"]}], 0],
        [1.0, [{"type": "BlockRemoved", "block_hashes": [1], "group_idx": -1}], 0],
        [1.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 0}], 0],
        [1.0, [{"block_hashes": [1]}], 0],
    ],
)
def test_damage_is_said_to_be_damage(raw: object) -> None:
    """What is not an event batch raises ``WireError`` and nothing else."""
    with pytest.raises(WireError):
        decode_batch(msgspec.msgpack.encode(raw))


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_wire_error(payload: bytes) -> None:
    """No bytes crash the decoder."""
    with contextlib.suppress(WireError):
        decode_batch(payload)


def test_a_large_payload_can_be_decoded_in_slices() -> None:
    """Between them others have their turn. Damage in the last one is damage of all; a small payload needs no pause."""
    raw = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1] * 64}
    many = [{**raw, "block_size": 64}] * 4000
    for events, least in ((many, 8), (many[:10], 0)):
        payload = msgspec.msgpack.encode([1.0, events, 0])
        assert sum(1 for _ in decode_in_slices(payload)) >= least
        assert len(decode_batch(payload).events) == len(events)

    with pytest.raises(WireError):
        decode_batch(msgspec.msgpack.encode([1.0, [*many, raw], 0]))


def test_the_shims_batch_is_a_vllm_batch_with_an_epoch() -> None:
    """A generic msgpack reader finds vLLM's map form, positional batch and the epoch as a fourth item."""
    event = BlockStored(
        (1, 2), None, [1, 2, 3, 4], 2, group=1, kind="sliding_window", window_tokens=4, extra_keys=(("t",), None)
    )
    payload = encode_batch(EventBatch(2.0, (BlockRemoved((9,)), event), 3, "abc"))

    assert msgspec.msgpack.decode(payload) == [
        2.0,
        [
            {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU", "group_idx": 0},
            {
                "type": "BlockStored",
                "block_hashes": [1, 2],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["t"], None],
                "group_idx": 1,
                "kv_cache_spec_kind": "sliding_window",
                "kv_cache_spec_sliding_window": 4,
            },
        ],
        3,
        "abc",
    ]
    assert decode_batch(payload).epoch == "abc"


def test_a_snapshot_carries_its_sequence() -> None:
    """Sequence first, then a batch; -1 stands for nothing published yet."""
    snapshot = Snapshot(-1, EventBatch(0.0, (AllBlocksCleared(),), 0, "e"))

    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot
    with pytest.raises(WireError):
        decode_snapshot(b"\x93\x01\x02\x03")


@pytest.mark.parametrize(
    "body", [b"\x92\x05" + b"\x91" * 5000 + b"\xc0", b"\x92\xfe\x92\x00\x90", b"\x92\xc0\x92\x00\x90", b"", b"\xc1"]
)
def test_what_is_no_snapshot_is_refused(body: bytes) -> None:
    """Nested beyond all meaning, true before anything could be published (-2), without a number, or no msgpack."""
    with pytest.raises(WireError):
        decode_snapshot(body)


@pytest.mark.parametrize("time", [float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_no_number_is_one_that_equals_itself(time: float) -> None:
    """A batch is recognised by its time when it is replayed."""
    assert decode_batch(msgspec.msgpack.encode([time, [], 0])) == EventBatch(0.0, (), 0)


def test_sequence_numbers_are_eight_bytes() -> None:
    """Big-endian; anything else is damage."""
    assert decode_sequence(bytes(6) + b"\x01\x02") == 258
    assert encode_sequence(258) == bytes(6) + b"\x01\x02"
    with pytest.raises(WireError):
        decode_sequence(b"\x01")


def test_sources_are_read_as_vllm_writes_them() -> None:
    """Ranks in order; those that publish nothing are left out."""
    entry = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "kv-events"}
    sources = decode_sources({"1": entry, "0": {**entry, "enable_kv_cache_events": False}, "2": entry})

    assert [source.rank for source in sources] == [1, 2]
    assert sources[0].replay_endpoint == "tcp://*:5657"


@pytest.mark.parametrize(
    "damage",
    [
        {"token_ids": [-1, 2]},
        {"token_ids": [1 << 32, 2]},
        {"token_ids": ["a", 2]},
        {"token_ids": [1.5, 2]},
        {"token_ids": [[]]},
        {"token_ids": 7},
        {"token_ids": None},
        {"block_size": 1 << 40},
        {"block_size": "2"},
        {"block_size": None},
        {"extra_keys": [7]},
        {"extra_keys": 7},
        {"cache_salt": 7},
        {"lora_name": 7},
        {"lora_id": "seven"},
        {"medium": 7},
        {"locality": 7},
        {"group_idx": "7"},
        {"kv_cache_spec_kind": 7},
        {"group_idx": -1},
        {"group_idx": 64},
        {"group_idx": 1 << 63},
        {"kv_cache_spec_sliding_window": 1.5},
        {"kv_cache_spec_sliding_window": 0},
        {"kv_cache_spec_sliding_window": -5},
        {"kv_cache_spec_sliding_window": 1 << 62},
        {"parent_block_hash": "abc"},
        {"block_hashes": 7},
    ],
)
def test_a_field_of_another_type_is_damage(damage: dict[str, object]) -> None:
    """Nothing that the index could trip over gets past the decoder."""
    raw = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    decode_batch(msgspec.msgpack.encode([1.0, [raw], 0]))

    with pytest.raises(WireError):
        decode_batch(msgspec.msgpack.encode([1.0, [raw | damage], 0]))
