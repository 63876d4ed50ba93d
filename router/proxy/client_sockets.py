"""What the system tells of clients' sockets beneath their transports."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
from typing import Final

#: Linux's numbers for a connection whose peer has reset it, or has said that nothing more comes.
_CLOSED_STATES: Final = frozenset({7, 8})


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


def accept_all(listening: int) -> list[socket.socket]:
    """Whoever waits to be let in at the listening socket of this number, as far as there is room."""
    accepted = []
    with socket.socket(fileno=os.dup(listening)) as door, contextlib.suppress(OSError):
        door.setblocking(False)
        while True:
            connection, _ = door.accept()
            connection.setblocking(False)
            accepted.append(connection)
    return accepted
