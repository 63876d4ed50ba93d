"""The hit rate that one infinite cache, shared by all ranks, would have on the same requests.

Each request, at the moment it is sent, is compared with all that was sent before: its ideal ratio is the length of
the longest beginning that it has in common with any of them, over its own length. Lengths are those of the text
as a chat template would lay it out (role, content, role, content ...), in pieces of ``PIECE_BYTES``.

The measured rate is ``sum(cached_tokens) / sum(prompt_tokens)`` of the engine's usage. The ideal is made comparable by
weighting each ratio with the same ``prompt_tokens``. What remains between the two, on an engine that never evicts:

- an engine shares whole pages: up to a page less for each request, half a page on average (and it always computes
  the last token); the ideal rounds down by a piece, some six tokens;
- a request that is sent while the one it shares with is still in prefill finds nothing yet; the ideal counts it;
- a template's own tokens count in the engine's numbers, and hit or miss as the words around them do.

So the ideal is a ceiling up to a few tokens a request, and no policy is blamed for what nobody could have reused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash

from loadtest.text import Message

PIECE_BYTES: Final = 32


def layout(messages: Iterable[Message]) -> bytes:
    """Messages as one text in which a longer common beginning means more to reuse."""
    return "".join(f"\x02{message.role}\n{message.content}\x03" for message in messages).encode()


class IdealCache:
    """All beginnings of all prompts seen, as a set of chained hashes of their pieces."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def share(self, messages: Iterable[Message]) -> float:
        """The part of the prompt, 0 to 1, that an earlier one began with. The prompt is then seen."""
        text = layout(messages)
        key = 0
        shared_bytes = 0
        for start in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
            key = xxhash.xxh3_64_intdigest(text[start : start + PIECE_BYTES], seed=key)
            if key in self._seen:  # and so are the keys before it, which it is chained to
                shared_bytes = start + PIECE_BYTES
            else:
                self._seen.add(key)
        return shared_bytes / len(text) if text else 0.0


class RequestDigest:
    """A digest of the multiset of request bodies: equal for two runs that sent the same, in any order."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, body: bytes) -> None:
        self._sum = (self._sum + xxhash.xxh3_128_intdigest(body)) % (1 << 128)

    @property
    def hex(self) -> str:
        return f"{self._sum:032x}"
