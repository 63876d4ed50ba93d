"""A worker whose every move is written down beforehand: raw bytes, pauses, resets. No HTTP library."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType

from tests.fakes.ports import reserve


class Move(Enum):
    """A step of a script that sends nothing."""

    RESET = auto()  # the connection is torn down with a TCP reset
    CLOSE = auto()  # the connection is closed in order, perhaps too early
    STALL = auto()  # nothing more is said until the other side leaves


#: What a worker does on one request: bytes are sent, numbers are seconds to wait, events are waited for.
Script = Sequence[bytes | float | Move | asyncio.Event]


def answer(status: int, body: bytes, *, headers: Mapping[str, str] | None = None) -> bytes:
    """A whole answer with a length."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"HTTP/1.1 {status} Whatever\r\ncontent-type: application/json\r\n{lines}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream_head() -> bytes:
    """The head of a streamed answer."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk; of no data, the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: object) -> bytes:
    """A server-sent event with JSON data."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


OK_BODY = json.dumps(
    {
        "choices": [{"message": {"role": "assistant", "content": "hello"}}],
        "usage": {
            "prompt_tokens": 40,
            "completion_tokens": 2,
            "total_tokens": 42,
            "prompt_tokens_details": {"cached_tokens": 32},
        },
    }
).encode()
OK: Script = (answer(200, OK_BODY),)


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came: head with its blank line, and body."""

    head: bytes
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of a header, None if it is absent."""
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return None


@dataclass
class FaultWorker:
    """Plays ``scripts`` in order, one a request; the last one again and again."""

    scripts: list[Script] = field(default_factory=lambda: [OK])
    requests: list[Received] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    #: Bytes of scripts that the kernel has taken, of all connections.
    sent_bytes: int = 0
    port: int = 0

    async def __aenter__(self) -> FaultWorker:
        self._tasks: set[asyncio.Task[None]] = set()
        self._place = reserve()  # nobody else is given the port when it has stopped listening
        self.port = self._place.getsockname()[1]
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self._changed = asyncio.Event()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._place.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop_listening(self) -> None:
        """Refuse connections from now on."""
        self._server.close()

    async def until(self, *, open_connections: int) -> None:
        """Wait for so many open connections."""
        while self.open != open_connections:
            self._changed.clear()
            await self._changed.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        self._changed.set()
        try:
            begun: bytes | None = b""
            while begun is not None:
                begun = await self._exchange(reader, writer, begun=begun)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            self._changed.set()
            self._tasks.discard(task)
            writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, begun: bytes
    ) -> bytes | None:
        """Play one script. Returns what has come of the next request, None when the connection is over."""
        head = begun + await reader.readuntil(b"\r\n\r\n")
        length = Received(head, b"").header("content-length")
        body = await reader.readexactly(int(length or 0))
        self.requests.append(Received(head, body))
        script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
        gone = asyncio.ensure_future(reader.read(1))
        try:
            for step in script:
                if isinstance(step, bytes):
                    writer.write(step)
                    await _either(writer.drain(), gone)
                    self.sent_bytes += len(step)
                elif step is Move.RESET:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.transport.abort()
                    return None
                elif step is Move.CLOSE:
                    return None
                elif step is Move.STALL:
                    await gone
                elif isinstance(step, asyncio.Event):
                    await _either(step.wait(), gone)
                else:
                    assert isinstance(step, int | float)
                    await _either(asyncio.sleep(step), gone)
                if gone.done() and not gone.result():
                    return None
            return gone.result() if gone.done() else b""
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)


async def _either(first: object, gone: asyncio.Future[bytes]) -> None:
    """Wait for ``first``, but no longer than the other side stays."""
    task = asyncio.ensure_future(first)  # type: ignore[call-overload]
    await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
