"""Records of requests in all the forms that recorders have written, and what a tape writes."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from router.capture.format import Reset, Sent, read_capture
from router.capture.record import Tape
from router.core.types import Engine
from router.wire.kv_events import BlockStored, EventBatch, encode_batch, encode_sequence

OLD: dict[str, Any] = {
    "kind": "request",
    "t": 9.0,
    "sent_t": 1.0,
    "done_t": 2.0,
    "status": 200,
    "headers": {"X-data-parallel-rank": "1"},
    "request": {"model": "m", "cache_salt": "s"},
    "tokenize_ids": [1, 2, 3],
    "response": {
        "usage": {"prompt_tokens_details": {"cached_tokens": 2}},
        "choices": [{"token_ids": [7, 8]}],
    },
}
NEW: dict[str, Any] = {
    "kind": "request",
    "sent_t": 1.0,
    "first_token_t": 1.5,
    "finish": {"t": 2.0, "reason": "length"},
    "request": {"model": "m", "cache_salt": "s"},
    "prompt_token_ids": [1, 2, 3],
    "output_token_ids": [7, 8],
    "served_rank": 1,
    "served_rank_source": "header",
    "response": {"usage": {"prompt_tokens_details": {"cached_tokens": 2}}},
}
NOTE = {"kind": "note", "t": 0.0, "text": "server_info", "kv_event_sources": {"0": {}}, "geometry": {"chunk_size": 96}}


def read(folder: Path, *records: dict[str, Any]) -> list[Sent]:
    (folder / "c.jsonl").write_text("")
    (folder / "c.requests.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (NOTE, *records)))
    return list(read_capture(folder / "c.jsonl", folder / "c.requests.jsonl").requests or ())


BODY = {"model": "m", "cache_salt": "s"}
WRAPPED = NEW | {"request": {"path": "/v1/completions", "json": BODY}}
FLAT = {name: value for name, value in NEW.items() if name != "request"} | BODY


@pytest.mark.parametrize(("record", "first"), [(OLD, None), (NEW, 1.5), (WRAPPED, 1.5), (FLAT, 1.5)])
def test_old_and_new_records_say_the_same(tmp_path: Path, record: dict[str, Any], first: float | None) -> None:
    """Times, ids, rank, salt and the engine's own word, wherever they stand."""
    (sent,) = read(tmp_path, record)

    assert (sent.at, sent.first_token_at, sent.finished_at, sent.rank, sent.cached_tokens) == (1.0, first, 2.0, 1, 2)
    assert (sent.prompt, sent.output) == (array("I", [1, 2, 3]), array("I", [7, 8]))
    assert sent.fields["cache_salt"] == "s"


@pytest.mark.parametrize("flag", ["aborted", "failed", "prior_request"])
def test_some_requests_are_not_scored(tmp_path: Path, flag: str) -> None:
    """Neither as a flag nor as a kind of their own; what was sent before the router came is not known to it."""
    for record in (NEW | {flag: True}, NEW | {"kind": flag}):
        (sent,) = read(tmp_path, record)
        assert sent.cached_tokens is None
        assert bool(sent.prompt) == (flag != "prior_request")
        assert sent.is_cut == (flag == "aborted")


def test_sglangs_own_answers_are_read(tmp_path: Path) -> None:
    """Ids under input_ids and output_ids, cached tokens and the rank in meta_info."""
    record = {
        "kind": "request",
        "sent_t": 1.0,
        "done_t": 2.0,
        "request": {"input_ids": [1, 2], "extra_key": "k"},
        "response": {"output_ids": [3], "meta_info": {"cached_tokens": 1, "dp_rank": 3}},
    }
    (sent,) = read(tmp_path, record)

    assert (sent.prompt, sent.output, sent.cached_tokens, sent.rank) == (array("I", [1, 2]), array("I", [3]), 1, 3)


def test_a_refused_reset_is_none(tmp_path: Path) -> None:
    """vLLM refuses with 200 and ``success: false``, SGLang with 400; a restart is told apart."""
    (tmp_path / "c.jsonl").write_text("")
    records = [
        {"kind": "reset", "t": 1.0, "status": 200, "text": '{"success":true}'},
        {"kind": "reset_busy", "t": 2.0, "status": 200, "text": '{"success":false}'},
        {"kind": "reset_busy", "t": 3.0, "status": 400, "text": "Flush cache failed."},
        {"kind": "restart", "t": 4.0},
    ]
    (tmp_path / "c.requests.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    capture = read_capture(tmp_path / "c.jsonl", tmp_path / "c.requests.jsonl")
    assert capture.resets == [Reset(1.0), Reset(4.0, is_restart=True)]


def test_what_a_tape_writes_is_read_back(tmp_path: Path) -> None:
    """Frames with their arrival and rank, requests with their times, and the engine's geometry."""
    event = BlockStored((1, 2), None, array("I", [5, 6, 7, 8]), 2)
    now = iter(range(10, 100))
    with Tape("t", tmp_path, clock=lambda: float(next(now))) as tape:
        tape.note("note", engine="sglang", geometry={"block_size": 2, "attention_chunk_size": 64})
        tape.frame(1, [b"kv", encode_sequence(4), encode_batch(EventBatch(1.0, (event,)))])
        tape.request({key: value for key, value in NEW.items() if key != "kind"})

    capture = read_capture(tmp_path / "t.jsonl", tmp_path / "t.requests.jsonl")
    (frame,) = capture.frames
    assert (frame.at, frame.rank, frame.sequence) == (11.0, 1, 4)
    assert frame.batch is not None
    assert frame.batch.events == (event,)
    assert (capture.engine, capture.block_tokens, capture.geometry.chunk_tokens) == (Engine.SGLANG, 2, 64)
    assert capture.requests is not None
    assert capture.requests[0].prompt == array("I", [1, 2, 3])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny-gemma3-swa", 109),
        ("tiny-qwen3-dp2", 159),
        ("own-vllm-llama4-small-pool", 111),
        ("sglang-tiny-qwen3", None),
    ],
)
def test_a_pools_blocks_are_in_the_notes_or_in_a_dump_of_metrics(name: str, expected: int | None) -> None:
    """vLLM was started with 110 and with 160 blocks a rank; a newer recorder writes down what the router would take."""
    folder = Path(__file__).parents[2] / "data" / "kv_events"
    capture = read_capture(folder / f"{name}.jsonl.gz", folder / f"{name}.requests.jsonl.gz")
    assert capture.pool_blocks == expected
