"""The command line: flags, help and refusals."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from router import cli
from router.errors import ConfigError
from router.knobs import knobs
from router.options import main, parse
from router.settings import ModelSpec, Policy, WorkerSpec

RECORDING = Path(__file__).parents[2] / "data" / "kv_events" / "own-sglang-qwen3-full-pool.jsonl.gz"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("HOMING_"):
            monkeypatch.delenv(name)


def test_short_flags_set_what_is_set_most_often(tmp_path: Path) -> None:
    """The flags of the help's examples land where they belong."""
    settings = parse(
        [
            *("--worker", "http://a:1", "--worker", '{"url": "http://b:2", "id": "second"}'),
            *("--model-tokenizer", f"m={tmp_path}", "--policy", "round_robin", "--port", "9000"),
            *("--admin-port", "9001", "--host", "0.0.0.0", "--seed", "7", "--log-level", "debug"),
        ]
    )
    assert [worker.name for worker in settings.workers] == ["a:1", "second"]
    assert [(model.name, model.tokenizer) for model in settings.models] == [("m", tmp_path)]
    assert settings.routing.policy is Policy.ROUND_ROBIN
    assert (settings.server.host, settings.server.port, settings.admin.port) == ("0.0.0.0", 9000, 9001)
    assert (settings.routing.seed, settings.log_level) == (7, "debug")


def test_every_setting_has_a_flag() -> None:
    """Each leaf of the tree takes its own default back from its long flag; what has none is known by its flag."""
    for knob in knobs():
        default, flag = knob.field.default, "--" + knob.key.replace("_", "-")
        if default is None:
            with pytest.raises(ConfigError, match=f"argument .*{flag}: expected one argument"):
                parse([flag])
        elif not isinstance(default, tuple):
            assert parse([flag, str(default)]) == parse([])
    assert parse(["--routing.session-headers", "x-a, x-b"]).routing.session_headers == ("x-a", "x-b")


def test_version_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """As every command does."""
    assert cli.main(["version", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: homing version")


def test_the_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag, and each key of a worker and a model, has a sentence of its own."""
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for knob in knobs():
        assert knob.field.description, knob.key
        assert knob.key in ("workers", "models") or " ".join(knob.field.description.split()) in shown
    for model in (WorkerSpec, ModelSpec):
        for name, field in model.model_fields.items():
            assert f"{name} {field.description}" in shown


def test_the_flag_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's own environment is read, below the flags."""
    monkeypatch.setenv("HOMING__SERVER__PORT", "4")
    assert parse([]).server.port == 4
    assert parse(["--port", "3"]).server.port == 3


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--prot", "1"], ["unknown option --prot", "--port"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--model-tokenizer", "x"], ["'x'", "NAME=PATH"]),
        (["--worker", "{"], ["'{'", "not JSON"]),
        (["--policy", "best"], ["routing.policy", "the command line", "'best'", "affinity"]),
    ],
)
def test_a_mistake_is_refused_in_one_line(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and one plain sentence, no usage block, no traceback."""
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    for part in parts:
        assert part in shown.err


def test_the_router_help_names_every_flag_and_exits_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    """Help lists each setting's flag; the defaults it tells are the real ones."""
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for knob in knobs():
        assert "--" + knob.key.replace("_", "-") in text
    assert "(default: 67108864)" in text


def test_the_top_help_teaches_and_is_quick() -> None:
    """``homing --help`` imports none of the parts: it names them all and is there at once."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "router.cli", "--help"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    for word in ("router", "shim", "replay", "version", "vllm serve", "sglang.launch_server", "--runner sim"):
        assert word in done.stdout
    assert done.stderr == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5  # 0.05 s of a processor's time
    code = "import sys, router.cli; sys.exit(any(name in sys.modules for name in ('pydantic', 'asyncio', 'httpx')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_helps_examples_are_accepted() -> None:
    """A router line that the help shows is one that parses."""
    lines = [line.strip().rstrip("&") for line in cli.HELP.splitlines() if line.strip().startswith("homing router --w")]
    assert len(lines) == 3
    for line in lines:
        assert parse(line.split()[2:]).workers


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and the commands there are."""
    assert cli.main(["rooter"]) == 2
    assert "'rooter'" in capsys.readouterr().err


def test_a_part_whose_library_is_missing_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router installed without the engine's extra tells the remedy in one sentence."""
    monkeypatch.setitem(sys.modules, "engine_shim.cli", None)
    assert cli.main(["shim"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "pip install 'homing[engine]'" in message


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["check-events", str(RECORDING)]])
def test_who_reads_may_leave(arguments: list[str]) -> None:
    """As ``| head`` does: no traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "router.cli", *arguments]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)

    assert (ended.returncode, ended.stderr) == (141, b"")


def test_nobody_need_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that was started without an output Python has none."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["version"]) == 0


@pytest.mark.parametrize("command", ["router", "shim", "replay", "simulate", "bench", "check-events", "record-events"])
def test_ctrl_c_at_any_time_ends_with_its_status(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """130 and no traceback, also while libraries are loaded or figures computed."""

    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert cli.main([command]) == 130


def test_version_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts: name and version."""
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("homing ")


def test_a_missing_tokenizer_folder_refuses_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    """The file that cannot be read is named, before a port is bound."""
    assert main(["--model-tokenizer", "m=/nowhere/m", "--port", "0", "--admin-port", "0"]) == 2
    assert "/nowhere" in capsys.readouterr().err


def test_parse_raises_for_the_caller_to_tell() -> None:
    """The parser itself neither prints nor exits on mistakes."""
    with pytest.raises(ConfigError):
        parse(["--nope"])
