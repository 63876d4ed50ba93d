"""Settings from flags, environment and YAML: who wins, and how each kind of mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.errors import ConfigError
from router.settings import Policy, Settings, knobs, load_settings


def load(
    flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, config: Path | None = None
) -> Settings:
    return load_settings(flags or {}, environ=environ or {}, config=config)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "router.yaml"


def test_flags_win_over_environment_over_file_over_defaults(yaml_file: Path) -> None:
    """Four ports, each named in one layer more than the one before: each shows where it is the highest."""
    yaml_file.write_text("server: {port: 1, max_headers: 11}\nadmin: {port: 2}\nlog_level: debug\n")
    settings = load(
        {"server": {"port": "3"}},
        {"HOMING__SERVER__PORT": "4", "HOMING__SERVER__MAX_HEADERS": "44", "HOMING__LOG_FORMAT": "json"},
        yaml_file,
    )
    assert settings.server.port == 3
    assert settings.server.max_headers == 44
    assert settings.admin.port == 2
    assert (settings.log_level, settings.log_format) == ("debug", "json")
    assert settings.server.max_header_bytes == 64 * 1024


def test_workers_are_urls_or_objects_in_every_layer(yaml_file: Path) -> None:
    """A bare URL is enough; more is written as an object; the variable takes commas or JSON."""
    yaml_file.write_text("workers: ['http://a:1', {url: 'http://b:2/', id: second, dp_size: 2}]\n")
    assert [(worker.name, worker.url, worker.dp_size) for worker in load(config=yaml_file).workers] == [
        ("a:1", "http://a:1", None),
        ("second", "http://b:2", 2),
    ]
    by_commas = load(environ={"HOMING__WORKERS": "http://a:1, http://b:2"})
    by_json = load(environ={"HOMING__WORKERS": '["http://a:1", {"url": "http://b:2"}]'})
    assert [worker.name for worker in by_commas.workers] == ["a:1", "b:2"]
    assert by_json.workers == by_commas.workers


def test_a_list_given_higher_up_replaces_the_one_below(yaml_file: Path) -> None:
    """Lists do not grow together by accident."""
    yaml_file.write_text("workers: ['http://a:1']\n")
    assert [worker.name for worker in load({"workers": ["http://b:2"]}, config=yaml_file).workers] == ["b:2"]


def test_an_empty_file_is_all_defaults(yaml_file: Path) -> None:
    """A file with nothing but comments says nothing."""
    yaml_file.write_text("# nothing yet\n")
    assert load(config=yaml_file) == load()
    assert load().routing.policy is Policy.AFFINITY


@pytest.mark.parametrize("name", ["HOMING_SHIM__PORT", "HOMINGPORT", "PATH"])
def test_variables_of_others_are_left_alone(name: str) -> None:
    """Only the router's own prefix is read."""
    assert load(environ={name: "x"}) == load()


@pytest.mark.parametrize(
    ("flags", "environ", "yaml", "parts"),
    [
        ({"server": {"prt": "1"}}, {}, "", ["unknown setting server.prt", "the command line", "server.port"]),
        ({}, {"HOMING__SERVER__PRT": "1"}, "", ["HOMING__SERVER__PRT", "the environment", "HOMING__SERVER__PORT"]),
        ({}, {"HOMING__SEVER__PORT": "1"}, "", ["HOMING__SEVER__PORT", "the environment"]),
        ({}, {}, "sever: {port: 1}", ["unknown setting sever", "router.yaml", "did you mean server"]),
        ({}, {}, "server: {prt: 1}", ["unknown setting server.prt", "router.yaml", "did you mean server.port"]),
        (
            {},
            {},
            "workers: [{url: 'http://a:1', engin: vllm}]",
            ["workers.0.engin", "router.yaml", "did you mean workers.0.engine"],
        ),
        ({"server": {"port": "x"}}, {}, "", ["server.port", "the command line", "'x'", "valid integer"]),
        ({"server": {"port": "70000"}}, {}, "", ["server.port", "'70000'", "65535"]),
        ({}, {"HOMING__ROUTING__POLICY": "best"}, "", ["routing.policy", "environment", "'best'", "'affinity'"]),
        ({}, {}, "log_level: loud", ["log_level", "router.yaml", "'loud'", "debug, info, warning, error"]),
        ({}, {}, "probes: {failures: 0}", ["probes.failures", "router.yaml", "0", "greater than or equal to 1"]),
        ({}, {}, "server: 5", ["server", "router.yaml", "5"]),
        ({"workers": ["ftp://a"]}, {}, "", ["workers.0.url", "'ftp://a'", "http://host:port"]),
        ({"workers": ["http://user:pw@a:1"]}, {}, "", ["workers.0.url", "credentials"]),
        ({"workers": ["http://a:1", "http://a:1"]}, {}, "", ["workers", "two workers", "a:1"]),
        ({}, {}, "workers: [{id: a}]", ["workers.0.url is missing", "router.yaml"]),
        ({}, {"HOMING__WORKERS": '[{"url":'}, "", ["the environment", "not JSON", "workers"]),
        ({}, {}, "server: [", ["router.yaml", "not YAML", "line 1"]),
        ({}, {}, "- a", ["router.yaml", "mapping"]),
    ],
)
def test_a_mistake_is_told_in_one_line_that_names_it(
    flags: dict[str, Any], environ: dict[str, str], yaml: str, parts: list[str], yaml_file: Path
) -> None:
    """Key, origin, value and what would be allowed: all in one line."""
    yaml_file.write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        load(flags, environ, yaml_file)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_the_origin_is_the_layer_that_won(yaml_file: Path) -> None:
    """A good value in the file does not take the blame for a bad flag above it."""
    yaml_file.write_text("server: {port: 1}\n")
    with pytest.raises(ConfigError, match=r"server\.port in the command line"):
        load({"server": {"port": "x"}}, config=yaml_file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """An option that names a missing file is a mistake, not an empty file."""
    with pytest.raises(ConfigError, match=r"gone\.yaml: No such file"):
        load(config=tmp_path / "gone.yaml")


def test_every_setting_can_be_set_by_variable() -> None:
    """No leaf of the tree is out of reach: each takes its own default back from a string."""
    for knob in knobs():
        default = knob.field.default
        text = "" if isinstance(default, tuple) else str(default)
        name = "HOMING__" + "__".join(knob.path).upper()
        if default is not None:
            assert load(environ={name: text}) == load(), name


def test_what_is_unset_by_default_can_be_set_by_variable() -> None:
    """Files, addresses and the like."""
    values = {
        "SERVER__TLS_CERTIFICATE": "server.pem",
        "SERVER__TLS_KEY": "server.key",
        "ADMIN__TLS_CERTIFICATE": "admin.pem",
        "AUTH__KEYS_FILE": "keys.yaml",
        "TRACING__ENDPOINT": "http://collector:4318/v1/traces",
    }
    settings = load(environ={f"HOMING__{name}": value for name, value in values.items()})
    assert (settings.server.tls_certificate, settings.server.tls_key) == (Path("server.pem"), Path("server.key"))
    assert (settings.admin.tls_certificate, settings.admin.tls_key) == (Path("admin.pem"), None)
    assert settings.auth.keys_file == Path("keys.yaml")
    assert settings.tracing.endpoint == "http://collector:4318/v1/traces"


def test_a_tls_key_alone_is_refused() -> None:
    """Serving plain HTTP where somebody gave a key would be a surprise."""
    with pytest.raises(ConfigError, match=r"server.*tls_key is of no use without tls_certificate"):
        load({"server": {"tls_key": "x"}})
