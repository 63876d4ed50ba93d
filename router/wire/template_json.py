"""JSON as chat templates read and write it, kept: each turn sends the same tools and calls again.

``transformers``' ``tojson`` is unlike Jinja's own: it does not escape HTML.
"""

from __future__ import annotations

import contextlib
import json
import marshal
from collections.abc import Mapping
from typing import Final

import msgspec

from router.wire.bounded_memory import BoundedMemory

_MOST_INDENTS: Final = 32
#: Characters of arguments, and bytes of objects, of which more are worked out each time.
_MOST_KEPT: Final = 4096
#: What one value takes in memory beside its characters, and an entry beside its key and its value.
_VALUE_BYTES, _ENTRY_BYTES = 100, 256


class TemplateJson:
    """Bounded by ``max_bytes``, which its length is in. Any thread may use it."""

    def __init__(self, *, max_bytes: int) -> None:
        self._memory: BoundedMemory[object] = BoundedMemory(max_bytes=max_bytes)

    def __len__(self) -> int:
        return len(self._memory)

    def read(self, text: str) -> object:
        """A call's arguments, which nobody may change; None for what is no JSON."""
        if len(text) > _MOST_KEPT:
            return _read(text)
        if (found := self._memory.find((text,))) is not None:
            return found[1]
        if (value := _read(text)) is not None:
            size_bytes = 2 * text.__sizeof__() + _VALUE_BYTES * sum(map(text.count, "[{:,")) + _ENTRY_BYTES
            self._memory.keep(text, value, size_bytes=size_bytes)
        return value

    def write(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """The filter. Raises ``ValueError`` where it would indent what is nested deeper than schemas are: blanks by the
        depth make gigabytes of a megabyte.
        """
        same = b""
        if type(value) is dict and separators is None:
            with contextlib.suppress(ValueError):  # too deep for marshal
                same = marshal.dumps(value, 2)  # of equal objects, whose fields have one order, and of no others
        if not 0 < len(same) <= _MOST_KEPT:
            return _write(value, ensure_ascii, indent, separators, sort_keys)
        key = (same, ensure_ascii, indent, sort_keys)
        if (found := self._memory.find((key,))) is not None:
            return str(found[1])
        text = _write(value, ensure_ascii, indent, separators, sort_keys)
        self._memory.keep(key, text, size_bytes=len(same) + text.__sizeof__() + _ENTRY_BYTES)
        return text


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _write(
    value: object, ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> str:
    if indent is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    if _is_deep(value):
        raise ValueError(f"JSON is nested deeper than {_MOST_INDENTS}")
    if type(indent) is int and indent > 0 and separators is None:
        with contextlib.suppress(msgspec.DecodeError):  # infinities, which JSON has not
            # The same in a tenth of the time: Python's own encoder indents value by value.
            compact = json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
            return msgspec.json.format(compact, indent=indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_INDENTS + 1):
        if not level:
            return False
        level = [
            child
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for child in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
    return bool(level)
