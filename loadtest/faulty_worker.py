"""A worker that answers with what it was asked, and breaks off at random: for soaks of a router."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import weakref
from collections import Counter
from typing import Final, cast

import httptools

MODEL: Final = "soak"
#: Events of a streamed answer, but for the last.
EVENTS: Final = 4
_MODELS: Final = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()


class FaultyWorker:
    """Listens on a port of its own. ``reset_ratio`` of its answers end in a TCP reset, before or in the middle."""

    def __init__(self, *, reset_ratio: float, rng: random.Random) -> None:
        self.reset_ratio = reset_ratio
        #: Between two events of a stream.
        self.event_seconds = 0.002
        self.rng = rng
        self.port = 0
        #: How often each request was answered in full, by what it asked.
        self.answered: Counter[str] = Counter()
        self.resets = 0
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the port of the last time if there was one: nobody else is given it in between."""
        if not self.port:
            place = socket.socket()
            weakref.finalize(self, place.close)
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind(("127.0.0.1", 0))
            self.port = place.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port, backlog=1024)

    async def kill(self) -> None:
        """Stop listening and reset every connection, as the end of a process does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in tuple(self.connections):
            connection.reset()
        await asyncio.sleep(0)


class _Connection(asyncio.Protocol):
    def __init__(self, worker: FaultyWorker) -> None:
        self._worker = worker
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = b""
        self._body = b""
        self._ticking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._worker.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.connections.discard(self)
        self._transport = None
        if self._ticking is not None:
            self._ticking.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def reset(self) -> None:
        """Tear the connection down."""
        if self._transport is not None:
            raw = self._transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    # --- called by the parser -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._path = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._body:
            self._write(_whole(200, _MODELS) if self._path in (b"/v1/models", b"/health") else _whole(404, b"{}"))
            return
        request = json.loads(self._body)
        text: str = request["messages"][-1]["content"]
        worker = self._worker
        breaks_at = worker.rng.randrange(EVENTS + 1) if worker.rng.random() < worker.reset_ratio else None
        if request.get("stream"):
            self._write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            self._stream(text, 0, breaks_at)
        elif breaks_at is not None:
            worker.resets += 1
            self.reset()
        else:
            worker.answered[text] += 1
            message = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": _USAGE}
            self._write(_whole(200, json.dumps(message).encode()))

    # --- answering ----------------------------------------------------------------------------------

    def _stream(self, text: str, number: int, breaks_at: int | None) -> None:
        if self._transport is None:
            return
        if number == breaks_at:
            self._worker.resets += 1
            self.reset()
        elif number == EVENTS:
            self._worker.answered[text] += 1
            self._write(_event({"choices": [], "usage": _USAGE}) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            self._write(_event({"choices": [{"delta": {"content": f"{text}.{number} "}}]}))
            loop = asyncio.get_running_loop()
            self._ticking = loop.call_later(self._worker.event_seconds, self._stream, text, number + 1, breaks_at)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


_USAGE: Final = {
    "prompt_tokens": 16,
    "completion_tokens": EVENTS,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def streamed_text(text: str) -> str:
    """What the pieces of a whole streamed answer add up to."""
    return "".join(f"{text}.{number} " for number in range(EVENTS))


def _whole(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d Whatever\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(value: object) -> bytes:
    return _chunk(b"data: " + json.dumps(value).encode() + b"\n\n")
