"""``homing record-events`` is told nonsense: it ends with one line that names the option, before it asks anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.capture.cli import main


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The last line of what it says."""
    with pytest.raises(SystemExit) as leaving:
        main(["record-events", "--name", "x", *options])
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err.splitlines()[-1]


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8100", "http://", "ftp://x:1", "http://x:port", "http://h:99999", "http://[::1", "http://a b:1", ""],
)
def test_what_is_no_address(capsys: pytest.CaptureFixture[str], url: str) -> None:
    """As the router says it."""
    said = refusal(capsys, "--worker", url)
    assert (
        said
        == f"homing record-events: error: bad value for --worker: {url!r}; a worker's URL looks like http://host:port"
    )


def test_a_password_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "secret" not in refusal(capsys, "--worker", "http://user:secret@host:80")


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--kv-events", "127.0.0.1:5557", "an event endpoint looks like tcp://host:port"),
        ("--dp-size", "0", "it must be greater than or equal to 1"),
        ("--geometry", "[1]", "a JSON object is needed"),
        ("--geometry", "{", "a JSON object is needed"),
        ("--concurrency", "0", "'0' is not a whole number of at least 1"),
        ("--sessions", "-3", "'-3' is not a whole number of at least 1"),
        ("--output-tokens", "0", "'0' is not a whole number of at least 1"),
        ("--turn-tokens", "1.5", "'1.5' is not a whole number of at least 1"),
        ("--aborts", "7", "'7' is not a number from 0 to 1"),
        ("--salts", "nan", "'nan' is not a number from 0 to 1"),
        ("--patience-seconds", "inf", "'inf' is not a number of seconds above 0"),
        ("--patience-seconds", "-1", "'-1' is not a number of seconds above 0"),
        ("--port", "999999", "'999999' is not a whole number from 0 to 65535"),
        ("--name", "a/b", "a name is needed, without a path; --folder says where"),
        ("--name", "", "a name is needed, without a path; --folder says where"),
    ],
)
def test_other_options(capsys: pytest.CaptureFixture[str], option: str, value: str, rule: str) -> None:
    said = refusal(capsys, "--worker", "http://127.0.0.1:1", option, value)
    assert option in said
    assert rule in said


@pytest.mark.parametrize("there", ["t.jsonl", "t.requests.jsonl", "t.jsonl.gz"])
def test_what_was_recorded_before_stays(there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any file of a capture of that name, before the worker is asked."""
    (tmp_path / there).write_text("old")
    status = main(["record-events", "--worker", "http://127.0.0.1:1", "--name", "t", "--folder", str(tmp_path)])
    assert status == 1
    said = f"homing record-events: {tmp_path / there} is there already; give another --name, or --overwrite\n"
    assert capsys.readouterr() == ("", said)
    assert (tmp_path / there).read_text() == "old"
