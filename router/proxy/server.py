"""A client's connection: requests read in, answers written out in order, a slow reader felt upstream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, cast

from router.errors import Dialect, NoWorker, RequestError, RequestTimeout, to_answer
from router.proxy.client_sockets import has_left, has_unread
from router.proxy.door import Door, Serving
from router.proxy.watchdog import Watchdog
from router.wire import http1
from router.wire.http1 import HttpRequest, Phase, RequestHead, RequestReader

#: Pipelined requests that may wait behind the one being served, and bytes of bodies; then the client is not read.
_MAX_QUEUED = 8
_MAX_QUEUED_BYTES = 1024 * 1024
#: While nothing is read of a client, so often is looked whether it has left.
_LOOK_SECONDS = 0.1
#: After a refusal the client may still be sending. Closing at once would reset the connection under the answer.
_LINGER_SECONDS = 2.0
#: A body may take its time, up to so many times that for bodies, as long as so much of it comes within each.
_PROGRESS_BYTES, _MOST_TIMES = 64 * 1024, 10
_READING: Final = frozenset({Phase.HEAD, Phase.BODY})


class ClientConnection:
    """One client. At most one request is being served; pipelined ones wait their turn.

    An ``asyncio.Protocol`` in all but descent, which a compiled class cannot have.
    While more waits than may be queued, the socket is not read, and a disconnect is looked for instead: behind more
    than the kernel takes it goes unseen until then.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        settings = door.settings
        self._keepalive_seconds = settings.keepalive_seconds
        self._header_seconds = settings.header_timeout_seconds
        self._body_seconds = settings.body_timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(
            max_head_bytes=settings.max_header_bytes,
            max_headers=settings.max_headers,
            max_body_bytes=settings.max_body_bytes,
            known=door.known_heads,
        )
        self._phase = Phase.IDLE
        self._watchdog = Watchdog(self._loop, self._expired)
        self._transport: asyncio.Transport | None = None
        self._queue: deque[HttpRequest | RequestError] = deque()
        self._busy = False
        self._serving: Serving | None = None
        self._advancing = False
        self._reading_paused = False
        self._looking: asyncio.TimerHandle | None = None
        self._writing_paused = False
        self._lingering = False
        self._parting = self._draining = False
        self._timed_bytes, self._body_by_seconds = 0, 0.0
        # The answer being written:
        self._request: HttpRequest | None = None
        self._head = b""
        self._chunked = False
        self._close_after = False
        self.begun = False

    # --- called by the loop ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's, so no isinstance can tell.
        self._transport = cast("asyncio.Transport", transport)
        self._watchdog.set(self._keepalive_seconds)
        self._door.entered(self)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        reader = self._reader
        ready = reader.feed(data)
        if ready:
            self._queue += ready
        phase = reader.phase
        if phase is not self._phase or (ready and phase is not Phase.IDLE):
            self._phase_changed(phase)
        if phase is Phase.BODY and reader.body_bytes - self._timed_bytes >= _PROGRESS_BYTES and not self._lingering:
            self._timed_bytes = reader.body_bytes
            self._watchdog.set(self._body_seconds, by=self._body_by_seconds)
        if ready and not self._busy:
            self._advance()
        if (self._queue or (self._busy and phase is not Phase.IDLE)) and self._is_full():
            self._pause_reading()

    def eof_received(self) -> None:
        """A client that has said its last word while it is being answered has left.

        A TLS transport may read that word within its own ``close``, and is not to be aborted then.
        """
        if (self._busy or self._queue) and not self.gone:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watchdog.stop()
        self._stop_looking()
        midway = self._request is not None
        self._transport = None
        self._queue.clear()
        if self._serving is not None:
            self._serving.cancel()
        self._door.left(self, midway=midway)

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._serving is not None:
            self._serving.pause()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._serving is not None:
            self._serving.resume()
        elif not self._busy:
            self._advance()

    # --- reading --------------------------------------------------------------------------------

    def _phase_changed(self, phase: Phase) -> None:
        self._phase = phase
        if phase is Phase.HEAD:
            self._watchdog.set(self._header_seconds)
        elif phase is Phase.BODY:
            refusal = self._door.screen(self._reader.head)
            if refusal is not None:
                self._refuse(refusal)
                return
            self._timed_bytes = 0
            self._body_by_seconds = self._watchdog.set(self._body_seconds) + _MOST_TIMES * self._body_seconds
            self._send_continue()
            if self._reader.awaits_continue:
                self._watchdog.clear()  # the client waits for an answer's end, not the other way round
        else:
            self._watchdog.clear()

    def _send_continue(self) -> None:
        """Tell a client that waits to send its body, unless an earlier answer is still being written."""
        is_idle = not self._busy and not self._queue
        if self._reader.awaits_continue and is_idle and self._transport is not None:
            self._reader.awaits_continue = False
            self._watchdog.set(self._body_seconds)
            self._transport.write(http1.CONTINUE)

    def _is_full(self) -> bool:
        """As much waits behind the request being served as may."""
        return len(self._queue) > _MAX_QUEUED or self.queued_bytes > _MAX_QUEUED_BYTES

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()
            if self._busy:
                self._watchdog.clear()  # what does not come in time is not the client's fault now
            self._look()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._stop_looking()
            self._transport.resume_reading()
            if self._phase in _READING:
                self._phase_changed(self._phase)

    def _look(self) -> None:
        if self._transport is not None and has_left(self._transport):
            self.abort()
        else:
            self._looking = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _expired(self) -> None:
        if self._lingering or self.gone:
            self.abort()
        elif self._phase is Phase.HEAD:
            self._refuse(RequestTimeout("The request's head did not arrive in time."))
        elif self._phase is Phase.BODY:
            self._refuse(RequestTimeout("The request's body did not arrive in time."))
        elif not self._busy:
            self.close()

    def _refuse(self, error: RequestError) -> None:
        """End the connection with an error, after the answers that are due before it."""
        self._lingering = True
        self._queue.append(error)
        if not self._busy:
            self._advance()

    # --- serving --------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Serve what has been read, in order, until an answer takes time or the client does not read it."""
        if self._advancing:
            return
        self._advancing = True
        queue = self._queue
        while queue and not self._busy and not self._writing_paused and not self.gone:
            item = queue.popleft()
            if self._reading_paused and not self._is_full():
                self._resume_reading()
            if isinstance(item, RequestError):
                self._answer_refusal(item)
            else:
                self._begin(item)
                self._door.serve(item, self)
        self._advancing = False
        if not self._busy and not self._lingering and not self.gone:
            self._rest()

    def finished(self) -> None:
        """The answer has ended, or broken off: then only the end of the connection can tell the client."""
        self._busy = False
        self._serving = None
        if self._request is not None:
            self._request = None
            self.abort()
        elif self._close_after:
            self.close()
        elif self._queue or self._advancing or self._lingering:
            self._advance()
        elif self._transport is not None:
            self._rest()

    def _begin(self, request: HttpRequest) -> None:
        self._busy = True
        self._request = request
        self._head = b""
        self._chunked = False
        self._close_after = self._parting or not request.head.keep_alive
        self.begun = False

    def _rest(self) -> None:
        """Nothing to serve: wait for more."""
        if self._draining and self._phase not in _READING:
            self._depart()
        elif self._queue:  # the client pipelines requests but does not read the answers
            self._watchdog.set(self._body_seconds)
        elif self._phase is Phase.IDLE:
            self._watchdog.set(self._keepalive_seconds)
        else:
            self._resume_reading()
            self._send_continue()

    def _answer_refusal(self, error: RequestError) -> None:
        self._lingering = True
        dialect, lines = self._door.refused(error, self._reader)
        self._begin(HttpRequest(RequestHead("POST", b"", [], keep_alive=False)))
        self.answer_error(error, lines=lines, dialect=dialect)
        self._linger()

    def _linger(self) -> None:
        """Nothing more comes from here; what still comes from the client is dropped."""
        if self._transport is not None:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._watchdog.set(_LINGER_SECONDS)
            self._resume_reading()

    def close(self) -> None:
        """Close when all that is written has been sent, or cannot be sent in time."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            self._watchdog.set(self._body_seconds)

    def abort(self) -> None:
        """Close at once, whatever has not been sent."""
        if self._transport is not None:
            self._transport.abort()

    # --- writing, for the one who serves --------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one that this connection lives on. Asking for the running loop costs a system call."""
        return self._loop

    def clock(self) -> float:
        """The loop's time."""
        return self._loop.time()

    @property
    def address(self) -> str:
        """The client's, without its port; empty where there is none."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if isinstance(peer, tuple) and peer else ""

    @property
    def gone(self) -> bool:
        """Nobody will read what is written now."""
        return self._transport is None or self._transport.is_closing()

    @property
    def queued_bytes(self) -> int:
        """Of bodies that wait behind the request being served, as far as they have come."""
        bodies = (item.body for item in self._queue if isinstance(item, HttpRequest))
        return sum(map(len, bodies)) + self._reader.body_bytes

    @property
    def unsent_bytes(self) -> int:
        """Written, but not yet taken by the kernel."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def attach(self, serving: Serving) -> None:
        """Tell ``serving`` of what happens to this client, until ``finished``."""
        self._serving = serving

    def start(self, status_line: bytes, lines: bytes, *, has_length: bool) -> None:
        """Begin an answer; it goes out with its first byte of body. ``has_length``: a header line gives it."""
        request = self._request
        assert request is not None, "an answer without a request"
        if not has_length:
            if request.head.chunks:
                self._chunked = True
                lines += b"transfer-encoding: chunked\r\n"
            else:
                self._close_after = True
        if self._close_after:
            lines += b"connection: close\r\n"
        elif not request.head.chunks:
            lines += b"connection: keep-alive\r\n"
        self._head = status_line + lines + b"\r\n"
        self.begun = True

    def write(self, data: bytes) -> None:
        """A piece of the body."""
        if not data or self._transport is None or self._request is None:
            return
        if self._request.head.method == "HEAD":
            data = b""
        elif self._chunked:
            data = http1.chunk(data)
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def end(self) -> None:
        """The answer is whole."""
        if self._transport is not None and self._request is not None:
            last = http1.LAST_CHUNK if self._chunked and self._request.head.method != "HEAD" else b""
            if self._head or last:
                self._transport.write(self._head + last)
        self._request = None

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """A whole answer at once."""
        self.start(http1.status_line(status), b"%bcontent-length: %d\r\n" % (lines, len(body)), has_length=True)
        self.write(body)
        self.end()

    def answer_error(self, error: BaseException, *, lines: bytes = b"", dialect: Dialect = Dialect.OPENAI) -> None:
        """A whole answer that says what went wrong."""
        answer = to_answer(error, dialect=dialect)
        self.answer(answer.status, http1.header_lines(answer.headers) + lines, answer.body)

    # --- ending ---------------------------------------------------------------------------------

    def turn_away(self, error: RequestError, *, lingers: bool) -> None:
        """Say why before anything is asked, and close: at once only if the client's own words may reset the answer."""
        self._lingering = True
        self._begin(HttpRequest(RequestHead("GET", b"", [], keep_alive=False)))
        self.answer_error(error)
        return self._linger() if lingers else self.close()

    def part(self) -> None:
        """Let answers that have not begun say that they are the last on this connection."""
        self._parting = True
        if self._request is not None and not self.begun:
            self._close_after = True

    def drain(self, *, waits: bool = False) -> None:
        """Close once idle, who ``waits`` after a request; what is served or read may end."""
        self.part()
        self._draining = True
        if not self._busy and self._phase not in _READING:
            self._depart(waits=waits)

    def _depart(self, *, waits: bool = False) -> None:
        """Close, unless the client has asked something that has not been read yet: then after the answer."""
        if waits or (self._transport is not None and has_unread(self._transport)):
            self._watchdog.set(_LINGER_SECONDS)
        else:
            self.close()

    def stop(self) -> None:
        """Give up what is being served or read, with last words where they can be said."""
        if self._serving is not None:
            self._serving.cancel()
        elif self._phase in _READING and not self._lingering:
            self._refuse(NoWorker("The router is shutting down.", code="shutting_down"))
