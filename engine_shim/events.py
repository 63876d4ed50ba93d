"""The cache events of one rank on the wire: a ZMQ publisher, and a socket that replays what was missed.

Framing is vLLM's. Live: ``[topic, sequence, payload]``, the sequence a big-endian u64 from 0. Replay, asked by a DEALER
with ``[b"", first sequence]``: ``[b"", topic, sequence, payload]`` for each message still kept, then
``[b"", b"", ff*8, b""]``. A reader that asks for more than is kept gets the oldest that is there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import structlog
import zmq

from router.wire.kv_events import (
    REPLAY_END,
    Event,
    EventBatch,
    Snapshot,
    decode_sequence,
    encode_batch,
    encode_sequence,
)

TOPIC = "kv-events"
BUFFER_BATCHES = 10_000
HIGH_WATER_MARK = 100_000

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a rank's publisher listens; port 0 lets the system choose."""

    host: str
    port: int
    replay_port: int

    @property
    def live(self) -> str:
        """The address to subscribe to; ``*`` where every interface listens, as vLLM writes it."""
        return f"tcp://{self._shown}:{self.port}"

    @property
    def replay(self) -> str:
        """The address that answers replays."""
        return f"tcp://{self._shown}:{self.replay_port}"

    @property
    def _shown(self) -> str:
        return "*" if self.host in ("0.0.0.0", "::", "") else self.host  # noqa: S104


class EventPublisher:
    """Publishes one rank's events. ``publish`` and ``snapshot`` belong to the engine's thread alone.

    The live socket is used by that thread only, so messages leave in the order of the steps; a thread of the
    publisher's own answers replays, also while a step computes.
    """

    def __init__(self, wanted: Endpoints, *, rank: int, epoch: str) -> None:
        """Bind both sockets. Raises ``zmq.ZMQError`` where an address is taken."""
        self.rank = rank
        self.epoch = epoch
        self._sequence = 0
        self._topic = TOPIC.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_BATCHES)
        self._kept_lock = threading.Lock()
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        try:
            self._live.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
            # A ROUTER drops what exceeds its mark; a whole buffer must fit in one answer.
            self._replay.setsockopt(zmq.SNDHWM, 0)
            port = _bind(self._live, wanted.host, port=wanted.port)
            replay_port = _bind(self._replay, wanted.host, port=wanted.replay_port)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.endpoints = Endpoints(wanted.host, port, replay_port)
        self._thread = threading.Thread(target=self._serve_replays, name=f"replay-{rank}", daemon=True)
        self._thread.start()

    def publish(self, events: tuple[Event, ...]) -> None:
        """Send one step's events as one message; a step without events sends nothing."""
        if not events:
            return
        payload = encode_batch(self._batch(events))
        with self._kept_lock:
            self._kept.append((self._sequence, payload))
        self._live.send_multipart((self._topic, encode_sequence(self._sequence), payload))
        self._sequence += 1

    def snapshot(self, events: tuple[Event, ...]) -> Snapshot:
        """Wrap the events that rebuild the present state with the sequence number they are true at."""
        return Snapshot(sequence=self._sequence - 1, batch=self._batch(events))

    def close(self) -> None:
        """Stop answering and close. Call it after the engine's thread has ended."""
        self._live.close(linger=200)
        self._context.term()  # wakes the replay thread, which closes its own socket
        self._thread.join()

    def _batch(self, events: tuple[Event, ...]) -> EventBatch:
        return EventBatch(timestamp=time.time(), events=events, rank=self.rank, epoch=self.epoch)

    def _serve_replays(self) -> None:
        try:
            while True:
                self._answer(self._replay.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            self._replay.close(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("replay_request_malformed", rank=self.rank, frames=len(frames))
            return
        client, first = frames[0], decode_sequence(frames[2])
        with self._kept_lock:
            kept = [message for message in self._kept if message[0] >= first]
        for sequence, payload in kept:
            self._replay.send_multipart((client, b"", self._topic, encode_sequence(sequence), payload))
        self._replay.send_multipart((client, b"", b"", REPLAY_END, b""))


def _bind(socket: zmq.Socket[bytes], host: str, *, port: int) -> int:
    shown = f"[{host}]" if ":" in host else host
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(f"tcp://{shown}:{port or '*'}")
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
