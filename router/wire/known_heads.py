"""Heads that have been read before, found again by their bytes.

From one message to the next the head of a client, or of a worker, mostly differs in nothing but the body's length.
Whether a head is valid, and what it means, does not depend on that number's digits; so what the parser and the rules
made of one head holds for every other that has the same bytes around the digits.

Only messages with a Content-Length are known, and only in its two usual spellings; any other goes to the parser.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

Head = TypeVar("Head")

#: So many are kept, the earliest forgotten first, and none that is longer: strangers choose how long theirs are.
MAX_HEADS: Final = 1024
MAX_HEAD_BYTES: Final = 4096
#: How the line before the digits begins; any other is another header's, or some header's value.
_SPELLINGS: Final = frozenset({b"\r\ncontent-l", b"\r\nContent-L"})
_REST: Final = b"ength: "


class KnownHeads(Generic[Head]):
    """What has been made of heads. It keeps their bytes, as each connection keeps those of its last message."""

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def whole(self, data: bytes) -> tuple[Head, bytes] | None:
        """Head and body, if ``data`` is one message, whole and alone, whose head is known."""
        end = data.find(b"\r\n\r\n")
        key = _key(data, end)
        if key is None:
            return None
        head = self._heads.get(key)
        return None if head is None else (head, data[end + 4 :])

    def learn(self, data: bytes, head: Head) -> None:
        """``data`` was one message, whole and alone. Its head, which was found valid, has one Content-Length."""
        key = _key(data, data.find(b"\r\n\r\n"))
        if key is None:
            return
        if len(self._heads) >= MAX_HEADS:
            del self._heads[next(iter(self._heads))]
        self._heads[key] = head


def _key(data: bytes, end: int) -> bytes | None:
    """The head, up to ``end``, without its length's digits, if all that follows has this length.

    What stands for the digits cannot stand in a head, so no two heads have one key.
    """
    if not 0 <= end <= MAX_HEAD_BYTES:
        return None
    before, _, rest = data[:end].partition(_REST)
    digits, _, after = rest.partition(b"\r\n")
    if before[-11:] not in _SPELLINGS or digits != b"%d" % (len(data) - end - 4):
        return None
    return b"%b\r\n\r\n%b" % (before, after)
