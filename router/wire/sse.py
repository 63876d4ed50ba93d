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

    __slots__ = ("held", "midway")

    def __init__(self) -> None:
        #: What has come of an event, but for what has been passed on of one too long.
        self.held = b""
        #: Bytes of an event longer than ``MAX_HELD_BYTES`` have been passed on, but not its end.
        self.midway = False

    def feed(self, data: bytes) -> bytes:
        """The whole events now complete; what follows them is held until its end comes."""
        if not self.held and data.endswith(b"\n\n"):
            self.midway = False
            return data
        data = self.held + data
        end = _last_boundary(data)
        if end:
            self.midway = False
        elif len(data) > MAX_HELD_BYTES:
            self.midway = True
            end = len(data.rstrip(b"\r\n"))  # which may be half a blank line
        self.held = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """The rest of a stream that ended without a blank line."""
        held, self.held = self.held, b""
        return held


def events(data: bytes) -> list[bytes]:
    """The events in ``data``, without the blank lines between them."""
    stripped = (event.strip(b"\r\n") for event in _BLANK_LINE.split(data))
    return [event for event in stripped if event]


def after_blank_line(data: bytes) -> bytes:
    """What follows the first blank line; nothing if there is none."""
    found = _BLANK_LINE.search(data)
    return data[found.end() :] if found is not None else b""


def is_comment(event: bytes) -> bool:
    """It has nothing but comment lines, and clients never see it."""
    return event.startswith(b":") and all(line.startswith(b":") for line in event.splitlines())


def event_data(event: bytes) -> bytes:
    """The payload of an event: its ``data`` lines, joined by LF."""
    return b"\n".join(_values(event, b"data:"))


def event_name(event: bytes) -> str:
    """What its last ``event`` line says; empty if there is none."""
    return (_values(event, b"event:") or [b""])[-1].decode(errors="replace")


def _values(event: bytes, field: bytes) -> list[bytes]:
    values = (line[len(field) :] for line in event.splitlines() if line.startswith(field))
    return [value[1:] if value.startswith(b" ") else value for value in values]


def _last_boundary(data: bytes) -> int:
    """The offset just after the last blank line, 0 if there is none."""
    start = max(data.rfind(b"\n\n"), data.rfind(b"\n\r"), data.rfind(b"\r\r"))
    if start < 0:
        return 0
    end = start + 2
    return end + 1 if data[end - 1 : end + 1] == b"\r\n" else end
