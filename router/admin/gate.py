"""The admin plane's lock: where keys are configured, nothing but ``/health`` is reached without one."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.core.keys import Keyring, Role
from router.errors import RequestError, Unauthorized, to_answer
from router.wire.headers import presented_keys

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


def error_response(error: BaseException) -> Response:
    """Any error as the answer a client gets. A header may come more than once."""
    answer = to_answer(error)
    response = Response(answer.body, status_code=answer.status)
    for name, value in answer.headers:
        response.headers.append(name, value)
    return response
