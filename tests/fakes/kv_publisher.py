"""A rank's event publisher with vLLM's framing, that loses what it is told to lose. Real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio

from router.wire.kv_events import (
    REPLAY_END,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventSource,
    decode_sequence,
    encode_batch,
    encode_sequence,
)

BLOCK_TOKENS = 4


def stored(number: int, parent: int | None = None) -> BlockStored:
    """A block whose hash and tokens follow from its number."""
    tokens = tuple(range(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS))
    return BlockStored(hashes=(number,), parent=parent, token_ids=tokens, block_tokens=BLOCK_TOKENS)


def removed(number: int) -> BlockRemoved:
    """That block gone."""
    return BlockRemoved(hashes=(number,))


_NONSENSE = b"\xc1 nonsense"


class KvPublisher:
    """One process's publisher. ``port`` and ``replay_port`` 0 are chosen; a new one may take an old one's ports."""

    def __init__(self, context: zmq.asyncio.Context, *, epoch: str | None = None, kept: int = 10_000) -> None:
        self.epoch = epoch
        self.log: list[bytes] = []
        self.kept = kept
        self.replays: list[int] = []
        self.answers_replays = True
        self._live = context.socket(zmq.XPUB)
        self._replay = context.socket(zmq.ROUTER)
        self._live.linger = self._replay.linger = 0
        self._replay.sndhwm = 0
        self._serving: asyncio.Task[None] | None = None

    async def start(self, *, port: int = 0, replay_port: int = 0) -> EventSource:
        """Bind, retrying while an old publisher still lets go of the ports."""
        for socket, wanted in ((self._live, port), (self._replay, replay_port)):
            async with asyncio.timeout(10):
                while True:
                    try:
                        socket.bind(f"tcp://127.0.0.1:{wanted or '*'}")
                        break
                    except zmq.ZMQError:
                        await asyncio.sleep(0.02)
        self._serving = asyncio.create_task(self._serve())
        return EventSource(
            rank=0,
            endpoint=self._live.last_endpoint.decode().rstrip("\0"),
            replay_endpoint=self._replay.last_endpoint.decode().rstrip("\0"),
            topic="kv-events",
            epoch=self.epoch,
            block_tokens=BLOCK_TOKENS,
        )

    async def subscribed(self) -> None:
        """Wait until somebody listens."""
        await asyncio.wait_for(self._live.recv(), 10)

    async def publish(
        self,
        *events: Event,
        lost: bool = False,
        damaged: bool = False,
        damaged_on_the_way: bool = False,
        at: float | None = None,
    ) -> None:
        """Send one message, by default of now; one that is lost, or damaged on the way, is kept whole for replays."""
        batch = EventBatch(timestamp=time.time() if at is None else at, events=events, rank=0, epoch=self.epoch)
        self.log.append(_NONSENSE if damaged else encode_batch(batch))
        if not lost:
            payload = _NONSENSE if damaged_on_the_way else self.log[-1]
            await self._live.send_multipart([b"kv-events", encode_sequence(len(self.log) - 1), payload])

    async def stop(self) -> None:
        """As a process that dies: both sockets go."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        self._live.close()
        self._replay.close()

    async def _serve(self) -> None:
        while True:
            client, empty, start = await self._replay.recv_multipart()
            assert empty == b""
            first = decode_sequence(start)
            self.replays.append(first)
            if not self.answers_replays:
                continue
            for sequence in range(max(first, len(self.log) - self.kept), len(self.log)):
                await self._send(client, [b"kv-events", encode_sequence(sequence), self.log[sequence]])
            await self._send(client, [b"", REPLAY_END, b""])

    async def _send(self, client: bytes, frames: Sequence[bytes]) -> None:
        await self._replay.send_multipart([client, b"", *frames])
