"""Two shims exchange parcels over TCP: the receiver asks for one by its key, waits for it, and says that it has it.

A frame is a big-endian u32 length and as many bytes of msgpack::

    receiver                      sender
    --------                      ------
    Ask(key, known_pages)  ---->  waits until the key is offered
                           <----  Parcel, or a text that says why there is none
    b"\\x01"                ---->  the offer is taken

Whoever closes the connection before that has given up, and the other side hears of it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_shim.transfer.parcel import Parcel

_LENGTH = struct.Struct(">I")
_TAKEN = b"\x01"
_MAX_ASK_BYTES = 4096


class TransferError(Exception):
    """A parcel was not to be had; the message says why."""


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """What a receiver wants, and how many pages of it it holds already."""

    key: str
    known_pages: int


@dataclass(slots=True)
class Offer:
    """One key, as both sides wait for each other. Futures are made by whoever comes first."""

    parcel: asyncio.Future[Parcel]
    taken: asyncio.Future[None]
    is_made: bool = False
    is_asked: bool = False
    expiry: asyncio.TimerHandle | None = None


class Offers:
    """What a shim has for others, by key. A key is used once; what nobody fetches is forgotten after ``seconds``."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds
        self._offers: dict[str, Offer] = {}
        self._server: asyncio.Server | None = None

    def __len__(self) -> int:
        return len(self._offers)

    async def listen(self, door: socket.socket) -> None:
        """Serve receivers on a socket that is bound already."""
        self._server = await asyncio.start_server(self._serve, sock=door)

    def close(self) -> None:
        """Let nobody in any more, and give up on all."""
        if self._server is not None:
            self._server.close()
        for key in tuple(self._offers):
            self.withdraw(key, "the shim is stopping")

    # --- the sender's side ----------------------------------------------------------------------

    def announce(self, key: str) -> None:
        """A parcel will be made for this key. Raises ``TransferError`` if there is one already."""
        offer = self._find(key)
        if offer.is_made:
            raise TransferError(f"{key} is in use")
        offer.is_made = True

    def offer(self, key: str, parcel: Parcel) -> asyncio.Future[None]:
        """It is made. The future ends when a receiver has it, or with ``TransferError`` when none will."""
        found = self._find(key)
        if not found.parcel.done():
            found.parcel.set_result(parcel)
        return found.taken

    def withdraw(self, key: str, why: str) -> None:
        """There is, or will be, no such parcel."""
        offer = self._offers.pop(key, None)
        if offer is None:
            return
        if offer.expiry is not None:
            offer.expiry.cancel()
        for future in (offer.parcel, offer.taken):
            if not future.done():
                future.set_exception(TransferError(why))
                future.exception()  # perhaps nobody waits for it

    def _find(self, key: str) -> Offer:
        found = self._offers.get(key)
        if found is None:
            loop = asyncio.get_running_loop()
            found = self._offers[key] = Offer(loop.create_future(), loop.create_future())
            found.expiry = loop.call_later(self._seconds, self.withdraw, key, f"{key} was not fetched in time")
        return found

    # --- the receiver's side --------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key: str | None = None
        try:
            ask = msgspec.msgpack.decode(await _read_frame(reader, most=_MAX_ASK_BYTES), type=Ask)
            offer = self._find(ask.key)
            if offer.is_asked:
                await _write_frame(writer, msgspec.msgpack.encode(f"{ask.key} is asked for twice"))
                return
            offer.is_asked = True
            key = ask.key
            gone = asyncio.ensure_future(reader.readexactly(1))
            try:
                either: list[asyncio.Future[Any]] = [gone, offer.parcel]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return  # before there was anything to take
                try:
                    answer = msgspec.msgpack.encode(offer.parcel.result().without(ask.known_pages))
                except TransferError as error:
                    answer = msgspec.msgpack.encode(str(error))
                await _write_frame(writer, answer)
                if await gone == _TAKEN and not offer.taken.done():
                    offer.taken.set_result(None)
            finally:
                gone.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError, asyncio.IncompleteReadError):
                    await gone
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError, TransferError):
            pass
        finally:
            if key is not None:
                self.withdraw(key, "the receiver gave up")
            writer.close()


async def fetch(host: str, port: int, ask: Ask, *, seconds: float, take: Callable[[Parcel], Awaitable[None]]) -> None:
    """Get a parcel from the shim at this address. It counts as taken once ``take`` has dealt with it.

    Raises ``TransferError``. Cancelled, it hangs up.
    """
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await _write_frame(writer, msgspec.msgpack.encode(ask))
                answer = msgspec.msgpack.decode(await _read_frame(reader), type=Parcel | str)
                if isinstance(answer, str):
                    raise TransferError(answer)
                await take(answer)
                writer.write(_TAKEN)
                await writer.drain()
            finally:
                writer.close()
    except TimeoutError as error:
        raise TransferError(f"{ask.key} did not come in time") from error
    except asyncio.IncompleteReadError as error:
        raise TransferError(f"the prefill worker broke off before {ask.key} was there") from error
    except (OSError, msgspec.DecodeError) as error:
        raise TransferError(f"the prefill worker cannot be reached for {ask.key}") from error


async def _read_frame(reader: asyncio.StreamReader, *, most: int = 0xFFFFFFFF) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > most:
        raise TransferError("a frame is too long")
    return await reader.readexactly(length)


async def _write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.writelines((_LENGTH.pack(len(data)), data))
    await writer.drain()
