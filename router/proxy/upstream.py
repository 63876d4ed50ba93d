"""Connections to workers: opened, kept for a while, parsed with httptools. Closing one is how a request is aborted."""

from __future__ import annotations

import asyncio
import errno
from math import inf
from typing import Final, cast

import httptools

from router.fleet.target import Target
from router.proxy.answers import is_good_stream
from router.proxy.receiver import AnswerHead, Failure, Receiver
from router.proxy.types import Outcome
from router.proxy.watchdog import Watchdog
from router.proxy.worker_sockets import ask_after
from router.settings import UpstreamSettings
from router.wire import headers as names
from router.wire import http1
from router.wire.headers import Header
from router.wire.known_heads import KnownHeads

#: How often an attempt whose worker is silent is asked whether it waits on.
_LOOK_SECONDS: Final = 5.0
#: A worker that closed a resting connection before a request reached it says so within a round trip; one that is
#: silent for longer has the request.
_STALE_SECONDS: Final = 1.0
#: What says nothing of a worker, but of this process.
_NO_SOCKET: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
#: Heads and trailers longer than this, or heads of more lines, are no worker's of right mind.
_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_HEADERS: Final = 256


class UpstreamConnection:
    """One connection to a worker, one exchange at a time: ``send``, then give it back to the pool or ``close`` it.

    An ``asyncio.Protocol`` in all but descent, as ``ClientConnection`` is.
    """

    def __init__(self, pool: UpstreamPool, address: Address) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self.address = address
        self._parser = httptools.HttpResponseParser(self)
        self._watchdog = Watchdog(self._loop, self._expired)
        self._look_seconds = min(_LOOK_SECONDS, pool.settings.first_byte_seconds)
        self._idle_seconds = pool.settings.idle_seconds
        self._keepalive_seconds = pool.settings.keepalive_seconds
        self._sent_seconds = 0.0
        self._by_seconds = inf
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._paused = False
        self._is_kept = False
        # The exchange:
        self._answered = False
        self._begun = False
        self._complete = False
        self._keep = False
        self._begin_parsing()

    def _begin_parsing(self) -> None:
        """What the parser says is of a new answer from now on."""
        self._is_repeatable = False
        self._head: AnswerHead | None = None
        self._length: int | None = None
        self._reason = b""
        self._headers: list[Header] = []
        self._pieces: list[bytes] = []
        #: Come since the last of the body, or the beginning: heads, trailers and what is between chunks.
        self._bodiless_bytes = 0

    # --- for the attempt ------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, receiver: Receiver, *, by_seconds: float = inf) -> None:
        """Begin an exchange. ``receiver`` is told of the answer, of a connection that is gone at once. It is over when
        the loop's clock shows ``by_seconds``.
        """
        self._answered = self._begun = self._complete = self._keep = False
        self._receiver = receiver
        self._by_seconds = by_seconds
        self._sent_seconds = self._watchdog.set(self._look_seconds, by=by_seconds)
        if self._transport is None or self._transport.is_closing():
            self._fail(Outcome.RESET, "the worker closed the connection")
        else:
            self._transport.writelines((head, body))

    def pause(self) -> None:
        """Read no more for now: the reader is behind."""
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
            self._watchdog.set(self._idle_seconds, by=self._by_seconds)

    def close(self) -> None:
        """End the connection at once; the worker sees it and aborts. The receiver is told nothing more."""
        self._receiver = None
        self._keep = False
        self._watchdog.stop()
        if self._transport is not None:
            self._transport.abort()

    # --- for the pool ---------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """As far as is known here."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def reusable(self) -> bool:
        """The answer is whole and the worker will take another request here."""
        return self._complete and self._keep and self.alive

    def rest(self) -> None:
        """Wait in the pool, for a shorter time than the worker would."""
        self._is_kept = True
        self._receiver = None
        if self._paused:
            self.resume()
        self._watchdog.set(self._keepalive_seconds)

    # --- called by the loop ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's, so no isinstance can tell.
        self._transport = cast("asyncio.Transport", transport)
        ask_after(transport.get_extra_info("socket"))
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.close()  # nobody asked: what follows on this connection cannot be trusted
            return
        is_first = not self._answered
        had_head = not is_first and self._head is not None
        if is_first:
            self._answered = True
            known = self._pool.known_heads.whole(data)
            if known is not None:
                self._take_whole(*known)
                return
            self._begin_parsing()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._keep = False
            if not self._complete:
                self._pass_on()
                self._fail(Outcome.PROTOCOL, "the worker's answer is not valid HTTP")
                return
        if not (self._pieces or self._complete):
            self._without_body(len(data), had_head=had_head)
            return
        if is_first and self._complete and self._keep and self._is_repeatable and self._head is not None:
            self._pool.known_heads.learn(data, self._head)
        self._pass_on()
        if self._complete:
            self._end(None)

    def _without_body(self, size: int, *, had_head: bool) -> None:
        """So many bytes have brought nothing that could be passed on."""
        self._bodiless_bytes += size
        if self._bodiless_bytes > _MAX_HEAD_BYTES:
            self._fail(Outcome.PROTOCOL, "the worker's head or trailers have no end")
        elif not had_head and self._head is not None and not is_good_stream(self._head):
            self._watchdog.set(self._idle_seconds, by=self._by_seconds)  # an answer that comes whole: all at once

    def _take_whole(self, head: AnswerHead, body: bytes) -> None:
        """The answer came all at once, and needs no parser."""
        self._begun = self._complete = self._keep = True
        if self._receiver is not None:
            self._receiver.on_answer(head, len(body), body)
        if body and self._receiver is not None:
            self._receiver.on_body(body)
        self._end(None)

    def _pass_on(self) -> None:
        """Tell the receiver what has been parsed. It may close this connection at any call."""
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if pieces:
            self._pieces = []
            self._bodiless_bytes = 0
            self._watchdog.set(self._idle_seconds, by=self._by_seconds)
        elif not self._complete:
            return
        if not self._begun and self._receiver is not None:
            self._begun = True
            assert self._head is not None, "a body without a head"
            self._receiver.on_answer(self._head, self._length, data)
        if data and self._receiver is not None:
            self._receiver.on_body(data)

    def pause_writing(self) -> None:
        """The worker is slow to read. Nothing is written but a request, whose body is in memory anyway."""

    def resume_writing(self) -> None:
        """The worker has read on."""

    def eof_received(self) -> None:
        head = self._head
        if self._receiver is not None and head is not None and head.ends_with_connection and not self._complete:
            self._complete = True
            self._pass_on()
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watchdog.stop()
        self._pool.lost(self)
        if not self._complete:
            self._fail(Outcome.RESET, "the worker closed the connection")
        elif self._receiver is not None:  # it raised while it was told, upon which the loop closes the connection
            self._fail(Outcome.FAULT, "the router failed on the answer")

    def _end(self, failure: Failure | None) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.on_end(failure)

    def _expired(self) -> None:
        if self._receiver is None:
            self.close()
        elif self._paused:
            self._fail(Outcome.CLIENT_GONE, "the client stopped reading")
        elif self._loop.time() >= self._by_seconds:
            self._fail(Outcome.TIMEOUT, "the worker's answer took too long")
        elif self._may_begin(self._receiver):
            self._watchdog.set(self._look_seconds, by=self._by_seconds)
        else:
            self._fail(Outcome.TIMEOUT, "the worker was silent for too long")

    def _may_begin(self, receiver: Receiver) -> bool:
        """Nothing of the answer's body has come, and it is no wonder yet."""
        head = self._head if self._answered else None
        if self._begun or (head is not None and not is_good_stream(head)):
            return False
        return receiver.waits_on(self._loop.time() - self._sent_seconds, has_head=head is not None)

    def _fail(self, outcome: Outcome, cause: str) -> None:
        receiver = self._receiver
        self.close()
        if receiver is not None:
            receiver.on_end(Failure(outcome, cause, is_stale=outcome is Outcome.RESET and self._is_stale()))

    def _is_stale(self) -> bool:
        return self._is_kept and not self._answered and self._loop.time() - self._sent_seconds < _STALE_SECONDS

    # --- called by the parser -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._keep = False  # what follows an answer would be taken for the next one's beginning

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:
            if len(self._headers) == _MAX_HEADERS:
                raise ValueError("more header lines than any worker sends")
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._complete:
            if status < 100 or status == 101:  # neither an answer nor one that another follows
                raise ValueError("no status that an answer to this request can have")
            return
        headers = self._headers
        head = AnswerHead(status, http1.status_line(status, self._reason), names.response_lines(headers))
        is_chunked = False
        for name, value in headers:
            lowered = name.lower()
            if lowered == names.CONTENT_LENGTH:
                self._length = int(value)
                head.has_length = True
            elif lowered == names.TRANSFER_ENCODING:
                coding = value.lower()
                is_chunked = coding == b"chunked"
                if not is_chunked and coding != b"identity":
                    raise ValueError("a transfer coding that would have to be passed on")
            elif lowered == names.CONTENT_TYPE:
                head.content_type = value.lower()
            elif lowered == names.CONTENT_ENCODING:
                head.encoded = value.lower() != b"identity"
        if status == 204:  # which has no length either, RFC 9110 8.6
            self._length = None
        self._head = head
        head.ends_with_connection = not head.has_length and not is_chunked
        # Of which the parser could not say anything else another time.
        is_plain = self._length is not None and not is_chunked and not http1.bodiless(status)
        self._is_repeatable = is_plain and self._parser.get_http_version() == "1.1"

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._head is None:
            # An interim answer (1xx); the real one follows.
            self._reason, self._headers = b"", []
        elif self._complete:
            self._keep = False
        else:
            self._complete = True
            self._keep = self._parser.should_keep_alive()


Address = tuple[str, int, bool]


class UpstreamPool:
    """Connections to all workers. Idle ones are used again, the latest first, until they have rested too long."""

    def __init__(self, settings: UpstreamSettings) -> None:
        self.settings = settings
        self.known_heads: KnownHeads[AnswerHead] = KnownHeads()
        self._idle: dict[Address, list[UpstreamConnection]] = {}
        self._open: set[UpstreamConnection] = set()

    @property
    def open_connections(self) -> int:
        """Connections to workers, in use or idle."""
        return len(self._open)

    def take(self, target: Target) -> UpstreamConnection | None:
        """An idle connection to the target, if there is one."""
        idle = self._idle.get((target.host, target.port, target.tls))
        while idle:
            connection = idle.pop()
            if connection.alive:
                return connection
        return None

    async def connect(self, target: Target) -> UpstreamConnection | Failure:
        """A new connection to the target."""
        connection = UpstreamConnection(self, (target.host, target.port, target.tls))
        made = False
        try:
            async with asyncio.timeout(self.settings.connect_seconds):
                await self._open_socket(connection, target)
            made = True
        except TimeoutError:
            return Failure(Outcome.TIMEOUT, "no connection to the worker in time")
        except OSError as error:
            if error.errno in _NO_SOCKET:
                return Failure(Outcome.NO_SOCKET, "the system grants no more sockets")
            return Failure(Outcome.CONNECT, "no connection to the worker")
        finally:
            if not made:
                # uvloop closes the socket of a connect that was cancelled, but never says that it is lost.
                self.lost(connection)
        return connection

    async def _open_socket(self, connection: UpstreamConnection, target: Target) -> None:
        await asyncio.get_running_loop().create_connection(
            lambda: cast("asyncio.Protocol", connection), target.host, target.port, ssl=target.tls or None
        )

    def give_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection whose exchange has ended well; close any other."""
        if connection.reusable:
            connection.rest()
            idle = self._idle.get(connection.address)
            if idle is None:
                self._idle[connection.address] = [connection]
            else:
                idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close every connection, in use or not."""
        for connection in tuple(self._open):
            connection.close()

    def opened(self, connection: UpstreamConnection) -> None:
        self._open.add(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.address)
        if idle is not None and connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.address, None)
