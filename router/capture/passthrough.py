"""A door in front of a worker: every request passes through unchanged in meaning, and is written on a tape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import httpx
import uvicorn

from router.capture.record import Exchange, Tape
from router.fleet.worker_api import WorkerInfo

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_HOP_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding", "keep-alive", "accept-encoding"})


class Door:
    """An ASGI application."""

    def __init__(self, info: WorkerInfo, tape: Tape, client: httpx.AsyncClient) -> None:
        self._info = info
        self._tape = tape
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        query = scope["query_string"].decode()
        path = scope["path"] + (f"?{query}" if query else "")
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name.decode("latin-1").lower() not in _HOP_HEADERS
        }
        body = await _body(receive)
        if scope["method"] != "POST":
            answer = await self._client.request(scope["method"], self._info.url + path, headers=headers)
            await send(_head(answer.status_code, answer.headers))
            await send({"type": "http.response.body", "body": answer.content})
            return
        exchange = Exchange(self._tape, self._info, path, headers, body)
        await self._relay(exchange, receive, send)

    async def _relay(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        head: list[Message] = []
        pieces = exchange.run(self._client, lambda status, headers: head.append(_head(status, headers)))

        async def pass_on() -> None:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    while head:
                        await send(head.pop())
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            while head:
                await send(head.pop())
            await send({"type": "http.response.body", "body": b""})

        passing = asyncio.ensure_future(pass_on())
        leaving = asyncio.ensure_future(_gone(receive))
        await asyncio.wait([passing, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not passing.done():
            passing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await passing


async def _body(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(status: int, headers: httpx.Headers) -> Message:
    kept = [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in headers.items()
        if name.lower() not in _HOP_HEADERS
    ]
    return {"type": "http.response.start", "status": status, "headers": kept}


async def serve(info: WorkerInfo, tape: Tape, client: httpx.AsyncClient, *, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM. Raises ``OSError`` for a port that is taken."""
    config = uvicorn.Config(
        Door(info, tape, client), host=host, port=port, log_config=None, access_log=False, lifespan="off", ws="none"
    )
    await uvicorn.Server(config).serve()
