"""Tokens to text while they come: incremental detokenisation and stop strings. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine_shim.types import FinishReason

_UNFINISHED = "\ufffd"
#: A UTF-8 character has at most four bytes, so at most three replacement marks stand for one begun ...
_MAX_UNFINISHED = 3
#: ... and this many tokens later the bytes are no text at all: what is certain is told nevertheless.
_PATIENCE_TOKENS = 8


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
        unfinished = _unfinished_chars(text)
        if unfinished:
            # Decoders of byte tokens spoil a whole run of them until its last character is complete.
            if len(self._window) - self._settled < _PATIENCE_TOKENS:
                return ""
            piece = text[self._told_chars : len(text) - unfinished]
            self._told_chars += len(piece)
            return piece
        piece = text[self._told_chars :]
        if piece:
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._told_chars = len(self._decode())
        else:  # special tokens have no text and are no context for others
            pending = self._window[self._settled :]
            self._window[self._settled :] = [token for token in pending if not self._is_special(token)]
        return piece

    def flush(self) -> str:
        """The rest, when no token follows: an unfinished character shows as replacement marks."""
        text = self._decode()
        piece = text[self._told_chars :]
        self._told_chars = len(text)
        return piece

    def _is_special(self, token: int) -> bool:
        plain = self._tokenizer.decode([token], skip_special_tokens=True)
        return not plain and bool(self._tokenizer.decode([token], skip_special_tokens=False))

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
    """What new tokens became. ``ids`` are those that count; ``stop_reason`` is the stop string or token that ended."""

    ids: tuple[int, ...]
    text: str
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


class TextStream:
    """The text of one answer, up to its end by a stop string or by the engine.

    With stop strings, tokens are looked at one by one: what counts as generated does not depend on how many
    tokens arrive together.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stops: Sequence[str], stop_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self._text = Detokenizer(tokenizer)
        self._stop = StopMatcher(stops)
        self._stop_token_ids = stop_token_ids
        self._one_by_one = bool(stops)

    def push(self, ids: tuple[int, ...], *, finish: FinishReason | None) -> TextPiece:
        """Take the tokens of one or more steps. A piece with ``finish`` is the last; a stop string may end early."""
        # The token that ended an answer counts but is not text.
        shown = ids[:-1] if finish is FinishReason.STOP else ids
        text = ""
        groups = [(token,) for token in shown] if self._one_by_one else [shown]
        for count, group in enumerate(groups, start=1):
            text += self._stop.push(self._text.push(group))
            if self._stop.matched is not None:
                return self._stopped(ids[:count], text)
        if finish is None:
            return TextPiece(ids, text)
        text += self._stop.push(self._text.flush())
        if self._stop.matched is not None:
            return self._stopped(ids, text)
        last = ids[-1] if finish is FinishReason.STOP and ids[-1] in self._stop_token_ids else None
        return TextPiece(ids, text + self._stop.flush(), finish, last)

    def _stopped(self, ids: tuple[int, ...], text: str) -> TextPiece:
        return TextPiece(ids, text, FinishReason.STOP, self._stop.matched)
