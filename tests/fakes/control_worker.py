"""A worker's control endpoints over real HTTP, and nothing else: answers by path, changeable while it runs."""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from typing import Any

from tests.fakes.ports import reserve

#: status and body by path; None: take the request and say nothing.
Answers = dict[str, tuple[int, bytes] | None]


def as_json(value: Any, status: int = 200) -> tuple[int, bytes]:
    """An answer."""
    return status, json.dumps(value).encode()


#: Of the loop: who connects is accepted, then has a transport, then its protocol's word, then is served.
_ACCEPTING_TURNS = 4

MODELS = as_json({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]})


class ControlWorker:
    """Listens on a port of its own; paths without an answer are 404. ``asked`` records what was asked."""

    def __init__(self, answers: Answers) -> None:
        self.answers: Answers = {"/health": (200, b""), "/v1/models": MODELS, **answers}
        #: What is answered in another way to those who asked for another host.
        self.by_host: dict[str, Answers] = {}
        self.asked: list[str] = []
        #: What it asks for under /v1, as vLLM and SGLang do with ``--api-key``.
        self.key: str | None = None
        #: Kept from the first time that it listens on: nobody else takes it while it is down.
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> ControlWorker:
        if not self.port:
            place = reserve()
            weakref.finalize(self, place.close)
            self.port = place.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Stop listening and cut what is open; entering again listens on the same port."""
        if self._server is not None:
            # What is accepted as asyncio's server closes stays open for ever: nobody may come in before that.
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening)
            for _ in range(_ACCEPTING_TURNS):
                await asyncio.sleep(0)
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
            await self._server.wait_closed()
            await asyncio.sleep(0)  # lost in the next turn
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            self.asked.append(f"{method} {path}")
            host = re.search(r"\r\nhost: *([^:\r]*)", head, re.IGNORECASE)
            answers = self.answers | self.by_host.get(host[1] if host else "", {})
            length = re.search(r"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)
            answer = answers.get(path, (404, b""))
            if path.startswith("/v1/") and self.key and f"\r\nauthorization: bearer {self.key}\r\n" not in head.lower():
                answer = (401, b'{"error":"Unauthorized"}')
            if answer is None:
                await reader.read()
            else:
                status, body = answer
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                )
                writer.write(body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
