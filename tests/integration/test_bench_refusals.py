"""``homing bench`` is asked for what makes no sense, or needs what is not there: one line, and no traceback."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from engine_shim.bench.contenders import ContenderError, Vllm
from router.bench import memory, proxy
from router.bench.cli import main
from router.bench.running import CannotRun

NO_PYTHON = "/no/such/python"
NEEDLE = Path(sys.modules["engine_shim"].__path__[0]) / "model" / "needle"


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, status: int) -> str:
    """The last line of what it says."""
    try:
        left = main(argv)
    except SystemExit as leaving:
        left = int(str(leaving.code))
    out, err = capsys.readouterr()
    assert (left, out) == (status, "")
    return str(err.splitlines()[-1])


@pytest.mark.parametrize(
    "argv",
    [
        ("index", "--sequences", "0"),
        ("index", "--sequences", "-1"),
        ("decide", "--ranks", "0"),
        ("decide", "--ranks", "64", "-1"),
        ("decide", "--tokens", "0"),
        ("decide", "--new-tokens", "1"),
        ("decide", "--turns", "1"),
        ("memory", "--idle", "0"),
        ("memory", "--streams", "-1"),
        ("memory", "--unread", "many"),
        ("proxy", "--seconds", "0"),
        ("proxy", "--seconds", "nan"),
        ("proxy", "--runs", "0"),
        ("proxy", "--peer", "no command"),
        ("proxy", "--peer", "x={nobody}"),
        ("proxy", "--peer", "x='open"),
        ("proxy", "--peer", "x={"),
    ],
)
def test_options_that_make_no_sense(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The option is named, with what is allowed."""
    said = refusal(capsys, *argv, status=2)
    assert said.startswith(f"homing bench {argv[0]}: error: argument {argv[1]}: ")


def test_an_interpreter_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is measured."""
    said = refusal(capsys, "index", "--beside", NO_PYTHON, status=1)
    assert said == f"homing bench index: {NO_PYTHON} cannot be run: No such file or directory"


def test_an_interpreter_without_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own last word is told."""
    said = refusal(capsys, "index", "--beside", sys.executable, status=1)
    assert said == (
        f"homing bench index: {sys.executable} cannot measure Dynamo's index (pip install ai-dynamo-runtime): "
        "ModuleNotFoundError: No module named 'dynamo'"
    )


def test_an_interpreter_for_vllm_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ContenderError, match=f"{NO_PYTHON} cannot be run: No such file or directory"):
        Vllm(NO_PYTHON, tmp_path, dtype="float32", context_tokens=8, batch=1, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (None, "no model"),
        (("config.json", "{"), ""),
        (("tokenizer.json", "{}"), ""),
        (("chat_template.jinja", None), "has no chat template"),
    ],
)
def test_a_tokenizer_that_cannot_be_used(
    damage: tuple[str, str | None] | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is not there, is damaged, or has no template."""
    if damage is not None:
        for file in NEEDLE.glob("*.json"):
            shutil.copy(file, tmp_path)
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        settings = tmp_path / "tokenizer_config.json"
        if damage[1] is None and settings.exists():
            settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
        elif damage[1] is not None:
            (tmp_path / damage[0]).write_text(damage[1])
    said = refusal(capsys, "decide", "--tokenizer", str(tmp_path), status=1)
    assert said.startswith("homing bench decide: ")
    assert sentence in said


def test_more_clients_than_files_may_be_open(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (1024, 4096))
    said = refusal(capsys, "memory", "--idle", "5000", status=1)
    assert said == "homing bench memory: 5,000 clients are more than the 4,096 files that may be open (ulimit -Hn)"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("/no/such/router {port}", "/no/such/router cannot be run: No such file or directory"),
        (f"{sys.executable} -c 'raise SystemExit(3)'", "the peer x ended with status 3"),
    ],
)
async def test_a_peer_that_does_not_come_up(command: str, sentence: str) -> None:
    """It is told at once."""
    with pytest.raises(CannotRun, match=sentence):
        async with proxy._peer("x", command, "http://127.0.0.1:1"):
            pytest.fail("it came up")
