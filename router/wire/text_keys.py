"""Text to a chain of 64-bit block keys, for models whose tokens are not known.

Blocks grow with their distance from the start: a quarter of an octave, from 256 bytes to 8 KiB. So a short system
prompt is told from another, and a conversation of a megabyte still is a hundred and fifty keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import xxhash

#: Blocks are no shorter and no longer than this.
FIRST_BLOCK_BYTES: Final = 256
LAST_BLOCK_BYTES: Final = 8192
#: Longer prompts have no more keys: what lies beyond is taken for new.
MAX_BYTES: Final = 64 * 1024 * 1024


def _ends() -> tuple[int, ...]:
    ends = [FIRST_BLOCK_BYTES]
    while ends[-1] < MAX_BYTES:
        octave = 1 << (ends[-1].bit_length() - 1)
        ends.append(ends[-1] + min(LAST_BLOCK_BYTES, max(FIRST_BLOCK_BYTES, octave // 4)))
    return tuple(ends)


#: Where each block ends.
_ENDS: Final = _ends()


def text_keys(text: bytes, *, parent: int) -> list[int]:
    """Keys of the whole blocks of ``text``; each names its block and all that stands before it."""
    digest = xxhash.xxh3_64_intdigest
    keys: list[int] = []
    start = 0
    for end in _ENDS[: bisect_right(_ENDS, len(text))]:
        parent = digest(text[start:end], parent)
        keys.append(parent)
        start = end
    return keys


def text_bytes(blocks: int) -> int:
    """How many bytes the first ``blocks`` blocks hold."""
    return _ENDS[blocks - 1] if blocks else 0


def chat_text(messages: Sequence[Mapping[str, Any]], *, tools: object = None) -> bytes:
    """A conversation as bytes that do not depend on how its JSON was written. A turn only adds to them.

    Raises ``RecursionError`` for values nested as deep as can be decoded, but not encoded.
    """
    pieces: list[bytes] = [msgspec.json.encode(tools)] if tools else []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if len(message) == 2 and type(role) is str and type(content) is str:
            # Most of most prompts: not escaped anew only to be hashed.
            pieces += (role.encode(), content.encode())
        else:
            pieces.append(msgspec.json.encode(message))
    return b"\x00".join(pieces)


def prompt_text(prompt: object) -> bytes:
    """A plain prompt as bytes: a string, strings, or token ids. Raises as ``chat_text``."""
    return prompt.encode() if isinstance(prompt, str) else msgspec.json.encode(prompt)
