"""A client's connection until TLS is agreed on: it counts from its first byte, and is given up in time."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import cast

from router.proxy import eager
from router.proxy.server import ClientConnection

#: How long a client may take to say goodbye; many never do.
_GOODBYE_SECONDS = 2.0


class TlsDoor(asyncio.Protocol):
    """Shakes hands, then makes way for a ``ClientConnection``.

    ``admit`` may refuse an address, before anything is spent on it; what it admits is handed to ``release``, once.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        make_client: Callable[[], ClientConnection],
        *,
        admit: Callable[[str], bool],
        release: Callable[[str], None],
        seconds: float,
    ) -> None:
        self._context = context
        self._make_client = make_client
        self._admit = admit
        self._release = release
        self._seconds = seconds
        self._early = b""
        self._is_lost = False
        self._task: object = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._task is not None:
            return  # of the encrypted transport, from loops that say so
        plain = cast("asyncio.Transport", transport)
        peer = plain.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        if not self._admit(address):
            plain.abort()
            return
        # At once: what the client says first must be read by the encrypted transport.
        self._task = eager.start(self._agree(plain, address), asyncio.get_running_loop())

    async def _agree(self, plain: asyncio.Transport, address: str) -> None:
        encrypted: asyncio.Transport | None = None
        try:
            with contextlib.suppress(OSError, ssl.SSLError):
                encrypted = await asyncio.get_running_loop().start_tls(
                    plain,
                    self,
                    self._context,
                    server_side=True,
                    ssl_handshake_timeout=self._seconds,
                    ssl_shutdown_timeout=_GOODBYE_SECONDS,
                )
        finally:
            self._release(address)
            if encrypted is None:
                plain.abort()
        if encrypted is None or self._is_lost:
            return
        client = self._make_client()
        encrypted.set_protocol(cast("asyncio.BaseProtocol", client))
        client.connection_made(encrypted)
        if self._early and not encrypted.is_closing():
            client.data_received(self._early)

    # --- of the encrypted transport, before the client's connection takes over ---------------------

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
