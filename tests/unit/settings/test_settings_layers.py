"""Settings from flags, environment and YAML: who wins, and how each kind of mistake is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.errors import ConfigError
from router.knobs import knobs
from router.settings import Policy, Settings
from router.settings_sources import load_settings


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
    """A file, or a section of it, with nothing but comments says nothing."""
    for text in ("# nothing yet\n", "server:\n  # port: 1\n"):
        yaml_file.write_text(text)
        assert load(config=yaml_file) == load()
    assert load().routing.policy is Policy.AFFINITY


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOMING_SHIM__PORT", "1"),
        ("HOMINGPORT", "1"),
        ("PATH", "/bin"),
        # What Kubernetes gives to pods beside Services named homing and homing-router.
        ("HOMING_PORT", "tcp://10.0.0.1:80"),
        ("HOMING_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("HOMING_SERVICE_HOST", "10.0.0.1"),
        ("HOMING_SERVICE_PORT_HTTP", "80"),
        ("HOMING_ROUTER_PORT", "tcp://10.0.0.1:80"),
        ("HOMING_ROUTER_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("HOMING_ROUTER_SERVICE_HOST", "10.0.0.1"),
    ],
)
def test_variables_of_others_are_left_alone(name: str, value: str) -> None:
    """The shim's, and those that Kubernetes makes of Services' names."""
    assert load(environ={name: value}) == load()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HOMING_ROUTING__POLICY", "HOMING__ROUTING__POLICY"),
        ("HOMING_SERVER_PORT", "HOMING__SERVER__PORT"),
        ("HOMING__LOG__LEVEL", "HOMING__LOG_LEVEL"),
        ("HOMING_SHIM_PORT", "HOMING_SHIM__PORT"),
        ("HOMING_QQ", "HOMING__SERVER__PORT"),
    ],
)
def test_a_variable_with_the_wrong_underscores_refuses_to_start(name: str, meant: str) -> None:
    """What was meant as a setting is not dropped in silence: the right name is told."""
    with pytest.raises(ConfigError, match=rf"^unknown setting {name} in the environment; .*{meant}\b"):
        load(environ={name: "1"})


@pytest.mark.parametrize(
    ("yaml", "parts"),
    [
        ("server: 3", ["server in ", ": 3;", "a mapping"]),
        ("server: {port: abc}", ["server.port in ", "'abc'", "whole number"]),
        ("server: {port: 99999}", ["server.port in ", "99999", "65535"]),
        ("server: {prt: 1}", ["unknown setting server.prt"]),
        ("workers: [ftp://a]", ["workers.0.url in ", "'ftp://a'"]),
    ],
)
def test_a_mistake_in_the_file_is_told_though_a_flag_overrides_it(yaml: str, parts: list[str], yaml_file: Path) -> None:
    """The day on which the flag is left out is no better day to hear of it."""
    yaml_file.write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        load({"server": {"port": "1"}, "workers": ["http://a:1"]}, config=yaml_file)
    for part in [*parts, str(yaml_file)]:
        assert part in str(caught.value)


def test_a_bad_variable_is_told_though_a_flag_overrides_it() -> None:
    """As in the file."""
    with pytest.raises(ConfigError, match=r"server\.port in the environment: 'abc'"):
        load({"server": {"port": "1"}}, {"HOMING__SERVER__PORT": "abc"})


def test_what_a_section_says_together_is_judged_over_all_sources(yaml_file: Path) -> None:
    """The key in the file, its certificate on the command line: together they are right."""
    yaml_file.write_text("server: {tls_key: server.key}\nshared: {publish_seconds: 5}\n")
    settings = load({"server": {"tls_certificate": "server.pem"}, "shared": {"lease_seconds": "20"}}, config=yaml_file)
    assert settings.server.tls_key == Path("server.key")
    assert settings.shared.publish_seconds == 5


@pytest.mark.parametrize(
    "yaml",
    [
        "server: 5",
        "server: {port: x}",
        "server: {max_headers: 1.5}",
        "server: {host: 5}",
        "server: {header_timeout_seconds: x}",
        "probes: {parity: perhaps}",
        "workers: 5",
        "models: [5]",
        "workers: [{url: 'http://a', engine: tgi}]",
        "routing: {policy: best}",
        "routing: {session_headers: 5}",
        "auth: {keys_file: 5}",
    ],
)
def test_refusals_are_in_plain_words(yaml: str, yaml_file: Path) -> None:
    """No name of a class, and none of the checker's own phrases."""
    yaml_file.write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        load(config=yaml_file)
    for jargon in ("instance", "Settings", "Spec", "Input", "input should", "parse", "dictionary", "tuple", "pattern"):
        assert jargon not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "rediss//:hunter2@redis:6379",
        "http://user:hunter2@redis",
        "redis:/:hunter2@redis",
        "redis://:hunter2/x@redis:6379",
        "redis://redis:port?password=hunter2",
        "hunter2",
    ],
)
def test_a_refused_redis_url_is_not_shown(url: str, yaml_file: Path) -> None:
    """Whatever is wrong with it, from wherever it comes, the password stays out of the log."""
    yaml_file.write_text(json.dumps({"shared": {"redis_url": url}}))
    refusals = []
    for ask in (
        lambda: load({"shared": {"redis_url": url}}),
        lambda: load(environ={"HOMING__SHARED__REDIS_URL": url}),
        lambda: load(config=yaml_file),
        lambda: load({"shared": url}),
    ):
        with pytest.raises(ConfigError) as caught:
            ask()
        refusals.append(str(caught.value))
        assert caught.value.__cause__ is None
    assert "hunter2" not in "".join(refusals)
    assert "redis://[user:password@]host:6379/0" in refusals[0]


def test_a_section_that_holds_the_redis_url_is_not_shown() -> None:
    """A complaint about its neighbours does not print it."""
    with pytest.raises(ConfigError, match="lease_seconds must be") as caught:
        load({"shared": {"redis_url": "redis://:hunter2@redis:6379/0", "lease_seconds": "0.1"}})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://user:hunter2@a:1", "http:/user:hunter2@a:1", "user:hunter2@a:1"])
def test_a_workers_refused_url_is_shown_without_its_password(url: str) -> None:
    """The host is left, so that one knows which of them it is."""
    with pytest.raises(ConfigError, match=r"\*\*\*@a:1") as caught:
        load({"workers": [url]})
    assert "hunter2" not in str(caught.value)


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
        ({"server": {"port": "x"}}, {}, "", ["server.port", "the command line", "'x'", "a whole number"]),
        ({"server": {"port": "70000"}}, {}, "", ["server.port", "'70000'", "65535"]),
        ({}, {"HOMING__ROUTING__POLICY": "best"}, "", ["routing.policy", "environment", "'best'", "'affinity'"]),
        ({}, {}, "log_level: loud", ["log_level", "router.yaml", "'loud'", "debug, info, warning, error"]),
        ({}, {}, "probes: {failures: 0}", ["probes.failures", "router.yaml", "0", "greater than or equal to 1"]),
        ({}, {}, "server: 5", ["server", "router.yaml", "5"]),
        ({"workers": ["ftp://a"]}, {}, "", ["workers.0.url", "'ftp://a'", "http://host:port"]),
        ({"workers": ["http://user:pw@a:1"]}, {}, "", ["workers.0.url", "credentials"]),
        ({"workers": ["http://a:1/v1/"]}, {}, "", ["workers.0.url", "'http://a:1/v1/'", "ends before /v1"]),
        ({"workers": ["http://a:port"]}, {}, "", ["workers.0.url", "'http://a:port'", "http://host:port"]),
        ({"workers": ["http://a b:1"]}, {}, "", ["workers.0.url", "'http://a b:1'", "http://host:port"]),
        ({"tracing": {"endpoint": "http://a:port"}}, {}, "", ["tracing.endpoint", "'http://a:port'", "/v1/traces"]),
        ({"workers": ["http://a:1", "http://a:1"]}, {}, "", ["workers", "two workers", "a:1"]),
        (
            {},
            {"HOMING__ROUTING__SESSION_HEADERS": '["X-Smg-Routing-Key", "X-Auth-Token"]'},
            "",
            ["routing.session_headers.1", "'X-Auth-Token'", "credential"],
        ),
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
