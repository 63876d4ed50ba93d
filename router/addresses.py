"""What an address says of itself, without asking anybody."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_address(host: str) -> bool:
    """Whether it is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether it leads to this machine alone."""
    return ipaddress.ip_address(host).is_loopback if is_address(host) else host == "localhost"


def has_http_address(url: str) -> bool:
    """Whether it begins with a scheme, a host and, where there is one, a port that can be connected to."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # a port that is no number, half an IPv6 address
        return False
    is_written_together = not any(letter.isspace() for letter in url)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_written_together


def is_redis_address(url: str) -> bool:
    """Whether it is one of a Redis server: over TCP, TLS, or a socket file."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # the port is no number: as a rule half a password
        return False
    return bool(parts.scheme in ("redis", "rediss") and parts.hostname) or (parts.scheme == "unix" and bool(parts.path))
