"""What an answer says of its tokens: their ids, where the client asked for them, and its first words.

Never compiled: msgspec reads the annotations.
"""

from __future__ import annotations

from typing import Final

import msgspec

from router.wire import sse

#: An id takes 32 bits, or it is none.
_LARGEST_ID: Final = (1 << 32) - 1


class _Message(msgspec.Struct):
    content: str | None = None


class _Words(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None


class _Choices(msgspec.Struct):
    choices: list[_Words] = []


class _Ids(msgspec.Struct):
    token_ids: list[int] | None = None
    index: int = 0


class _ChoicesIds(msgspec.Struct):
    choices: list[_Ids] = []


_DECODE_WORDS: Final = msgspec.json.Decoder(_Choices).decode
_DECODE_IDS: Final = msgspec.json.Decoder(_ChoicesIds).decode


def token_ids(document: bytes) -> list[int]:
    """Ids of the first choice's tokens in an answer, or in one chunk of it; empty where none are told."""
    try:
        choices = _DECODE_IDS(document).choices
    except (msgspec.DecodeError, RecursionError):
        return []
    told = next((choice.token_ids for choice in choices if choice.index == 0), None) or []
    return told if all(0 <= number <= _LARGEST_ID for number in told) else []


def first_words(document: bytes) -> str:
    """The text of an answer's first choice, or of one chunk of it; empty where there is none."""
    try:
        choices = _DECODE_WORDS(document).choices
    except (msgspec.DecodeError, RecursionError):
        return ""
    if not choices:
        return ""
    said = choices[0].delta or choices[0].message
    return (said.content if said is not None else choices[0].text) or ""


def first_words_of_stream(beginning: bytes) -> str:
    """The same of a stream's first events, of which the last may be cut off."""
    return "".join(first_words(sse.event_data(event)) for event in sse.events(beginning))
