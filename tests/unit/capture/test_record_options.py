"""``homing record-events`` is told nonsense: it ends with one line that names the option, before it asks anybody."""

from __future__ import annotations

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
    ],
)
def test_other_options(capsys: pytest.CaptureFixture[str], option: str, value: str, rule: str) -> None:
    said = refusal(capsys, "--worker", "http://127.0.0.1:1", option, value)
    assert option in said
    assert rule in said
