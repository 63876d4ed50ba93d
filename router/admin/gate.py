"""The admin plane's locks: where keys are configured, nothing but ``/health`` is reached without one.

Without keys a door that listens on this machine alone answers to this machine's names alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.addresses import is_address
from router.core.keys import Keyring, Role
from router.errors import Forbidden, RequestError, Unauthorized, to_answer
from router.wire.headers import HOST, presented_keys

#: Browsers ask their user for the second; the key is the password, whatever the name.
_CHALLENGES: Final = (
    ("www-authenticate", 'Bearer realm="homing admin"'),
    ("www-authenticate", 'Basic realm="homing admin", charset="UTF-8"'),
)


class KeyGate:
    """Middleware before everything else, unknown paths included."""

    def __init__(self, app: ASGIApp, *, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            try:
                self._keyring.admit(presented_keys(scope["headers"]), Role.ADMIN)
            except RequestError as error:
                if isinstance(error, Unauthorized):
                    error.headers = _CHALLENGES
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HostGate:
    """Middleware against pages whose name is made to lead here (DNS rebinding): to the browser they are at home.

    An IP address as the host is no name; ``names`` are those that are allowed beside ``localhost``.
    """

    def __init__(self, app: ASGIApp, *, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names) | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not all(map(self._is_own, _hosts(scope))):
            refusal = Forbidden(
                "The admin plane is not known by this name; ask by its address, or list the name in admin.names.",
                code="unknown_host",
            )
            await error_response(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or name.endswith(".localhost") or is_address(name)


def _hosts(scope: Scope) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == HOST]


def error_response(error: BaseException) -> Response:
    """Any error as the answer a client gets. A header may come more than once."""
    answer = to_answer(error)
    response = Response(answer.body, status_code=answer.status)
    for name, value in answer.headers:
        response.headers.append(name, value)
    return response
