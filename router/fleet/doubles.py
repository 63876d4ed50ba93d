"""Whether two workers are one server under two spellings of its address.

Our shims tell by the epoch id of their process. Others are the same where host names lead to the same address and the
port and path are the same too, unless they say that they are different processes (several hosts behind one proxy).
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from router.errors import WorkerError
from router.fleet.worker_api import WorkerInfo, describe
from router.settings import WorkerSpec

#: A name service that takes longer tells nothing.
_RESOLVE_SECONDS: Final = 2.0


class Place(NamedTuple):
    """Where a server is, whatever name leads there."""

    address: str
    port: int
    path: str


async def places(url: str) -> frozenset[Place]:
    """All that a URL leads to; nothing where the name is not known."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_RESOLVE_SECONDS):
            found = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return frozenset()
    return frozenset(Place(str(address[0]), port, parts.path) for *_, address in found)


async def is_same_process(client: httpx.AsyncClient, new: WorkerInfo, known: WorkerInfo, spec: WorkerSpec) -> bool:
    """Whether ``new``, at the place of ``known``, is that. It is asked again, by ``spec``: it may have restarted."""
    if None in (new.identity, known.identity) or new.identity == known.identity:
        return True
    try:
        now = await describe(client, spec)
    except WorkerError:
        return False
    return new.identity == now.identity
