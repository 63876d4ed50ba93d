"""Answers read in passing: their usage, how many events have come, and whether the last one is the last of all."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from router.wire import sse
from router.wire.generated import first_words, first_words_of_stream, token_ids
from router.wire.told_errors import ToldError, error_told
from router.wire.usage import Usage, later_usage, parse_usage

#: How Responses and Anthropic's API end a stream, well or not; the others end it with ``[DONE]``.
_LAST_EVENTS: Final = (
    "response.completed",
    "response.incomplete",
    "response.failed",
    "message_stop",
    "error",
)
#: How a piece begins that begins with an event: ``data``, ``event``, ``id``, ``retry``. Others may be comments.
_FIELDS: Final = b"deir"
#: So much is kept as an answer's beginning: of a stream some eight of the engines' events.
_BEGINNING_BYTES: Final = 2048

#: Told the ids of an answer's tokens, as far as they have come.
ToldIds = Callable[[Sequence[int]], None]


class StreamTap:
    """Reads the usage of a streamed answer in passing, and cuts the stream at event boundaries.

    With ``on_ids`` it reads the ids of the tokens, too, which is work for each event.
    """

    __slots__ = ("_beginning", "_cutter", "_is_between", "_last", "_on_ids", "error", "events", "ids", "usage")

    def __init__(self, on_ids: ToldIds | None = None) -> None:
        self._cutter = sse.EventCutter()
        self._on_ids = on_ids
        self._beginning = b""
        self.ids = array("I")
        #: What comes next begins something new.
        self._is_between = True
        #: What came last and holds an event; of one too long to be held, its beginning.
        self._last = b""
        self.usage: Usage | None = None
        self.error: ToldError | None = None
        #: How many have come, comments being none where they come by themselves.
        self.events = 0

    @property
    def midway(self) -> bool:
        """What has been passed on ends inside an event."""
        return self._cutter.midway

    @property
    def is_done(self) -> bool:
        """The last event that came is one that ends a stream, be its blank line missing."""
        if self._cutter.midway:
            return False
        return _ends(_last_of(self._last), is_whole=True) or _ends(_last_of(self._cutter.held), is_whole=False)

    def feed(self, data: bytes) -> bytes:
        """What may be passed on now. Only events that name a usage or an error are looked into."""
        if self._is_between and 0 < data.find(b"\n\n") == len(data) - 2 and data[0] in _FIELDS and b"\r" not in data:
            self._last = data  # one event, which is what engines send at a time
            self.events += 1
        else:
            data = self._cut(data)
        if b'"usage"' in data:
            self._read(data)
        if b'"error"' in data:
            self.error = self.error or error_told(data, is_streamed=True)
        if len(self._beginning) < _BEGINNING_BYTES:
            self._beginning += data[:_BEGINNING_BYTES]
        if self._on_ids is not None and b'"token_ids"' in data:
            self._read_ids(data, self._on_ids)
        return data

    def first_words(self) -> Callable[[], str]:
        """Who tells the text that the answer begins with; empty where it begins with none, or none has come.

        It may outlive the answer, and keeps no more of it.
        """
        return partial(first_words_of_stream, self._beginning)

    def _cut(self, data: bytes) -> bytes:
        """Anything: parts of events, many of them, blank lines, comments."""
        cutter = self._cutter
        was_midway = cutter.midway
        whole = cutter.feed(data)
        self._is_between = not (cutter.held or cutter.midway)
        if was_midway and cutter.midway:
            return whole
        new = whole
        if was_midway:
            self.events += 1
            new = sse.after_blank_line(whole)
        if new and new[0] in _FIELDS and b"\r" not in new:
            self._last = new
            self.events += new.count(b"\n\n")
        elif found := sum(not sse.is_comment(event) for event in sse.events(new)):
            self._last = new
            self.events += found - cutter.midway
        return whole

    def flush(self) -> bytes:
        """What is left when the answer has ended."""
        rest = self._cutter.flush()
        if b'"usage"' in rest:
            self._read(rest)
        self.error = self.error or error_told(rest, is_streamed=True)
        return rest

    def _read(self, whole: bytes) -> None:
        for event in sse.events(whole):
            if b'"usage"' in event:
                self.usage = later_usage(self.usage, parse_usage(sse.event_data(event)))

    def _read_ids(self, whole: bytes, on_ids: ToldIds) -> None:
        known = len(self.ids)
        for event in sse.events(whole):
            self.ids.extend(token_ids(sse.event_data(event)))
        if len(self.ids) > known:
            on_ids(self.ids)


def _last_of(piece: bytes) -> bytes:
    """The last event in a piece; empty if there is none."""
    return next((event for event in reversed(sse.events(piece)) if not sse.is_comment(event)), b"")


def _ends(event: bytes, *, is_whole: bool) -> bool:
    """Whether nothing follows this event, or what may have come of it.

    Names are told by the ``event`` line or by the data. An ``error`` there is how engines end other streams.
    """
    if is_whole and sse.event_name(event) in _LAST_EVENTS:
        return True
    data = sse.event_data(event)
    if data == b"[DONE]":
        return True
    try:
        said = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(said, dict) and (
        sse.event_name(event) in _LAST_EVENTS or said.get("type") in _LAST_EVENTS or bool(said.get("error"))
    )


class BodyTap:
    """Reads the usage of an answer that is one JSON document, and with ``reads_ids`` those of its tokens. Passes every
    byte on at once.
    """

    #: Longer answers are passed on without being read: their pieces would have to be held until the end.
    MAX_BYTES: Final = 512 * 1024

    __slots__ = ("_bytes", "_pieces", "_reads_ids")

    def __init__(self, *, reads_ids: bool = False) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._reads_ids = reads_ids

    #: Such an answer has no events.
    events: Final = 0

    def feed(self, data: bytes) -> bytes:
        self._bytes += len(data)
        if self._bytes <= self.MAX_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()
        return data

    def flush(self) -> bytes:
        return b""

    @property
    def error(self) -> ToldError | None:
        """That the answer is, for all its head."""
        return error_told(b"".join(self._pieces), is_streamed=False)

    @property
    def usage(self) -> Usage | None:
        """Of what has been fed; None until the document is whole."""
        return parse_usage(b"".join(self._pieces))

    @property
    def ids(self) -> Sequence[int]:
        """Of what has been fed."""
        return token_ids(b"".join(self._pieces)) if self._reads_ids else ()

    def first_words(self) -> Callable[[], str]:
        """As of a ``StreamTap``."""
        words = first_words(b"".join(self._pieces))[:_BEGINNING_BYTES]
        return lambda: words
