"""Heads that have been read before, found again by their bytes.

From one message to the next the head of a client, or of a worker, mostly differs in nothing but the body's length.
Whether a head is valid, and what it means, does not depend on that number's digits; so what the parser and the rules
made of one head holds for every other that has the same bytes around the digits.

Only messages with a Content-Length are known, and only in its two usual spellings; any other goes to the parser.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

Head = TypeVar("Head")

#: So many are kept, the earliest forgotten first.
MAX_HEADS: Final = 1024
_SPELLINGS: Final = (b"content-length: ", b"Content-Length: ")
#: Bodies are shorter than this many digits can say.
_MAX_DIGITS: Final = 12


class KnownHeads(Generic[Head]):
    """What has been made of heads. It keeps their bytes, as each connection keeps those of its last message."""

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def whole(self, data: bytes) -> tuple[Head, bytes] | None:
        """Head and body, if ``data`` is one message, whole and alone, whose head is known."""
        parts = _parts(data)
        if parts is None:
            return None
        key, end, length = parts
        head = self._heads.get(key)
        return (head, data[end:]) if head is not None and len(data) == end + length else None

    def learn(self, data: bytes, head: Head) -> None:
        """``data`` began with this head, which has one Content-Length and was found valid."""
        parts = _parts(data)
        if parts is None:
            return
        if len(self._heads) >= MAX_HEADS:
            del self._heads[next(iter(self._heads))]
        self._heads[parts[0]] = head


def _parts(data: bytes) -> tuple[bytes, int, int] | None:
    """A head without the digits of its length, where its body starts, and the length."""
    end = data.find(b"\r\n\r\n") + 4
    for spelling in _SPELLINGS:
        start = data.find(spelling, 0, end) + len(spelling)
        if start >= len(spelling):
            stop = data.find(b"\r", start, end)
            digits = data[start:stop]
            # In the middle of a line it is another header, or some header's value.
            is_line = data.startswith(b"\r\n", start - len(spelling) - 2)
            if is_line and digits.isdigit() and len(digits) <= _MAX_DIGITS:
                return data[:start] + data[stop:end], end, int(digits)
            return None
    return None
