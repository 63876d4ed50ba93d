"""A worker's body on its way to the client."""

from __future__ import annotations

from router.errors import RequestError
from router.proxy.server import ClientConnection
from router.wire.openai import BodyTap, Endpoint, StreamTap, Usage, error_event


class Relay:
    """Passes every byte on as it comes and notes usage and pace in passing."""

    __slots__ = ("_client", "_clock", "_endpoint", "_tap", "first_seconds", "last_seconds")

    def __init__(self, client: ClientConnection, tap: StreamTap | BodyTap, endpoint: Endpoint) -> None:
        """``endpoint`` says in whose shape an error is told."""
        self._client = client
        self._endpoint = endpoint
        self._tap = tap
        self._clock = client.clock
        self.first_seconds = self.last_seconds = self._clock()

    def __call__(self, data: bytes) -> None:
        self.last_seconds = self._clock()
        self._client.write(self._tap.feed(data))

    def end(self) -> None:
        """The answer is whole."""
        self._client.write(self._tap.flush())
        self._client.end()

    def end_with(self, error: RequestError) -> None:
        """The stream ends here, with an error as its last event. An event cut short is not passed on."""
        separator = b"\n\n" if isinstance(self._tap, StreamTap) and self._tap.midway else b""
        self._client.write(separator + error_event(error, self._endpoint, number=self._tap.events))
        self._client.end()

    @property
    def usage(self) -> Usage | None:
        """What the worker reported, as far as it has come."""
        return self._tap.usage

    @property
    def seconds_between_events(self) -> float | None:
        """On average; None for fewer than two events."""
        gaps = self._tap.events - 1
        return (self.last_seconds - self.first_seconds) / gaps if gaps > 0 else None
