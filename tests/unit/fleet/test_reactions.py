"""Work in slices: in order, with turns for others between, and whole batches told from parts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx

from router.fleet.reactions import SLICE_BLOCKS, Reactions, slices
from router.fleet.worker_api import fetch_snapshot
from router.wire.kv_events import BlockRemoved, BlockStored, EventBatch, Snapshot, encode_snapshot


async def test_what_happens_meanwhile_is_reacted_to_afterwards() -> None:
    """A long reaction is under way when two more things happen; others run between its slices."""
    done: list[str] = []

    def react(name: str) -> Iterator[None]:
        for part in range(3 if name == "long" else 1):
            if part:
                yield
            done.append(f"{name} {part}")

    reactions = Reactions(react)
    async with asyncio.TaskGroup() as tasks:
        reactions.add("short", tasks)
        assert done == ["short 0"]
        reactions.add("long", tasks)
        reactions.add("next", tasks)
        reactions.add("last", tasks)
        assert done == ["short 0", "long 0"]
        tasks.create_task(asyncio.sleep(0)).add_done_callback(lambda _: done.append("another"))
        await reactions.over()
    done.remove("another")
    assert done == ["short 0", "long 0", "long 1", "long 2", "next 0", "last 0"]
    async with asyncio.TaskGroup() as tasks:
        reactions.add("again", tasks)
        assert done[-1] == "again 0"


def test_a_batch_is_cut_where_it_gets_long() -> None:
    """By its blocks and its events; one event is never cut, and the last part is said to be it."""
    long, short = BlockStored(tuple(range(SLICE_BLOCKS)), None, (), 16), BlockRemoved((1,))
    for events, parts in (
        ((), [0]),
        ((short,) * 5, [5]),
        ((long,), [1]),
        ((long, long, short), [1, 1, 1]),
        ((short,) * 1000, [482, 482, 36]),  # 8192 / 17 blocks
    ):
        batch = EventBatch(1.5, events, 3, "e")
        cut = [*slices(batch)]
        assert [len(part.events) for part, _ in cut] == parts
        assert [is_last for _, is_last in cut] == [False] * (len(parts) - 1) + [True]
        assert tuple(event for part, _ in cut for event in part.events) == events
        assert {(part.timestamp, part.rank, part.epoch) for part, _ in cut} == {(1.5, 3, "e")}


async def test_a_large_snapshot_is_read_in_slices() -> None:
    """Of twenty thousand blocks, a megabyte or two: others get their turns while it is decoded."""
    blocks = tuple(BlockStored((number,), None, (number,) * 16, 16) for number in range(20_000))
    snapshot = Snapshot(7, EventBatch(1.5, blocks, 0, "e"))
    body = encode_snapshot(snapshot)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, content=body))) as client:
        counting = asyncio.create_task(count_turns())
        found = await fetch_snapshot(client, "http://worker:1", "/kv_snapshot")
        counting.cancel()
    assert found.sequence == 7
    assert [event.hashes for event in found.batch.events if isinstance(event, BlockStored)] == [
        block.hashes for block in blocks
    ]
    assert turns > len(body) / 2**17
