"""The file of API keys: what it may hold, and that complaints name the place but never the key."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from router.core.fair_queue import Priority
from router.core.keys import Role
from router.errors import ConfigError
from router.key_file import read_keys

SECRET = "sk-very-secret-0123"


def test_keys_and_hashes_are_read(tmp_path: Path) -> None:
    """Plain keys and SHA-256 sums, one role or both, several keys of a tenant."""
    file = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"sk-of-team-b-hashed").hexdigest()
    file.write_text(
        f"keys:\n- {{tenant: team-a, key: {SECRET}}}\n- {{tenant: team-a, key: {SECRET}x, roles: [data, admin]}}\n"
        f"- {{tenant: team-b, sha256: {digest.upper()}, priority: low}}\n"
    )
    first, second, third = read_keys(file)
    assert (first.tenant, first.roles) == ("team-a", {Role.DATA})
    assert first.digest == hashlib.sha256(SECRET.encode()).digest()
    assert (second.tenant, second.roles) == ("team-a", {Role.DATA, Role.ADMIN})
    assert (third.tenant, third.digest.hex()) == ("team-b", digest)
    assert (first.priority, third.priority) == (None, Priority.LOW)


def test_json_is_read_too(tmp_path: Path) -> None:
    """The same structure as JSON."""
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"tenant": "t", "key": SECRET}]}))
    assert [key.tenant for key in read_keys(file)] == ["t"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "keys.yaml: a mapping of names and values is needed"),
        ("keys: []", "keys"),
        ("keys: [{tenant: a}]", "keys.0: give either key or sha256"),
        (f"keys: [{{tenant: a, key: {SECRET}, sha256: {'a' * 64}}}]", "give either key or sha256"),
        ("keys: [{tenant: a, key: short}]", "keys.0.key"),
        (f"keys: [{{tenant: a, key: '{SECRET} with space'}}]", "keys.0.key"),
        (f"keys: [{{tenant: 'a b', key: {SECRET}}}]", "keys.0.tenant"),
        (f"keys: [{{tenant: a, key: {SECRET}, roles: [root]}}]", "keys.0.roles"),
        (f"keys: [{{tenant: a, key: {SECRET}, roles: []}}]", "keys.0.roles"),
        (f"keys: [{{tenant: a, key: {SECRET}, priority: urgent}}]", "keys.0.priority"),
        (f"keys: [{{tenant: a, key: {SECRET}, role: data}}]", "keys.0.role"),
        (f"keys: [{{tenant: a, key: {SECRET}}}, {{tenant: b, key: {SECRET}}}]", "twice"),
        (f"keys: [{{tenant: a, key: {SECRET}", "neither YAML nor JSON"),
    ],
)
def test_what_is_wrong_is_told_without_the_key(text: str, told: str, tmp_path: Path) -> None:
    """The complaint fits on one line, names file and entry, and holds nothing secret."""
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(file)
    message = str(caught.value)
    assert str(file) in message
    assert told in message
    assert "\n" not in message
    assert "secret" not in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A path that leads nowhere refuses to start."""
    with pytest.raises(ConfigError, match=r"cannot read the key file .*gone"):
        read_keys(tmp_path / "gone")
