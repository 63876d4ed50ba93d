"""Logs: their forms, their level, and that no credential gets into them."""

from __future__ import annotations

import io
import json

import pytest
import structlog

from router.telemetry.logging import REDACTED, make_logger


def logged(**fields: object) -> dict[str, object]:
    out = io.StringIO()
    make_logger(level="info", form="json", stream=out).info("event", **fields)
    line: dict[str, object] = json.loads(out.getvalue())
    return line


def test_json_is_one_object_a_line() -> None:
    """Event, level, time and the fields, machine-readable."""
    line = logged(worker="a", tokens=5)
    assert (line["event"], line["level"], line["worker"], line["tokens"]) == ("event", "info", "a", 5)
    assert str(line["timestamp"]).endswith("Z")


def test_console_is_for_people_and_plain_into_a_file() -> None:
    """No colour codes where no terminal is."""
    out = io.StringIO()
    make_logger(level="info", form="console", stream=out).info("worker ready", worker="a")
    assert "worker ready" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_below_the_level_nothing_is_written() -> None:
    """A warning logger says nothing at info."""
    out = io.StringIO()
    log = make_logger(level="warning", form="json", stream=out)
    log.info("quiet")
    log.warning("loud")
    assert out.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    "name", ["authorization", "Authorization", "x-api-key", "api_key", "Cookie", "hf_access_token"]
)
def test_credentials_are_blanked_by_name(name: str) -> None:
    """As a field, in a mapping of headers, as a pair in a list of headers."""
    line = logged(**{name: "hush"}, headers={name: "hush"}, pairs=[(name, "hush")], raw={"nested": {name: "hush"}})
    assert "hush" not in json.dumps(line)
    assert line[name] == REDACTED


def test_bearer_tokens_inside_text_are_blanked() -> None:
    """Also where somebody put a whole header line into a message."""
    assert "sk-123456789" not in json.dumps(logged(reason="got Authorization: Bearer sk-123456789 from client"))


def test_token_counts_are_no_credentials() -> None:
    """Names of this trade that look like secrets are left alone."""
    assert logged(prompt_tokens=7, cached_tokens=3)["prompt_tokens"] == 7


def test_request_ids_come_from_the_context() -> None:
    """What is bound to the running request is in each of its lines, and not in others."""
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        assert logged()["request_id"] == "r-1"
    assert "request_id" not in logged()
