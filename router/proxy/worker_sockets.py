"""Sockets to workers, as the kernel looks after them."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

#: A host that loses its power says nothing. So the kernel asks after a peer that is silent for 30 s, three times, and
#: takes it for gone when none of that is answered. What it does not take (``TCP_USER_TIMEOUT``) has no limit, which
#: would end a peer that is there, but busy.
_OPTIONS: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


def ask_after(connected: socket.socket) -> None:
    """Let the kernel notice a peer that is gone without a word."""
    with contextlib.suppress(OSError):  # it has gone already
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
            if hasattr(socket, name):  # no system but Linux has all of them
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
