"""A door in front of a worker: every request passes through unchanged in meaning, and is written on a tape."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping
from typing import Any

import httpx
import uvicorn

from router.capture.absence import Absence
from router.capture.record import Exchange, Tape
from router.errors import WorkerError
from router.fleet.probes import sentence
from router.fleet.worker_api import WorkerInfo

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_HOP_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding", "keep-alive", "accept-encoding"})
#: Answers that are under way at the end may take so long.
_GRACE_SECONDS = 5


class Door:
    """An ASGI application. ``given_up`` is done, with what to say, once the worker has been away for too long."""

    def __init__(
        self,
        info: WorkerInfo,
        tape: Tape,
        client: httpx.AsyncClient,
        *,
        patience_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self._info = info
        self._tape = tape
        self._client = client
        self._say = say
        self._absence = Absence(info.url, client, patience_seconds=patience_seconds, say=say)
        self.given_up: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()

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
        if scope["method"] == "POST":
            await _unless_gone(self._answer(lambda: self._relay(path, headers, body, send), send), receive)
        else:
            await _unless_gone(self._answer(lambda: self._pass(scope["method"], path, headers, send), send), receive)

    async def _answer(self, attempt: Callable[[], Awaitable[bool]], send: Send) -> None:
        """Try until the worker takes it. What breaks before the answer's head is told; after that it breaks off."""
        while True:
            try:
                is_whole = await attempt()
            except httpx.ConnectError:
                try:
                    await self._absence.until_back()
                except WorkerError as error:
                    if not self.given_up.done():
                        self.given_up.set_result(error)
                    await _refuse(send, str(error))
                    return
            except httpx.HTTPError as error:
                told = sentence(self._info.url, error)
                self._say(told)
                await _refuse(send, told)
                return
            else:
                if not is_whole:
                    self._say(f"{self._info.url} broke an answer off")
                return

    async def _pass(self, method: str, path: str, headers: Mapping[str, str], send: Send) -> bool:
        answer = await self._client.request(method, self._info.url + path, headers=headers)
        await send(_head(answer.status_code, answer.headers))
        await send({"type": "http.response.body", "body": answer.content})
        return True

    async def _relay(self, path: str, headers: Mapping[str, str], body: bytes, send: Send) -> bool:
        """Whether the answer came whole. Raises ``httpx.HTTPError`` if not even its head came."""
        exchange = Exchange(self._tape, self._info, path, headers, body)
        head: list[Message] = []
        has_begun = False
        pieces = exchange.run(self._client, lambda status, headers: head.append(_head(status, headers)))
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    while head:
                        has_begun = True
                        await send(head.pop())
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx.HTTPError:
            if not has_begun:
                raise
            return False
        while head:
            await send(head.pop())
        await send({"type": "http.response.body", "body": b""})
        return True


async def _unless_gone(answering: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Answer, but no further once the client has left."""
    passing = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(_gone(receive))
    await asyncio.wait([passing, leaving], return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not passing.done():
        passing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await passing


async def _refuse(send: Send, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": "upstream_failed"}})
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 502, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


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


def open_door(host: str, port: int) -> socket.socket:
    """The socket that clients will find. Raises ``OSError`` with a sentence for what cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OSError(f"cannot listen on {host}:{port}: {reason}") from error
    return listening


class _Server(uvicorn.Server):
    """Ends with the first signal, and goes on to what is behind ``serve``: the original sends the signal once more."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        caught = (signal.SIGINT, signal.SIGTERM)
        for each in caught:
            loop.add_signal_handler(each, self.handle_exit, each, None)
        try:
            yield
        finally:
            for each in caught:
                loop.remove_signal_handler(each)


async def serve(door: Door, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. Raises ``WorkerError`` if the worker has been away for too long."""
    config = uvicorn.Config(
        door,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = _Server(config)

    def end(_: object) -> None:
        server.should_exit = True

    door.given_up.add_done_callback(end)
    await server.serve(sockets=[listening])
    if door.given_up.done():
        raise door.given_up.result()
