"""Conversations rendered before, by their heads: a turn's render goes on where the last turn's ended.

What a template's loop made of the first messages is kept under a hash of all that it came from: those messages and
those it looked at ahead, what the template had assigned before the loop, and its other arguments. ``resumable`` makes
the loop ask for it.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jinja2
import msgspec
import xxhash

from router.wire.bounded_memory import BoundedMemory

#: Shorter conversations are rendered whole: many of them never come again.
FEWEST_MESSAGES: Final = 8
#: A head ends behind one of so many last messages: it takes more time than most of them to tell how far a loop got.
_LAST_MESSAGES: Final = 4
#: What an entry takes beside its texts.
_ENTRY_BYTES: Final = 512
#: Tells any two JSON values apart, the order of an object's keys and the types of numbers included.
_ENCODER: Final = msgspec.msgpack.Encoder()
#: It raises them for what is no JSON: values of templates, integers of more than 64 bits, nesting without end.
_UNNAMED: Final = (ValueError, TypeError, OverflowError, RecursionError)
_SCALARS: Final = (str, int, float, bool, type(None))

Scalar = str | float | bool | None


class Head(NamedTuple):
    """What a loop made of its first ``messages``, and what it left in the template's namespaces.

    The text is in parts, one for each render that added to it, so that none is copied until the whole is put together.
    """

    messages: int
    parts: tuple[str, ...]
    text_bytes: int
    state: tuple[Scalar, ...]


class RenderedHeads(BoundedMemory[Head]):
    """What one template's renders left, by names of this process alone: nobody can make two conversations of one."""

    def __init__(self, *, max_bytes: int) -> None:
        super().__init__(max_bytes=max_bytes)
        self.seed: Final = int.from_bytes(os.urandom(8))


_NOTHING: Final = Head(0, (), 0, ())


def _size(head: Head) -> int:
    return head.text_bytes + sum(value.__sizeof__() for value in head.state) + _ENTRY_BYTES


class Rendering:
    """One render: where its loop may go on, and how far what it made will hold.

    ``messages`` are those that were sent, ``shown`` what the template is given of them, one by one; ``arguments`` are
    all others that it is given.
    """

    def __init__(
        self,
        heads: RenderedHeads,
        environment: jinja2.Environment,
        *,
        messages: Sequence[Any],
        shown: Sequence[Any],
        arguments: object,
    ) -> None:
        self._heads = heads
        self._environment = environment
        self._messages = messages
        self._shown = shown
        self._arguments = arguments
        self._chunks: list[str] = []
        self._done: list[tuple[bytes, Head, bytes | None]] = []
        self._begin((), (), ())

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """What the loop calls."""
        return {"_homing_resume": self._resume, "_homing_at": self._at, "_homing_mark": self._mark}

    def run(self, template: jinja2.Template, values: Mapping[str, object]) -> str:
        """The whole text. What it raises leaves nothing behind."""
        chunks = self._chunks
        for chunk in template.generate({**values, **self.functions}):
            chunks.append(chunk)  # one by one: the loop asks how many there are
        self._end()
        for name, head, instead_of in self._done:
            self._heads.keep(name, head, size_bytes=_size(head), instead_of=instead_of)
        return "".join(chunks)

    def _begin(self, items: object, names: Sequence[bytes], lead: Sequence[Any]) -> None:
        """A loop begins over ``items``; ``names`` are those of its heads, from none of the items to all of them."""
        self._items = items
        self._names = names
        self._lead = len(lead)
        self._start = len(self._chunks)
        #: So many of the items were read so far; what has looked at anything else holds for this render only.
        self._reach = 0
        self._holds = bool(names)
        self._found: tuple[bytes, Head] | None = None
        self._last: tuple[bytes, int, int, tuple[Scalar, ...]] | None = None

    def _end(self) -> None:
        if self._last is not None:
            name, messages, chunks, state = self._last
            known, head = self._found or (None, _NOTHING)
            new = "".join(self._chunks[self._start + len(head.parts) : chunks])
            size = head.text_bytes + new.__sizeof__()
            self._done.append((name, Head(messages, (*head.parts, new), size, state), known))

    # --- called by the loop -----------------------------------------------------------------------------

    def _resume(self, number: int, items: object, *values: object) -> tuple[object, ...]:
        """How many of the items are rendered, the items that are not, the one before those, and from how many items on
        the loop is to tell of it; then what was left in namespaces. ``values`` are what else the loop depends on.
        """
        self._end()
        lead = self._before(items)
        try:
            names = () if lead is None else self._name(number, lead, values)
        except _UNNAMED:
            names = ()
        self._begin(items, names, lead or ())
        found = self._heads.find(names)
        marked = len(names) - _LAST_MESSAGES if names else math.inf
        if found is None:
            return (0, items, None, marked)
        assert isinstance(items, list)
        self._reach, head = found
        self._found = names[self._reach], head
        self._chunks.extend(head.parts)
        return (head.messages, items[head.messages :], items[head.messages - 1], marked, *head.state)

    def _at(self, items: Any, index: Any) -> Any:
        """An item by its place. The text depends on it from here on."""
        is_known = items is self._items or items is self._shown
        if self._holds and is_known and type(index) is int and 0 <= index < len(items):
            place = index if items is self._items else index - self._lead
            self._reach = max(self._reach, place + 1)
        else:
            self._holds = False
        return self._environment.getitem(items, index)

    def _mark(self, messages: int, ahead: int, *state: object) -> str:
        """So many messages are rendered, for which so many more had to be there."""
        self._reach = max(self._reach, messages + ahead)
        if self._holds and self._reach < len(self._names):
            try:
                kept = tuple(map(_scalar, state))
            except ValueError:
                self._holds = False
            else:
                self._last = (self._names[self._reach], messages, len(self._chunks), kept)
        return ""

    # --- names ------------------------------------------------------------------------------------------

    def _before(self, items: object) -> Sequence[Any] | None:
        """The messages before ``items``, if those are the rest of them."""
        if not isinstance(items, list):
            return None
        lead = len(self._shown) - len(items)
        is_rest = lead >= 0 and all(map(operator.is_, items, self._shown[lead:]))
        return self._messages[:lead] if is_rest else None

    def _name(self, number: int, lead: Sequence[Any], values: Sequence[object]) -> list[bytes]:
        """Raises one of ``_UNNAMED`` for what cannot be named."""
        root = (number, lead, self._arguments, list(map(_key, values)))
        names: list[bytes] = []
        digest, written = xxhash.xxh3_128(seed=self._heads.seed), bytearray()
        for part in (root, *self._messages[len(lead) :]):
            _ENCODER.encode_into(part, written)  # encoded values tell where they end: no two lists of them are alike
            digest.update(written)
            names.append(digest.digest())
        return names


def _scalar(value: object) -> Scalar:
    if type(value) in _SCALARS:
        return value  # type: ignore[return-value]
    raise ValueError("no scalar")


def _key(value: object) -> object:
    return () if isinstance(value, jinja2.Undefined) else _scalar(value)
