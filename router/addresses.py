"""What the name of a host says of it, without asking anybody."""

from __future__ import annotations

import ipaddress


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
