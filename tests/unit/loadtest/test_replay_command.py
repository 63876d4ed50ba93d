"""``homing replay``'s command line refuses bad values with the option's name and the remedy."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from loadtest.cli import build_parser, main, settings_of
from loadtest.client import Address, AddressError
from loadtest.identity import ClientProfile, identify


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--lanes", "0"], "argument --lanes: '0' is not a whole number of at least 1"),
        (["--sessions", "many"], "argument --sessions: 'many' is not a whole number"),
        (["--scale-tokens", "1/0"], "argument --scale-tokens: '1/0' is not a ratio from 0 to 1; give it as 1/32"),
        (["--scale-tokens", "0"], "argument --scale-tokens: 0 would leave no text to send"),
        (["--scale-time", "2"], "argument --scale-time: '2' is not a ratio from 0 to 1"),
        (["--duration", "soon"], "argument --duration: 'soon' is not a number of seconds above 0"),
        (["--error-budget", "nan"], "argument --error-budget: 'nan' is not a ratio"),
        (["--client", "curl"], "'curl' is none of aiperf, claude-code, codex, opencode, none"),
        (["--trace", "x", "--generate"], "not allowed with argument --trace"),
        (
            ["--json", "/nowhere/a.json"],
            "argument --json: '/nowhere/a.json' cannot be written; name a file in a folder",
        ),
        (["--records", "/"], "argument --records: '/' cannot be written"),
        (["--speed", "9"], "unrecognized arguments: --speed"),
    ],
)
def test_bad_values_are_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and a sentence that says what would do."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--url", "localhost:8000"], "give it as http://HOST:PORT"),
        (["--url", "http://h:port"], "is not an address"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl: No such file"),
        (["--compare", "/nowhere.json"], "/nowhere.json: No such file"),
    ],
)
def test_what_cannot_be_used_is_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, before anything is sent."""
    assert main(arguments) == 1
    assert complaint in capsys.readouterr().err


def test_settings_in_the_report_have_their_types() -> None:
    """Switches are booleans, numbers and ratios numbers, the rest text; the key and what was not given are left out."""
    options = build_parser().parse_args(
        ["--api-key", "secret", "--lanes", "3", "--scale-time", "1/4", "--warm-start", "--trace", "a.jsonl"]
    )
    told = settings_of(options)
    expected = {
        "lanes": 3,
        "scale_time": 0.25,
        "scale_tokens": 0.03125,
        "warm_start": True,
        "no_subagents": False,
        "gap_cap": 300.0,
        "client": "aiperf",
        "trace": "a.jsonl",
    }
    assert {name: (type(told[name]), told[name]) for name in expected} == {
        name: (type(value), value) for name, value in expected.items()
    }
    assert "secret" not in told.values()
    assert not {"duration", "turns", "model"} & told.keys()


def test_a_file_that_is_no_report_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--compare reads what --json wrote and nothing else."""
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert main(["--compare", str(path)]) == 1
    assert "is not a report written by --json" in capsys.readouterr().err


def test_ratios_are_exact() -> None:
    """1/48 is a forty-eighth, not a float near it."""
    options = build_parser().parse_args(["--scale-tokens", "1/48", "--scale-time", "0"])
    assert options.scale_tokens == Fraction(1, 48)
    assert options.scale_time == 0


def test_addresses_with_and_without_version() -> None:
    """A trailing /v1 is the API's, a path before it a gateway's; ports follow from the scheme."""
    assert Address.parse("http://h:81/v1/") == Address("h", 81, "", is_tls=False)
    assert Address.parse("https://h/team/v1") == Address("h", 443, "/team", is_tls=True)
    assert Address.parse("http://[::1]:9").authority == "[::1]:9"
    with pytest.raises(AddressError):
        Address.parse("ftp://h")


def test_identities_are_stable_and_tell_agents_apart() -> None:
    """The same names give the same ids in every run; a subagent has its own and names its parent's."""
    main_id = identify(ClientProfile.AIPERF, session="s").headers["X-Correlation-ID"]
    child = identify(ClientProfile.AIPERF, session="s", agent="a").headers
    assert main_id == identify(ClientProfile.AIPERF, session="s").headers["X-Correlation-ID"]
    assert child["X-Correlation-ID"] != main_id
    assert child["X-Dynamo-Parent-Session-ID"] == main_id
    claude = identify(ClientProfile.CLAUDE_CODE, session="s", agent="b", parent="a").headers
    assert claude["X-Claude-Code-Session-Id"] == main_id
    assert claude["x-claude-code-parent-agent-id"] == child["X-Correlation-ID"]
