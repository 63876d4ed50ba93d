"""A worker's body on its way to the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.errors import RequestError
from router.proxy.server import ClientConnection
from router.wire.openai import Endpoint, error_event
from router.wire.taps import BodyTap, StreamTap, ToldIds
from router.wire.told_errors import ToldError
from router.wire.usage import Usage


class Relay:
    """Passes every byte on as it comes and notes usage and pace in passing."""

    __slots__ = ("_client", "_endpoint", "_feed", "_tap", "_write", "began_seconds", "is_stream", "says_end")

    def __init__(
        self,
        client: ClientConnection,
        endpoint: Endpoint,
        *,
        is_stream: bool,
        says_end: bool,
        on_ids: ToldIds | None = None,
    ) -> None:
        """``endpoint`` says in whose shape an error is told; ``says_end``: nothing but a last event tells that a stream
        is whole; ``on_ids``: see ``StreamTap``, given where the answer has them.
        """
        self.is_stream = is_stream
        self.says_end = says_end
        tap = StreamTap(on_ids) if is_stream else BodyTap(reads_ids=on_ids is not None)
        self._client = client
        self._endpoint = endpoint
        self._tap: StreamTap | BodyTap = tap
        self._feed = tap.feed
        self._write = client.write
        #: Of a stream, by the loop's clock.
        self.began_seconds = client.clock() if is_stream else 0.0

    def __call__(self, data: bytes) -> None:
        self._write(self._feed(data))

    def end(self) -> None:
        """The answer is whole."""
        rest = self._tap.flush()
        if rest:
            self._write(rest)
        self._client.end()

    @property
    def is_done(self) -> bool:
        """The stream's last event has come: what breaks after it is missed by nobody."""
        return isinstance(self._tap, StreamTap) and self._tap.is_done

    @property
    def is_cut(self) -> bool:
        """A stream that is over, and would have said so."""
        return self.says_end and self.is_stream and not self.is_done

    @property
    def error(self) -> ToldError | None:
        """That the worker has told, be it in an answer whose head was good."""
        return self._tap.error

    @property
    def has_said_all(self) -> bool:
        """What is still to come of the stream nobody waits for: it has ended but for its body, or told an error."""
        return self.is_stream and (self.error is not None or self.is_done)

    def end_with(self, error: RequestError) -> None:
        """The stream ends here, with an error as its last event. An event cut short is not passed on."""
        separator = b"\n\n" if isinstance(self._tap, StreamTap) and self._tap.midway else b""
        self._write(separator + error_event(error, self._endpoint, number=self._tap.events))
        self._client.end()

    def said(self) -> tuple[Usage | None, Sequence[int], Callable[[], str]]:
        """What the worker reported, as far as it has come: usage, the ids of its tokens where they are told, and who
        tells the text that it began with.
        """
        return self._tap.usage, self._tap.ids, self._tap.first_words()

    def generated_tokens(self) -> int:
        """Of a streamed answer, as far as it has come: engines send about one an event."""
        return self._tap.events

    def seconds_between_events(self) -> float | None:
        """On average until now, which is the end; None for fewer than two events."""
        gaps = self._tap.events - 1
        return (self._client.clock() - self.began_seconds) / gaps if gaps > 0 else None
