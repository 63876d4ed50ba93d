"""A small HTTP/1.1 client for many concurrent streams: asyncio protocols on httptools, connections kept alive.

httpx spends several milliseconds of CPU on each stream once dozens are open, which a load tester on the machine of
its subject cannot spare; this one spends some tens of microseconds on each piece.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

from loadtest.answer import Answer, AnswerReader, Outcome

CHAT_PATH: Final = "/v1/chat/completions"
MODELS_PATH: Final = "/v1/models"


class AddressError(Exception):
    """The address cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds. ``silence`` is the longest wait for the next byte, so also for the first token."""

    connect_seconds: float = 10.0
    silence_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where requests go: scheme, host, port and the path before ``/v1``."""

    host: str
    port: int
    prefix: str
    is_tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Accepts the address of a server with or without a trailing ``/v1``. Raises ``AddressError``."""
        try:
            parts: SplitResult = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise AddressError(f"{url!r} is not an address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AddressError(f"{url!r} is not an address; give it as http://HOST:PORT")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), prefix, is_tls)

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Reader(Protocol):
    """Whoever takes an answer as it comes."""

    status: int | None
    headers: dict[str, str]

    def feed(self, data: bytes, now: float) -> None:
        """Body bytes that arrived at ``now``."""


@dataclass(slots=True)
class _WholeBody:
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def feed(self, data: bytes, now: float) -> None:
        del now
        self.body += data


Broken = tuple[Outcome, str]


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reader: Reader | None = None
        self.is_closed = False
        self.is_reusable = False
        self.heard_at = 0.0
        self.has_answered = False
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[Broken | None] | None = None

    def ask(self, request: bytes, reader: Reader) -> asyncio.Future[Broken | None]:
        """Write a request. The future holds None at the answer's end, or how it was cut short."""
        assert self.transport is not None
        self.reader, self.has_answered, self.is_reusable = reader, False, False
        self.heard_at = time.perf_counter()
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    def close(self) -> None:
        self.is_closed = True
        if self.transport is not None:
            self.transport.abort()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.perf_counter()
        self.has_answered = True
        if self._parser is None or self._done is None or self._done.done():
            self.close()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end((Outcome.PROTOCOL, f"not HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._end((Outcome.RESET, str(error) if error else "the server closed the connection"))

    # httptools calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.reader is not None:
            self.reader.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.reader is not None and self._parser is not None:
            self.reader.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.reader is not None:
            self.reader.feed(body, self.heard_at)

    def on_message_complete(self) -> None:
        self.is_reusable = self._parser is not None and self._parser.should_keep_alive()
        self._end(None)

    def _end(self, broken: Broken | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(broken)


class ChatClient:
    """Streaming chat completions against one address. Use as an async context; closing it cuts what is open."""

    def __init__(self, address: Address, *, timeouts: Timeouts, api_key: str | None = None) -> None:
        self._address = address
        self._timeouts = timeouts
        self._tls = ssl.create_default_context() if address.is_tls else None
        self._authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._all:
            connection.close()

    async def chat(self, body: bytes, *, headers: Mapping[str, str]) -> Answer:
        """Send one request and read its stream to the end. Trouble is an outcome, not an exception."""
        reader = AnswerReader(started=time.perf_counter())
        broken = await self._exchange(self._request("POST", CHAT_PATH, headers=headers, body=body), reader)
        return reader.finish(time.perf_counter(), broken=broken)

    async def models(self) -> list[str]:
        """Names of the models that the address serves. Raises ``AddressError``."""
        reader = _WholeBody()
        broken = await self._exchange(self._request("GET", MODELS_PATH, headers={}, body=b""), reader)
        where = f"{self._address.authority}{self._address.prefix}"
        if broken is not None:
            raise AddressError(f"{where} does not answer ({broken[1]}); is the server running?")
        try:
            return [model.id for model in _MODELS.decode(reader.body).data]
        except msgspec.MsgspecError as error:
            remedy = (
                "give a key that it takes with --api-key"
                if reader.status in (401, 403)
                else "is this an OpenAI-compatible server? Name the model with --model to do without the list"
            )
            raise AddressError(
                f"{where}{MODELS_PATH} answered HTTP {reader.status} without a list of models; {remedy}"
            ) from error

    def _request(self, method: str, path: str, *, headers: Mapping[str, str], body: bytes) -> bytes:
        fields = {
            "Host": self._address.authority,
            "User-Agent": "homing-replay",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._authorization,
            **headers,
        }
        lines = [f"{method} {self._address.prefix}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    async def _exchange(self, request: bytes, reader: Reader) -> Broken | None:
        """One request on a kept or new connection; None, or how it was cut short.

        A kept connection that the server closed before it answered anything is replaced, unseen by the caller.
        """
        while True:
            is_kept = bool(self._idle)
            try:
                connection = self._idle.pop() if is_kept else await self._connect()
            except TimeoutError:
                return Outcome.CONNECT, "the connection took too long to open"
            except OSError as error:
                return Outcome.CONNECT, error.strerror or str(error)
            if connection.is_closed:
                self._all.discard(connection)
                continue
            broken = await self._ask(connection, request, reader)
            if connection.is_reusable and not connection.is_closed:
                self._idle.append(connection)
            else:
                connection.close()
                self._all.discard(connection)
            was_stale = is_kept and not connection.has_answered
            if broken is None or broken[0] is not Outcome.RESET or not was_stale:
                return broken

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeouts.connect_seconds):
            _, connection = await loop.create_connection(
                _Connection, self._address.host, self._address.port, ssl=self._tls
            )
        self._all.add(connection)
        return connection

    async def _ask(self, connection: _Connection, request: bytes, reader: Reader) -> Broken | None:
        silence_seconds = self._timeouts.silence_seconds
        done = connection.ask(request, reader)
        try:
            while not done.done():
                left_seconds = connection.heard_at + silence_seconds - time.perf_counter()
                if left_seconds <= 0:
                    connection.close()
                    return Outcome.TIMEOUT, f"nothing heard for {silence_seconds:g} s"
                await asyncio.wait([done], timeout=left_seconds)
            return done.result()
        except asyncio.CancelledError:
            connection.close()  # a server must see that nobody listens any more
            self._all.discard(connection)
            raise


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_MODELS = msgspec.json.Decoder(_Models)
