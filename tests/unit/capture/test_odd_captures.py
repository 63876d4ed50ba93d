"""Captures that nobody should write and somebody will: one line that names the place, or what they mean is taken."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from router.capture.check import check
from router.capture.cli import check_events
from router.capture.format import read_capture
from router.wire.kv_events import BlockStored, EventBatch, encode_batch, encode_sequence

PAYLOAD = encode_batch(EventBatch(1.0, (BlockStored((1, 2), None, [5, 6, 7, 8], 2),)))
FRAME: dict[str, Any] = {
    "t": 1.0,
    "socket_rank": 0,
    "frames_hex": [part.hex() for part in (b"", encode_sequence(0), PAYLOAD)],
}
REQUEST: dict[str, Any] = {
    "kind": "request",
    "sent_t": 2.0,
    "finish_t": 3.0,
    "request": {"model": "m"},
    "prompt_token_ids": [5, 6, 7, 8, 9],
    "served_rank": 0,
    "response": {"usage": {"prompt_tokens_details": {"cached_tokens": 4}}},
}


def written(folder: Path, frames: str, requests: str = "") -> Path:
    (folder / "c.jsonl").write_text(frames)
    (folder / "c.requests.jsonl").write_text(requests)
    return folder / "c.jsonl"


def lines(*records: Mapping[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def judged(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, int]:
    """Requests that were scored, and those that were predicted."""
    assert check_events(["--json", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    return printed["requests"], printed["exact"]


def refusal(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert check_events([str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_two_empty_files_hold_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(written(tmp_path, ""), capsys) == (0, 0)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some editors write one."""
    assert judged(written(tmp_path, "\ufeff" + lines(FRAME), "\ufeff" + lines(REQUEST)), capsys) == (1, 1)


def test_requests_that_say_too_little_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither predicted nor passed over in silence, but for those that failed or were cut off."""
    no_ids = {name: value for name, value in REQUEST.items() if name != "prompt_token_ids"}
    no_counts = {**REQUEST, "response": {"usage": {"prompt_tokens": 5}}}
    failed, cut = {**no_ids, "status": 500}, {**no_ids, "kind": "aborted"}
    path = written(tmp_path, lines(FRAME), lines(REQUEST, no_ids, no_ids, no_counts, failed, cut))
    assert check_events([str(path)]) == 0
    ids, counts = capsys.readouterr().out.splitlines()[2:]
    assert ids.strip() == "not judged, for want of the prompt's token ids: 2"
    assert counts.strip().startswith("not judged, for want of cached_tokens: 1 (vLLM tells them with --enable-prompt-")


@pytest.mark.parametrize("salt", ['"\\ud800"', '"\\uDFFFa"', '"\\ud83d\\ude00"'])
def test_halves_of_characters_in_a_salt(tmp_path: Path, capsys: pytest.CaptureFixture[str], salt: str) -> None:
    """JSON can write them. The request is another tenant's, so that nothing is found of the blocks stored without."""
    request = json.dumps(REQUEST).replace('"model"', f'"cache_salt": {salt}, "model"')
    assert judged(written(tmp_path, lines(FRAME), request), capsys) == (1, 0)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ("[" * 100_000, "not JSON"),
        ('{"t": ' + "1" * 5000 + "}", "not JSON"),
        (lines(FRAME | {"t": float("nan")}), "nan is no time"),
        (lines(FRAME | {"t": 10**400}), "a frame has t, socket_rank and frames_hex"),
        (lines(FRAME | {"socket_rank": -1}), "socket_rank -1"),
        (lines(FRAME | {"socket_rank": 1.5}), "socket_rank 1.5"),
        (lines(FRAME | {"socket_rank": True}), "socket_rank True"),
        (lines(FRAME | {"socket_rank": "²"}), "socket_rank '²'"),
        (lines(FRAME | {"socket_rank": 5000}), "rank 5000, where ranks go up to 1023"),
    ],
)
def test_frames_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str, complaint: str) -> None:
    """The second line is named."""
    said = refusal(written(tmp_path, lines(FRAME) + broken), capsys)
    assert said.startswith(f"homing check-events: {tmp_path}/c.jsonl:2: ")
    assert complaint in said


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"sent_t": float("nan")}, "nan is no time"),
        ({"first_token_t": float("inf")}, "inf is no time"),
        ({"finish_t": -float("inf")}, "-inf is no time"),
        ({"sent_t": 10**400}, "too large"),
        ({"served_rank": 1_000_000}, "rank 1000000, where ranks go up to 1023"),
        ({"prompt_token_ids": [1.5, 2]}, "token ids are non-negative integers"),
        ({"kind": "reset", "t": float("nan")}, "nan is no time"),
    ],
)
def test_requests_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: dict[str, Any], complaint: str
) -> None:
    said = refusal(written(tmp_path, lines(FRAME), lines(REQUEST, REQUEST | broken)), capsys)
    assert said.startswith(f"homing check-events: {tmp_path}/c.requests.jsonl:2: ")
    assert complaint in said


@pytest.mark.parametrize(
    ("told", "scored"),
    [
        ({"served_rank": "²"}, (1, 1)),
        ({"served_rank": True}, (1, 1)),
        ({"served_rank": -1}, (1, 1)),
        ({"served_rank": 0.0}, (1, 1)),
        ({"served_rank": 1023}, (1, 0)),
        ({"response": {"usage": {"prompt_tokens_details": {"cached_tokens": True}}}}, (0, 0)),
        ({"response": {"usage": {"prompt_tokens_details": {"cached_tokens": -5}}}}, (0, 0)),
        ({"response": {"usage": {"prompt_tokens_details": None}}}, (1, 0)),
    ],
)
def test_words_that_say_nothing_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: dict[str, Any], scored: tuple[int, int]
) -> None:
    """A rank that is none is the only one; the last one that a worker can have stored nothing. What is no number of
    cached tokens is no score, where none at all is 0."""
    assert judged(written(tmp_path, lines(FRAME), lines(REQUEST | told)), capsys) == scored


def test_a_damaged_archive_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = bytearray(gzip.compress(lines(*[FRAME | {"t": at / 7} for at in range(200)]).encode()))
    packed[len(packed) // 2 :] = b"\xff" * (len(packed) // 2)
    (tmp_path / "d.jsonl.gz").write_bytes(packed)
    assert "cannot be read" in refusal(tmp_path / "d.jsonl.gz", capsys)


@pytest.mark.parametrize(
    ("told", "is_eagle"),
    [
        *((value, False) for value in ("no", "No", "false", "off", "0", "", " none ", False, 0, None)),
        *((value, True) for value in ("yes", "true", "1", "on", True, 1)),
    ],
)
@pytest.mark.parametrize("name", ["eagle", "use_eagle"])
def test_eagle_is_on_where_its_word_says_so(tmp_path: Path, name: str, told: object, is_eagle: bool) -> None:
    """An EAGLE worker computes one block more of what it has: of the two stored here one is found."""
    note = {"kind": "note", "t": 0.0, "geometry": {name: told}}
    path = written(tmp_path, lines(FRAME), lines(note, REQUEST))
    capture = read_capture(path, tmp_path / "c.requests.jsonl")
    assert capture.geometry.eagle is is_eagle
    (verdict,) = check(capture).verdicts or ()
    assert verdict.predicted_tokens == (2 if is_eagle else 4)


def test_a_pool_that_leaves_no_block_for_each_rank_is_none(tmp_path: Path) -> None:
    """Two blocks among three ranks, one of each of which is none."""
    note = {"kind": "note", "t": 0.0, "geometry": {"num_gpu_blocks": 2}}
    path = written(tmp_path, lines(FRAME, FRAME | {"socket_rank": 2}), lines(note))
    assert read_capture(path, tmp_path / "c.requests.jsonl").pool_blocks is None


def test_seats_are_a_number(tmp_path: Path) -> None:
    """A flag of that name is no number of requests."""
    note = {"kind": "note", "t": 0.0, "info": {"states": [{"effective_max_running_requests_per_dp": True}]}}
    path = written(tmp_path, lines(FRAME), lines(note, {"kind": "note", "geometry": {"max_running_requests": 7}}))
    assert read_capture(path, tmp_path / "c.requests.jsonl").max_running_requests == 7


@pytest.mark.parametrize("name", ["block_size", "pool_tokens", "num_gpu_blocks", "max_running_requests"])
@pytest.mark.parametrize("size", [10**12, 10**30])
@pytest.mark.parametrize("as_metric", [False, True])
def test_a_size_that_no_engine_has_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, size: int, *, as_metric: bool
) -> None:
    """As where the router asks a worker. Nothing has been stored yet that tells a size."""
    metrics = {"kind": "metrics", "t": 0.0, "text": f'vllm:cache_config_info{{{name}="{size}"}} 1.0'}
    note = {"kind": "note", "t": 0.0, "geometry": {name: size}}
    first = REQUEST | {"sent_t": 0.5, "finish_t": 0.7, "response": {"usage": {"prompt_tokens_details": None}}}
    path = written(tmp_path, lines(FRAME), lines(metrics if as_metric else note, first, REQUEST))
    assert judged(path, capsys) == (2, 2)
