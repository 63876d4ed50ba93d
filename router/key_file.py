"""The file of API keys, YAML or JSON:

    keys:
      - tenant: team-a
        key: sk-1f0c...              # or, so that the file holds no secret:
      - tenant: team-b
        sha256: 9b74c9897bac770f...  # printf %s KEY | sha256sum
      - tenant: operators
        key: sk-77aa...
        roles: [admin, data]         # default: [data]
      - tenant: nightly
        key: sk-03be...
        priority: low                # high, normal or low: what its requests have, and at most

A tenant may have several keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from router.core.fair_queue import Priority
from router.core.keys import Key, Role, digest_of
from router.errors import ConfigError
from router.plain_words import what_is_allowed

#: Whoever may try forever must not succeed.
MIN_KEY_CHARS = 16


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    key: Annotated[str, Field(min_length=MIN_KEY_CHARS, pattern=r"^[!-~]*$")] | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None
    roles: Annotated[frozenset[Role], Field(min_length=1)] = frozenset({Role.DATA})
    priority: Literal["high", "normal", "low"] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> _Entry:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        return self

    def as_key(self) -> Key:
        digest = digest_of(self.key.encode()) if self.key is not None else bytes.fromhex(self.sha256 or "")
        priority = None if self.priority is None else Priority[self.priority.upper()]
        return Key(self.tenant, digest, self.roles, priority)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: Annotated[tuple[_Entry, ...], Field(min_length=1)]


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys in a file. Raises ``ConfigError``, whose message never holds a key."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"the key file {path} is neither YAML nor JSON") from None
    try:
        keys = tuple(entry.as_key() for entry in _File.model_validate(data).keys)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ": ".join(filter(None, (f"the key file {path}", ".".join(map(str, first["loc"])))))
        raise ConfigError(f"{where}: {what_is_allowed(first)}") from None
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(f"the key file {path}: a key stands there twice")
    return keys
