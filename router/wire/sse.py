"""Server-sent events as bytes: where one event ends and the next begins.

An event ends at a blank line; a line ends with LF, CRLF or CR (WHATWG HTML 9.2.6). Two line ends in a row
always contain one of ``LF LF``, ``LF CR`` or ``CR CR``, so these three find every blank line.
"""

from __future__ import annotations

import re
from typing import Final

#: More than this without a blank line passes uncut, so that no stream makes the router hold it.
MAX_HELD_BYTES: Final = 64 * 1024

_BLANK_LINE: Final = re.compile(rb"\n\n|\n\r\n?|\r\r\n?")


def comment(lines: bytes) -> bytes:
    """Header lines as a comment, which clients read over."""
    return b"".join(b": %b\n" % line for line in lines.splitlines()) + b"\n"


class EventCutter:
    """Passes a stream on in whole events, so that it can be ended cleanly at any moment.

    No byte is changed: all that ``feed`` and ``flush`` return, joined, is what came in.
    """

    __slots__ = ("_held", "midway")

    def __init__(self) -> None:
        self._held = b""
        #: Bytes of an event longer than ``MAX_HELD_BYTES`` have been passed on, but not its end.
        self.midway = False

    def feed(self, data: bytes) -> bytes:
        """The whole events now complete; what follows them is held until its end comes."""
        if not self._held and data.endswith(b"\n\n"):
            self.midway = False
            return data
        data = self._held + data
        end = _last_boundary(data)
        if end == 0 and len(data) > MAX_HELD_BYTES:
            self._held = b""
            self.midway = True
            return data
        if end:
            self.midway = False
        self._held = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """The rest of a stream that ended without a blank line."""
        held, self._held = self._held, b""
        return held


def events(data: bytes) -> list[bytes]:
    """The events in ``data``, without the blank lines between them."""
    stripped = (event.strip(b"\r\n") for event in _BLANK_LINE.split(data))
    return [event for event in stripped if event]


def event_data(event: bytes) -> bytes:
    """The payload of an event: its ``data`` lines, joined by LF."""
    fields = (line[5:] for line in event.splitlines() if line.startswith(b"data:"))
    return b"\n".join(value[1:] if value.startswith(b" ") else value for value in fields)


def _last_boundary(data: bytes) -> int:
    """The offset just after the last blank line, 0 if there is none."""
    start = max(data.rfind(b"\n\n"), data.rfind(b"\n\r"), data.rfind(b"\r\r"))
    if start < 0:
        return 0
    end = start + 2
    return end + 1 if data[end - 1 : end + 1] == b"\r\n" else end
