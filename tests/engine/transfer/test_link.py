"""Two shims over a socket: who waits for whom, and what either hears when the other gives up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from engine_shim.transfer.link import Ask, Offers, TransferError, fetch
from engine_shim.transfer.parcel import Parcel, Run
from tests.fakes.ports import reserve

PARCEL = Parcel("m", 3, 16, [Run(0, [b"a", b"b", b"c"], True)])


@asynccontextmanager
async def offers(*, seconds: float = 5.0) -> AsyncIterator[tuple[Offers, int]]:
    made = Offers(seconds=seconds)
    door = socket.create_server(("127.0.0.1", 0))
    await made.listen(door)
    try:
        yield made, door.getsockname()[1]
    finally:
        made.close()
        await until(lambda: len(made) == 0)


async def receive(port: int, key: str, *, known: int = 0, seconds: float = 5.0) -> Parcel:
    got: list[Parcel] = []

    async def take(parcel: Parcel) -> None:
        got.append(parcel)

    await fetch("127.0.0.1", port, Ask(key, known), seconds=seconds, take=take)
    return got[0]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.005)


async def until_asked(made: Offers, key: str) -> None:
    """A receiver's question has arrived."""
    await until(lambda: key in made._offers and made._offers[key].is_asked)


@pytest.mark.parametrize("is_early", [True, False])
async def test_either_may_come_first(*, is_early: bool) -> None:
    """A receiver that asks before there is anything waits; the sender hears when it has it."""
    async with offers() as (made, port):
        receiver = asyncio.create_task(receive(port, "k"))
        if is_early:
            await until_asked(made, "k")
        made.announce("k")
        taken = made.offer("k", PARCEL)
        assert await receiver == PARCEL
        await asyncio.wait_for(taken, 10)


async def test_only_what_is_missing_is_sent() -> None:
    """A receiver with two pages gets the third."""
    async with offers() as (made, port):
        made.offer("k", PARCEL)
        assert await receive(port, "k", known=2) == Parcel("m", 3, 16, [Run(2, [b"c"], True)])


async def test_a_sender_that_gives_up() -> None:
    """Whoever waits hears why, at once; a key may then be used by nobody."""
    async with offers() as (made, port):
        made.announce("k")
        receiver = asyncio.create_task(receive(port, "k"))
        await until_asked(made, "k")
        made.withdraw("k", "the prefill request has ended")
        with pytest.raises(TransferError, match="has ended"):
            await receiver


@pytest.mark.parametrize("is_offered", [True, False])
async def test_a_receiver_that_leaves(*, is_offered: bool) -> None:
    """Before it has taken the parcel: the sender waits no longer."""
    async with offers() as (made, port):
        made.announce("k")
        if is_offered:
            taken = made.offer("k", PARCEL)
        started = asyncio.Event()

        async def stall(_: Parcel) -> None:
            started.set()
            await asyncio.sleep(60)

        receiver = asyncio.create_task(fetch("127.0.0.1", port, Ask("k", 0), seconds=5, take=stall))
        await (started.wait() if is_offered else until_asked(made, "k"))
        receiver.cancel()
        if is_offered:
            with pytest.raises(TransferError, match="gave up"):
                await asyncio.wait_for(taken, 4)  # before its own time is over
        else:
            await until(lambda: len(made) == 0)


async def test_a_room_is_entered_once() -> None:
    """A second sender or receiver for a key is refused: two requests never share one."""
    async with offers() as (made, port):
        made.announce("k")
        with pytest.raises(TransferError, match="in use"):
            made.announce("k")
        first = asyncio.create_task(receive(port, "k"))
        await until_asked(made, "k")
        with pytest.raises(TransferError, match="twice"):
            await receive(port, "k")
        made.offer("k", PARCEL)
        assert await first == PARCEL


async def test_nobody_waits_for_ever() -> None:
    """Neither a receiver without sender nor a sender without receiver; a shim that is down is an error."""
    async with offers(seconds=0.1) as (made, port):
        with pytest.raises(TransferError, match="did not come in time"):
            await receive(port, "k", seconds=0.05)
        taken = made.offer("other", PARCEL)
        with pytest.raises(TransferError, match="not fetched in time"):
            await asyncio.wait_for(taken, 10)
    with reserve() as nobody, pytest.raises(TransferError, match="cannot be reached"):
        await receive(nobody.getsockname()[1], "k")


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x03abc", b"\xff\xff\xff\xff", b""])
async def test_noise_at_the_door(noise: bytes) -> None:
    """Whoever speaks something else is hung up on, and nothing is left."""
    async with offers() as (made, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert len(made) == 0
