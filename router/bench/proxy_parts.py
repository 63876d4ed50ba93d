"""The other processes of the proxy bench: a worker that does nothing but answer, and a relay that does nothing else.

The relay is the floor for a proxy in this language on this machine: one parser and one connection on each side, no
decision, no retry, no metric, no limit.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Final, cast

import httptools
import uvloop

#: Events of a streamed answer, and the pause before each.
EVENTS: Final = 100
_EVENT_SECONDS: Final = 0.005
#: Of a request whose answer is one event and then silence, and of one whose answer comes as fast as it is taken.
HOLDS: Final = b'"user":"holds"'
FLOODS: Final = b'"user":"floods"'
_FLOOD_BYTES: Final = 64 * 1024
_ANSWER: Final = (
    b'{"id":"x","object":"chat.completion","model":"bench","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11}}'
)
_MODELS: Final = b'{"object":"list","data":[{"id":"bench","object":"model"}]}'
_EVENT: Final = (
    b'data: {"id":"x","object":"chat.completion.chunk","model":"bench","choices":[{"index":0,"delta":'
    b'{"content":" tok"},"finish_reason":null}]}\n\n'
)


class _Connection(asyncio.Protocol):
    """What both have in common: a transport and whole requests."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._head: list[bytes] = []
        self._body: list[bytes] = []
        self._url = b""
        self.transport: asyncio.Transport | None = None
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._parser = httptools.HttpRequestParser(self)  # an offer to upgrade is declined
        except httptools.HttpParserError:
            if self.transport is not None:
                self.transport.close()  # HTTP/2, which a peer may try first

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False

    def on_message_begin(self) -> None:
        self._head, self._body = [], []

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += (name, b": ", value, b"\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.requested(b"".join(self._body))

    def requested(self, body: bytes) -> None:
        """A whole request has come."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Send, if there is somebody to send to."""
        if self.transport is not None:
            self.transport.write(data)


class Worker(_Connection):
    """Answers at once, or streams."""

    _floods = False

    def requested(self, body: bytes) -> None:
        if not body:
            known = self._url in (b"/v1/models", b"/health")
            self.write(_whole(b"200 OK" if known else b"404 Not Found", _MODELS if known else b"{}"))
        elif b'"stream":true' in body:
            self.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            if HOLDS in body:
                self.write(_chunk(_EVENT))
            elif FLOODS in body:
                self._floods = True
                self._flood()
            else:
                self._tick(EVENTS)
        else:
            self.write(_whole(b"200 OK", _ANSWER))

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._floods:
            self._flood()

    def _flood(self) -> None:
        events = _chunk(_EVENT) * (_FLOOD_BYTES // len(_EVENT))
        while self.transport is not None and not self._is_full:
            self.write(events)

    def _tick(self, left: int) -> None:
        if not left:
            self.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        self.write(_chunk(_EVENT))
        asyncio.get_running_loop().call_later(_EVENT_SECONDS, self._tick, left - 1)


class Relay(_Connection):
    """Sends each request on over a connection of its own and the answer back as it comes."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._upstream: asyncio.Transport | None = None

    def requested(self, body: bytes) -> None:
        message = b"POST %b HTTP/1.1\r\n%b\r\n%b" % (self._url, b"".join(self._head), body)
        if self._upstream is not None:
            self._upstream.write(message)
        else:
            loop = asyncio.get_running_loop()
            connecting = loop.create_task(loop.create_connection(lambda: _Back(self), "127.0.0.1", self._port))
            connecting.add_done_callback(lambda task: self._connected(task.result()[0], message))

    def _connected(self, upstream: asyncio.Transport, message: bytes) -> None:
        self._upstream = upstream
        upstream.write(message)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._upstream is not None:
            self._upstream.close()


class _Back(asyncio.Protocol):
    """A relay's connection to the worker. It parses what it passes, as a proxy must to know an answer's end."""

    def __init__(self, relay: Relay) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._relay = relay

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        self._relay.write(data)


def _whole(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(make: Callable[[], asyncio.Protocol]) -> None:
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, backlog=4096)
    print(f"part ready port={server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main(argv: list[str]) -> None:
    """``worker``, or ``relay PORT``."""
    make: Callable[[], asyncio.Protocol] = Worker if argv[0] == "worker" else lambda: Relay(int(argv[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(make))


if __name__ == "__main__":
    main(sys.argv[1:])
