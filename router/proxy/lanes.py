"""Threads for prompts that take longer than the event loop may be held.

There are two lanes, so that short prompts never wait behind long ones. Within a lane whoever came first goes first; who
has much to do comes in slices, a call each, and takes turns with the others. Given up while it waits, a call is never
made; one that has begun cannot be ended, but its slice can.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

#: More threads than these do not pay: what is Python's own in a prompt takes the interpreter's lock.
_MOST_SHORT: Final = 8
_MOST_LONG: Final = 4


class Lanes:
    """Both lanes. Threads begin with the first call, and end with the router or its last reference."""

    def __init__(self, *, cores: int | None = None) -> None:
        cores = cores or os.cpu_count() or 1
        self._short = ThreadPoolExecutor(max(2, min(_MOST_SHORT, cores)), thread_name_prefix="short-prompts")
        self._long = ThreadPoolExecutor(max(1, min(_MOST_LONG, cores // 2)), thread_name_prefix="long-prompts")

    async def run(self, work: Callable[[], T], *, is_long: bool) -> T:
        """What ``work`` returns or raises, on a thread of the lane."""
        return await asyncio.get_running_loop().run_in_executor(self._long if is_long else self._short, work)
