"""Captures of real engines, replayed through the router's own code, against the cached tokens the engines reported."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from router.capture.check import check
from router.capture.cli import check_events
from router.capture.format import find_captures, read_capture

ROOT = Path(__file__).parents[3]
CAPTURES = ROOT / "tests" / "data" / "kv_events"


def captured(name: str) -> Path:
    return CAPTURES / f"{name}.jsonl.gz"


@cache
def documented() -> dict[str, tuple[int, int]]:
    """Exact ones and requests by capture, as the table in docs/events.md has them."""
    figures = {}
    for row in re.findall(
        r"^\| ([\w, -]+) \|.*\| ([\d, of]+) \|$", (ROOT / "docs/events.md").read_text(), re.MULTILINE
    ):
        for name, counts in zip(row[0].split(", "), row[1].split(", "), strict=True):
            exact, _, requests = counts.partition(" of ")
            figures[name] = int(exact), int(requests)
    return figures


def test_the_readme_counts_what_the_table_does() -> None:
    """All captures are in the table, and all of its figures in the README's."""
    told = re.search(r"(\d+) of (\d+) are exact", (ROOT / "README.md").read_text())
    assert told is not None
    assert tuple(map(int, told.groups())) == tuple(map(sum, zip(*documented().values(), strict=True)))
    names = {file.name.removesuffix(".jsonl.gz") for file in CAPTURES.glob("*.jsonl.gz")}
    assert set(documented()) == {name for name in names if not name.endswith(".requests")}


@pytest.mark.parametrize(
    ("name", "requests", "least_exact"),
    [
        ("tiny-qwen3", 32, 31),
        ("tiny-gemma3-swa", 32, 31),
        ("tiny-qwen3-dp2", 33, 32),
        ("sglang-tiny-qwen3", 31, 31),
        ("own-vllm-qwen3-overlap", 99, 97),
        ("own-vllm-qwen3next-gdn", 81, 80),
        ("own-vllm-llama4-chunked", 82, 80),
        ("own-vllm-gemma3-w20", 91, 89),
        ("own-vllm-gemma3-w200-retention", 82, 81),
        ("own-vllm-gemma3-w130-retention", 96, 95),
        ("own-vllm-gemma3-dp2", 102, 100),
        ("own-sglang-qwen3-tenants", 78, 77),
        ("own-sglang-qwen3-page64-dp2", 109, 107),
        ("own-vllm-qwen3next-unit32", 83, 81),
        ("own-vllm-qwen3-reports", 66, 65),
        ("own-vllm-qwen3-late-join", 78, 74),
        ("own-vllm-gemma3-late-join", 78, 74),
        ("own-vllm-gemma3-reports", 78, 77),
        ("own-vllm-gemma3-small-pool", 84, 79),
        ("own-vllm-qwen3next-small-pool", 78, 75),
        ("own-vllm-qwen3next-three", 91, 90),
        ("own-vllm-llama4-small-pool", 84, 81),
        ("own-vllm-mistral-windows", 85, 83),
        ("own-vllm-mistral-small-pool", 82, 81),
        ("own-vllm-mistral-eagle", 84, 82),
        ("own-vllm-qwen3-bytes96", 83, 82),
        ("own-vllm-gemma3-bytes", 92, 91),
        ("own-vllm-gemma3-restart", 91, 90),
        ("own-vllm-qwen3-lora", 78, 77),
        ("own-sglang-qwen3-lora", 105, 105),
        ("own-vllm-qwen3next-blocks160", 82, 81),
        ("own-vllm-qwen3next-retention", 76, 75),
        ("own-vllm-qwen3-full-pool", 82, 77),
        ("own-sglang-qwen3-full-pool", 83, 83),
        ("own-sglang-qwen3-tight-pool", 83, 77),
        ("own-sglang-qwen3-waiting", 80, 74),
        ("own-sglang-qwen3-page1", 49, 48),
        ("own-sglang-qwen3-pieces", 63, 63),
    ],
)
def test_what_an_engine_reported_was_predicted(name: str, requests: int, least_exact: int) -> None:
    """Turns, twins, salts, evictions, late events and resets: cached tokens to the token."""
    ((frames, sent),) = find_captures([captured(name)])
    report = check(read_capture(frames, sent))

    assert report.verdicts is not None
    assert len(report.verdicts) == requests
    assert report.exact >= max(least_exact, documented()[name][0])
    assert report.exact + report.over + report.under == requests


def test_without_events_only_what_was_sent_is_known() -> None:
    """The same requests with no stream at all: fewer are right, so it is the events that make them so."""
    capture = read_capture(captured("tiny-gemma3-swa"), CAPTURES / "tiny-gemma3-swa.requests.jsonl.gz")

    assert check(replace(capture, frames=())).exact < check(capture).exact - 5


def test_a_hybrid_is_not_judged_by_its_full_group_alone() -> None:
    """Without the window group's events the same capture is predicted far too well."""
    capture = read_capture(captured("tiny-gemma3-swa"), CAPTURES / "tiny-gemma3-swa.requests.jsonl.gz")
    frames = [
        replace(frame, batch=replace(frame.batch, events=tuple(e for e in frame.batch.events if e.group == 1)))  # type: ignore[union-attr]
        for frame in capture.frames
        if frame.batch is not None and all(hasattr(event, "group") for event in frame.batch.events)
    ]

    assert check(replace(capture, frames=frames)).over > 10


def test_totals_and_each_file_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Two captures: their sums on top, with the groups of each."""
    assert check_events(["--json", str(captured("tiny-gemma3-swa")), str(captured("sglang-tiny-qwen3"))]) == 0

    printed = json.loads(capsys.readouterr().out)
    assert printed["requests"] == 32 + 31
    assert printed["exact"] + printed["over"] + printed["under"] == printed["requests"]
    assert [group["kind"] for group in printed["groups"]["tiny-gemma3-swa"]] == ["sliding_window", "full_attention"]
    assert printed["files"][0]["groups"][0]["window_tokens"] == 64


def test_captures_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two engines recorded under one name, each in its folder: neither hides the other."""
    for folder, name in (("one", "tiny-gemma3-swa"), ("other", "sglang-tiny-qwen3")):
        (tmp_path / folder).mkdir()
        for suffix in (".jsonl.gz", ".requests.jsonl.gz"):
            (tmp_path / folder / f"mine{suffix}").symlink_to(CAPTURES / f"{name}{suffix}")
    one, other = (str(tmp_path / folder / "mine") for folder in ("one", "other"))

    assert check_events(["--json", f"{one}.jsonl.gz", f"{other}.jsonl.gz", str(captured("tiny-qwen3"))]) == 0

    printed = json.loads(capsys.readouterr().out)
    assert [file["name"] for file in printed["files"]] == [one, other, "tiny-qwen3"]
    assert {name: len(groups) for name, groups in printed["groups"].items()} == {one: 2, other: 1, "tiny-qwen3": 1}


def test_a_lone_file_of_frames_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing can be judged, and nothing is counted as wrong."""
    lone = tmp_path / "lone.jsonl"
    lone.write_bytes(gzip.decompress(captured("tiny-qwen3").read_bytes()))

    assert check_events([str(lone)]) == 0
    assert "no requests file: 105 frames only" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"t": 1.0, "frames_hex": ["", "0000000000000000", "zz"]}\n', "bad.jsonl:1: a frame has"),
        ('{"t": 1.0, "frames_hex": ["", "0000000000000000", "93"]}\nnonsense\n', "bad.jsonl:2: not JSON"),
        ("[]\n", "bad.jsonl:1: a record is a JSON object"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, complaint: str
) -> None:
    """One line on stderr, status 1."""
    (tmp_path / "bad.jsonl").write_text(content)

    assert check_events([str(tmp_path / "bad.jsonl")]) == 1
    assert complaint in capsys.readouterr().err


def test_a_message_that_cannot_be_decoded_is_counted(tmp_path: Path) -> None:
    """Damage inside a message is the stream's, not the file's."""
    (tmp_path / "d.jsonl").write_text('{"t": 1.0, "socket_rank": 0, "frames_hex": ["", "0000000000000000", "c1"]}\n')

    assert check(read_capture(tmp_path / "d.jsonl", None)).damaged == 1


def test_what_groups_there_are_is_known_before_the_first_request() -> None:
    """As a router learns it with its probe: of three prompts with one head the second leaves no window for a third."""
    capture = read_capture(captured("own-vllm-gemma3-w20"), CAPTURES / "own-vllm-gemma3-w20.requests.jsonl.gz")
    verdicts = check(replace(capture, requests=(capture.requests or ())[:6])).verdicts or ()

    assert [verdict.tag for verdict in verdicts if verdict.predicted_tokens > verdict.actual_tokens] == []
