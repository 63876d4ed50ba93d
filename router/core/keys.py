"""API keys: who calls, on which planes, and for which tenant. No key is kept, only its SHA-256.

A presented key is hashed, and that hash hashed again under a secret of this process before it is looked up. What a
look-up's duration could tell about a stored entry is then nothing that a caller can steer or use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from router.core.fair_queue import Priority
from router.errors import Forbidden, Unauthorized


class Role(StrEnum):
    """What a key opens."""

    DATA = "data"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Key:
    """One key as configured. ``digest`` is the SHA-256 of its UTF-8 text.

    ``priority`` is what its requests have by themselves and at most; None: what they ask for.
    """

    tenant: str
    digest: bytes
    roles: frozenset[Role] = frozenset({Role.DATA})
    priority: Priority | None = None


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


class Keyring:
    """The keys in force. ``replace`` swaps them whole; requests already admitted are not asked again."""

    def __init__(self, keys: Sequence[Key], *, secret: bytes) -> None:
        """``secret``: random, at most 64 bytes, of this process alone."""
        self._secret = secret
        self._keys: dict[bytes, Key] = {}
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, keys: Sequence[Key]) -> None:
        """These keys and no others, from now on."""
        self._keys = {self._name(key.digest): key for key in keys}

    def admit(self, presented: Iterable[bytes], role: Role) -> Key:
        """The first known key that opens ``role``. Raises ``Unauthorized`` or ``Forbidden``."""
        given = known = False
        for text in presented:
            given = True
            key = self._keys.get(self._name(digest_of(text)))
            if key is not None:
                known = True
                if role in key.roles:
                    return key
        if known:
            raise Forbidden(f"This API key does not open the {role} plane.")
        if given:
            raise Unauthorized("The API key is not valid.")
        raise Unauthorized("An API key is required.", code="missing_api_key")

    def _name(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()
