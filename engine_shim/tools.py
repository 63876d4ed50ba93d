"""Forced tool calls, read out of an answer's text while it comes. Pure.

The grammars that ``structured`` writes decide the form, so there is one way to read it: either the arguments of the one
function that was named, or ``[{"name":"f","parameters":{...}},...]``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

_PARAMETERS = ',"parameters":'


@dataclass(frozen=True, slots=True)
class CallPiece:
    """New text of the ``index``-th call's arguments. With ``name`` a call begins."""

    index: int
    arguments: str
    name: str | None = None


class CallReader:
    """Cuts a text into calls. ``name``: the text is the arguments of this function."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._index = -1 if name is None else 0
        self._head = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._told_name = False

    def push(self, text: str) -> list[CallPiece]:
        """Take more of the text; tell what it adds to calls."""
        if self._name is not None:
            name, self._told_name = None if self._told_name else self._name, True
            return [CallPiece(0, text, name)] if text or name else []
        pieces: list[CallPiece] = []
        arguments = ""
        for character in text:
            if self._depth == 0 and (name := self._read_head(character)) is not None:
                self._index += 1
                pieces.append(CallPiece(self._index, "", name))
            elif self._depth > 0:
                if self._ends(character):
                    if arguments:
                        pieces.append(CallPiece(self._index, arguments))
                    arguments = ""
                else:
                    arguments += character
        if arguments:
            pieces.append(CallPiece(self._index, arguments))
        return pieces

    def _read_head(self, character: str) -> str | None:
        """Between calls: the name, once all before the arguments has come."""
        self._head += character
        if not self._head.endswith(_PARAMETERS):
            return None
        text = self._head[self._head.index('{"name":') + len('{"name":') : -len(_PARAMETERS)]
        try:
            name = json.loads(text)
        except ValueError:  # the mark stands inside the name
            return None
        self._head, self._depth = "", 1
        return str(name)

    def _ends(self, character: str) -> bool:
        """Whether a character behind ``"parameters":`` is the brace that closes the call; it is no part of it."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return self._depth == 0
