"""What the operating system tells the process, as events."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


class Signals:
    """Signals as events: the first SIGTERM or SIGINT asks to stop, the second to stop at once; SIGHUP to reload."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.hangup = asyncio.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self._came, signal.SIGINT: self._came, signal.SIGHUP: self.hangup.set}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _came(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()
