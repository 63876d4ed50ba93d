"""One question to a worker over HTTP, its answer bounded in time, in size and in depth: anybody may answer there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

#: For an answer as a whole, however it trickles in.
ANSWER_SECONDS: Final = 30.0
#: Of what a worker says of itself: a page of metrics has hundreds of kilobytes.
_MOST_BYTES: Final = 16 << 20
#: A longer number counts nothing that a worker has.
MOST_DIGITS: Final = 12
#: What is nested deeper may be read here and fail where it is written again.
_MOST_DEPTH: Final = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """``is_whole``: the body is not longer than was asked for; else this is its start."""

    status: int
    body: bytes
    is_whole: bool = True

    @property
    def is_ok(self) -> bool:
        return self.status == httpx.codes.OK

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


async def ask(
    client: httpx.AsyncClient,
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: object = None,
    most_bytes: int = _MOST_BYTES,
    seconds: float | None = None,
    timeout_seconds: float | None = None,
) -> Answer:
    """Ask once; ``body`` goes as JSON. ``timeout_seconds`` is for each step of it (default: the client's), ``seconds``
    for all of them (``ANSWER_SECONDS``).

    Raises ``httpx.HTTPError`` alone: ``httpx.TimeoutException`` where it takes too long.
    """
    timeout = httpx.USE_CLIENT_DEFAULT if timeout_seconds is None else timeout_seconds
    try:
        # Not ``wait_for``: up to Python 3.11 that takes an answer for the end of a task cancelled in the same moment.
        async with (
            asyncio.timeout(ANSWER_SECONDS if seconds is None else seconds),
            client.stream(method, url, json=body, headers=headers, timeout=timeout) as response,
        ):
            got, pieces = 0, []
            async for piece in response.aiter_bytes():
                pieces.append(piece)
                got += len(piece)
                if got > most_bytes:
                    break
            return Answer(response.status_code, b"".join(pieces)[:most_bytes], is_whole=got <= most_bytes)
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no answer within {seconds or ANSWER_SECONDS:g} s") from error
    except httpx.InvalidURL as error:
        raise httpx.UnsupportedProtocol(str(error)) from error


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, without what could not be told on: halves of characters become question marks, and
    numbers that JSON has not, null. Raises ``ValueError`` with the end of a sentence.
    """
    try:
        value = json.loads(body, parse_constant=lambda _: None)
        if b"\\ud" in body or b"\\uD" in body:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        is_deep = _is_deep(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("did not answer with JSON") from error
    if is_deep:
        raise ValueError("answered with JSON that is nested without end")
    if not isinstance(value, dict):
        raise ValueError("answered with JSON that is no object")
    return value


def read_number(value: object) -> int | None:
    """A positive integer, however it was written; None for anything else."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= MOST_DIGITS:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**MOST_DIGITS else None


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
