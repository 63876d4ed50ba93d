"""Ports that stay one's own while nobody listens on them."""

from __future__ import annotations

import socket


def reserve(port: int = 0) -> socket.socket:
    """A port of the loopback address, by default a free one, that the system gives to nobody until this is closed.

    Whoever connects to it is refused. Who listens on it by name may, meanwhile and again.
    """
    place = socket.socket()
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", port))
    except OSError:
        place.close()
        raise
    return place
