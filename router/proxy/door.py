"""What a client's connection, what is behind it, and who answers its requests are to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from router.errors import Dialect, RequestError
from router.settings import ServerSettings
from router.wire.http1 import HttpRequest, RequestHead, RequestReader
from router.wire.known_heads import KnownHeads

if TYPE_CHECKING:
    from router.proxy.server import ClientConnection


class Serving(Protocol):
    """A request that is being answered."""

    def pause(self) -> None:
        """The client does not keep up: stall what its answer comes from."""

    def resume(self) -> None:
        """The client has caught up."""

    def cancel(self) -> None:
        """Give up and call ``finished``: the client has gone, or must go and may still be told so."""


class Door(Protocol):
    """What a connection needs of the data plane behind it."""

    @property
    def settings(self) -> ServerSettings: ...

    @property
    def known_heads(self) -> KnownHeads[RequestHead]: ...

    def serve(self, request: HttpRequest, client: ClientConnection) -> None:
        """Answer one request through ``client``, then call its ``finished``. What takes time is attached to it."""

    def screen(self, head: RequestHead) -> RequestError | None:
        """Why a request is not worth the reading of its body, if it is not."""

    def refused(self, error: RequestError, reader: RequestReader) -> tuple[Dialect, bytes]:
        """The request being read is answered with ``error`` before it reaches ``serve``.

        Returns in whose shape, and header lines for the answer.
        """

    def entered(self, client: ClientConnection) -> None:
        """A client has connected. ``turn_away`` it here if it may not stay."""

    def left(self, client: ClientConnection, *, midway: bool) -> None:
        """The connection is gone; ``midway``: the client left before its answer had ended."""
