"""The API key that workers ask for: vLLM's and SGLang's ``--api-key``. Read at start, and again at a reload."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Final

import httpx

from router.errors import ConfigError
from router.wire import headers as names

_KEY: Final = re.compile(rb"[!-~]+")


class WorkerKey(httpx.Auth):
    """What shows the key to workers: as httpx's ``auth`` in the router's own questions, as a line of requests."""

    def __init__(self, path: Path) -> None:
        """Raises ``ConfigError``, whose message never holds the key."""
        self._path = path
        self._key = _read(path)

    def __repr__(self) -> str:
        return f"WorkerKey({str(self._path)!r})"

    def reload(self) -> None:
        """Read the file again. Raises ``ConfigError``; then the key stays as it was."""
        self._key = _read(self._path)

    def line(self) -> bytes:
        """The header line."""
        return b"%b: Bearer %b\r\n" % (names.AUTHORIZATION, self._key)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers[names.AUTHORIZATION.decode()] = f"Bearer {self._key.decode()}"
        yield request


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the workers' key file {path}: {error.strerror}") from error
    if not _KEY.fullmatch(key):
        raise ConfigError(f"the workers' key file {path} must hold one key, of letters, digits and signs")
    return key
