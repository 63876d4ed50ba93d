"""Tokens to text while they come: incremental detokenisation and stop strings. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"
#: A UTF-8 character has at most four bytes, so at most three replacement marks stand for one begun.
_MAX_UNFINISHED = 3


class Detokenizer:
    """The text of a growing token list, told in pieces whose sum is the decoding of the whole.

    What is kept, in tokens::

        0 ........ settled ........ len(window)
        told, decoded again as context  | may still change: it can end inside a character

    The context is there since decoders treat the first token of a text differently (a leading space goes).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._settled = 0
        self._told_chars = 0  # of the window's text

    def push(self, ids: Sequence[int]) -> str:
        """Take new tokens and return the text that is certain now."""
        self._window.extend(ids)
        text = self._decode()
        certain = len(text) - _unfinished_chars(text)
        piece = text[self._told_chars : certain]
        if certain < len(text):
            self._told_chars = max(certain, self._told_chars)
        elif piece:
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._told_chars = len(self._decode())
        else:  # tokens without text (special ones) are no context for others
            del self._window[self._settled :]
        return piece

    def flush(self) -> str:
        """The rest, when no token follows: an unfinished character shows as replacement marks."""
        text = self._decode()
        piece = text[self._told_chars :]
        self._told_chars = len(text)
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=True)


def _unfinished_chars(text: str) -> int:
    count = 0
    while count < min(_MAX_UNFINISHED, len(text)) and text[-1 - count] == _UNFINISHED:
        count += 1
    return count


class StopMatcher:
    """Finds the first stop string in a stream of text pieces, holding back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Return the text that surely precedes any stop string. After a match: nothing more."""
        if not self._stops:
            return piece
        if self.matched is not None:
            return ""
        text = self._held + piece
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, self.matched = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at]
        held = self._begun_chars(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _begun_chars(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What some new tokens became: how many counted, the text they made certain, the stop string they ended on."""

    ids: tuple[int, ...]
    text: str
    stopped: str | None


class TextStream:
    """Detokenizer and stop strings of one answer.

    With stop strings, tokens are looked at one by one: what counts as generated does not depend on how many
    tokens arrive together.
    """

    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str]) -> None:
        self._text = Detokenizer(tokenizer)
        self._stop = StopMatcher(stops)
        self._one_by_one = bool(stops)

    def push(self, ids: Sequence[int]) -> TextPiece:
        """Take the tokens of one or more steps; tokens after a stop string are not counted."""
        if not self._one_by_one:
            return TextPiece(tuple(ids), self._text.push(ids), None)
        pieces: list[str] = []
        for count, token in enumerate(ids, start=1):
            pieces.append(self._stop.push(self._text.push((token,))))
            if self._stop.matched is not None:
                return TextPiece(tuple(ids[:count]), "".join(pieces), self._stop.matched)
        return TextPiece(tuple(ids), "".join(pieces), None)

    def finish(self) -> TextPiece:
        """The end of an answer that no stop string ended; the last characters may still complete one."""
        text = self._stop.push(self._text.flush())
        return TextPiece((), text + self._stop.flush(), self._stop.matched)
