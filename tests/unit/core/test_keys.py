"""API keys: who is admitted where, and as whom."""

from __future__ import annotations

import hashlib

import pytest

from router.core.keys import Key, Keyring, Role, digest_of
from router.errors import Forbidden, RequestError, Unauthorized
from router.wire.headers import presented_keys

BOTH = frozenset(Role)


def ring() -> Keyring:
    return Keyring(
        [
            Key("a", digest_of(b"key-of-a")),
            Key("a", digest_of(b"other-key-of-a")),
            Key("ops", digest_of(b"key-of-ops"), frozenset({Role.ADMIN})),
            Key("all", digest_of(b"key-of-all"), BOTH),
        ],
        secret=b"s",
    )


@pytest.mark.parametrize(
    ("presented", "role", "expected"),
    [
        ([b"key-of-a"], Role.DATA, "a"),
        ([b"other-key-of-a"], Role.DATA, "a"),
        ([b"wrong", b"key-of-a"], Role.DATA, "a"),
        ([b"key-of-ops", b"key-of-a"], Role.DATA, "a"),
        ([b"key-of-ops"], Role.ADMIN, "ops"),
        ([b"key-of-all"], Role.DATA, "all"),
        ([b"key-of-all"], Role.ADMIN, "all"),
        ([b"key-of-a"], Role.ADMIN, Forbidden),
        ([b"key-of-ops"], Role.DATA, Forbidden),
        ([], Role.DATA, Unauthorized),
        ([b""], Role.DATA, Unauthorized),
        ([b"key-of-"], Role.DATA, Unauthorized),
        ([b"key-of-a "], Role.DATA, Unauthorized),
        ([b"Key-of-a"], Role.DATA, Unauthorized),
        ([digest_of(b"key-of-a")], Role.DATA, Unauthorized),
        ([digest_of(b"key-of-a").hex().encode()], Role.DATA, Unauthorized),
    ],
)
def test_who_is_admitted(presented: list[bytes], role: Role, expected: str | type[RequestError]) -> None:
    """Any known key that opens the plane admits its tenant; a known one that does not is told apart from an unknown."""
    if isinstance(expected, str):
        assert ring().admit(presented, role).tenant == expected
    else:
        with pytest.raises(expected):
            ring().admit(presented, role)


def test_a_missing_key_has_a_code_of_its_own() -> None:
    """Whoever forgot the key learns that, not that it was wrong."""
    with pytest.raises(Unauthorized) as missing:
        ring().admit([], Role.DATA)
    with pytest.raises(Unauthorized) as wrong:
        ring().admit([b"x"], Role.DATA)
    assert (missing.value.code, wrong.value.code) == ("missing_api_key", "invalid_api_key")


def test_replacing_takes_effect_at_once() -> None:
    """A key that was taken out opens nothing more."""
    keyring = ring()
    keyring.replace([Key("new", digest_of(b"new-key"))])
    assert keyring.admit([b"new-key"], Role.DATA).tenant == "new"
    with pytest.raises(Unauthorized):
        keyring.admit([b"key-of-a"], Role.DATA)


def test_no_key_is_kept() -> None:
    """Neither a key nor its plain hash can be found in what the ring holds."""
    keyring = ring()
    assert "key-of-a" not in repr((keyring._secret, keyring._keys))
    digest = hashlib.sha256(b"key-of-a").digest()
    assert all(digest != name for name in keyring._keys)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(b"authorization", b"Bearer abc")], [b"abc"]),
        ([(b"authorization", b"bearer  abc ")], [b"abc"]),
        ([(b"authorization", b"Basic " + b"dXNlcjphYmM6ZGVm")], [b"abc:def"]),  # user:abc:def
        ([(b"authorization", b"Basic ***")], []),
        ([(b"authorization", b"abc")], []),
        ([(b"authorization", b"Digest abc")], []),
        ([(b"x-api-key", b"abc")], [b"abc"]),
        ([(b"api-key", b"abc"), (b"authorization", b"Bearer d")], [b"abc", b"d"]),
        ([(b"cookie", b"abc"), (b"x-custom", b"abc")], []),
    ],
)
def test_where_keys_are_looked_for(headers: list[tuple[bytes, bytes]], expected: list[bytes]) -> None:
    """Where the clients of OpenAI, Anthropic and Azure put them, and where a browser puts a password."""
    assert list(presented_keys(headers)) == expected
