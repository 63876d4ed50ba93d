"""What a client's connection, what is behind it, and who answers its requests are to each other."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from typing import TYPE_CHECKING, Final, Protocol

from router.errors import Dialect, RequestError
from router.settings import ServerSettings
from router.wire.http1 import HttpRequest, RequestHead, RequestReader
from router.wire.known_heads import KnownHeads

if TYPE_CHECKING:
    from router.proxy.server import ClientConnection

#: Linux's numbers for a connection whose peer has reset it, or has said that nothing more comes.
_CLOSED_STATES: Final = frozenset({7, 8})


class Serving(Protocol):
    """A request that is being answered."""

    def pause(self) -> None:
        """The client does not keep up: stall what its answer comes from."""

    def resume(self) -> None:
        """The client has caught up."""

    def cancel(self) -> None:
        """Give up and call ``finished``: the client has gone, or must go and may still be told so."""


class Door(Protocol):
    """What a connection needs of the data plane behind it."""

    @property
    def settings(self) -> ServerSettings: ...

    @property
    def known_heads(self) -> KnownHeads[RequestHead]: ...

    def serve(self, request: HttpRequest, client: ClientConnection) -> None:
        """Answer one request through ``client``, then call its ``finished``. What takes time is attached to it."""

    def screen(self, head: RequestHead) -> RequestError | None:
        """Why a request is not worth the reading of its body, if it is not."""

    def refused(self, error: RequestError, reader: RequestReader) -> tuple[Dialect, bytes]:
        """The request being read is answered with ``error`` before it reaches ``serve``.

        Returns in whose shape, and header lines for the answer.
        """

    def entered(self, client: ClientConnection) -> None:
        """A client has connected. ``turn_away`` it here if it may not stay."""

    def left(self, client: ClientConnection, *, midway: bool) -> None:
        """The connection is gone; ``midway``: the client left before its answer had ended."""


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the peer has closed a connection that is not being read, as far as the system tells."""
    connection = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_INFO", None)
    if connection is None or option is None:
        return False
    try:
        state: bytes = connection.getsockopt(socket.IPPROTO_TCP, option, 1)
    except OSError:  # no TCP
        return False
    return state[0] in _CLOSED_STATES


def has_unread(transport: asyncio.Transport) -> bool:
    """Whether the peer has sent something that has not been read, as far as the system tells."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return False
    try:
        waiting = fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4))
    except OSError:  # no longer a connection
        return False
    return struct.unpack("i", waiting) != (0,)
