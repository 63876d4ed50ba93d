"""JSON answers, and what clients are told of each kind of error. The only place where an exception becomes a status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from engine_shim.api import ApiError
from engine_shim.engine import EngineStopped


def json_reply(body: Mapping[str, object], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    content = msgspec.json.encode(body)
    return Response(content, status_code=status, headers=headers, media_type="application/json")


async def _tell_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    # A body that is not read to its end leaves the connection unusable.
    headers = {"connection": "close"} if error.status == 413 else None
    return json_reply(error.body(), status=error.status, headers=headers)


async def _tell_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    message = f"{error.detail}: {request.method} {request.url.path}"
    told = ApiError(message, status=error.status_code, code=code)
    return json_reply(told.body(), status=told.status, headers=error.headers)


async def _tell_stopped(_: Request, error: Exception) -> Response:
    return json_reply(ApiError(str(error), status=503, code="engine_unavailable").body(), status=503)


async def _tell_bug(_: Request, __: Exception) -> Response:
    told = ApiError("The shim failed on this request; its log has the cause.", status=500, code="internal_error")
    return json_reply(told.body(), status=500)


HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _tell_api_error,
    EngineStopped: _tell_stopped,
    HTTPException: _tell_http_error,
    Exception: _tell_bug,
}
