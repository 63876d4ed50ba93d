"""An OpenAI-compatible server in a few lines: streams words, caches prefixes without end, fails on order.

A prompt costs one token a word and ``MESSAGE_TOKENS`` a message. Pages of ``PAGE_TOKENS`` are shared with every
prompt before, never evicted, and the last token is always computed: what an ideal engine would report.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

MESSAGE_TOKENS = 4
PAGE_TOKENS = 16


class Fault(Enum):
    """What may go wrong with one request."""

    REFUSE_429 = auto()
    REFUSE_400 = auto()
    REFUSE_500 = auto()
    RESET_BEFORE = auto()
    RESET_MIDWAY = auto()
    ERROR_FRAME = auto()
    BAD_CHUNK = auto()
    SILENCE = auto()
    CLOSE_AFTER = auto()  # answer in full, then close without having announced it


@dataclass(slots=True)
class FakeServer:
    """``fault`` is asked with the number of each request, from 0. ``bodies`` and ``headers`` are what came."""

    fault: Callable[[int], Fault | None] = lambda _: None
    first_token_seconds: float = 0.0
    token_seconds: float = 0.0
    rank_of: Callable[[int], tuple[str, int] | None] = lambda _: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    connections: int = 0
    disconnects: int = 0
    pages: set[tuple[str, ...]] = field(default_factory=set)
    _arrival: asyncio.Condition = field(default_factory=asyncio.Condition)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def received(self, requests: int) -> None:
        """Wait until so many requests have come."""
        async with self._arrival:
            await self._arrival.wait_for(lambda: len(self.bodies) >= requests)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if head[0].startswith("GET /v1/models "):
            _respond(writer, 200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
            return True
        number = len(self.bodies)
        request = json.loads(body)
        self.bodies.append(request)
        self.headers.append(headers)
        async with self._arrival:
            self._arrival.notify_all()
        fault = self.fault(number)
        refusals = {Fault.REFUSE_429: 429, Fault.REFUSE_400: 400, Fault.REFUSE_500: 500}
        if fault in refusals:
            _respond(writer, refusals[fault], {"error": {"message": f"refused {number}"}})
            return True
        if fault is Fault.RESET_BEFORE:
            writer.transport.abort()
            return False
        if fault is Fault.SILENCE:
            await reader.read()
            self.disconnects += 1
            return False
        await self._stream(writer, request, fault, self.rank_of(number))
        return fault is not Fault.CLOSE_AFTER

    async def _stream(
        self,
        writer: asyncio.StreamWriter,
        request: dict[str, Any],
        fault: Fault | None,
        rank: tuple[str, int] | None,
    ) -> None:
        prompt_tokens, cached_tokens = self._match(request["messages"])
        placed = (
            f"x-homing-worker: {rank[0]}\r\nx-homing-rank: {rank[1]}\r\nx-homing-reason: home\r\n"
            f"x-homing-expected-cached-tokens: {cached_tokens}\r\n"
            if rank
            else ""
        )
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            + placed.encode()
            + b"\r\n"
        )
        await asyncio.sleep(self.first_token_seconds)
        tokens = request["max_tokens"]
        _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for token in range(tokens):
            if token:
                await asyncio.sleep(self.token_seconds)
            _event(writer, {"choices": [{"index": 0, "delta": {"content": f" live{token}"}}]})
            await writer.drain()
            if fault is Fault.RESET_MIDWAY:
                await asyncio.sleep(0.01)
                writer.transport.abort()
                raise ConnectionResetError
        if fault is Fault.ERROR_FRAME:
            _event(writer, {"error": {"message": "the engine broke", "type": "server_error", "code": None}})
        elif fault is Fault.BAD_CHUNK:
            _chunk(writer, b"data: {not json\n\n")
        else:
            usage = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": tokens,
                "prompt_tokens_details": {"cached_tokens": cached_tokens},
            }
            _event(writer, {"choices": [], "usage": usage})
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _match(self, messages: list[dict[str, str]]) -> tuple[int, int]:
        """Prompt tokens and how many of them an infinite page cache holds; the prompt is then cached."""
        tokens: list[str] = []
        for message in messages:
            tokens += [f"<{message['role']}>"] * MESSAGE_TOKENS + message["content"].split()
        # A page is named by its words and the page before, so that a set of pages is a set of prefixes.
        cached_pages, parent, is_shared = 0, "", True
        for start in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
            page = (parent, *tokens[start : start + PAGE_TOKENS])
            is_shared = is_shared and page in self.pages and start + PAGE_TOKENS < len(tokens)
            cached_pages += is_shared
            self.pages.add(page)
            parent = str(hash(page))
        return len(tokens), cached_pages * PAGE_TOKENS


def _respond(writer: asyncio.StreamWriter, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


def _event(writer: asyncio.StreamWriter, content: object) -> None:
    _chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
