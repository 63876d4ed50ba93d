"""Workers that are replaced by others: there is no moment without a rank that can serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import pytest

from router.core.types import RankStatus
from router.core.ways import can_serve
from router.errors import NotFound
from router.fleet.worker import Worker
from router.settings import WorkerSpec
from tests.fakes.control_worker import ControlWorker, as_json
from tests.fakes.registry_rig import Control, until

READY = RankStatus.READY


def spec(worker: ControlWorker, name: str, **fields: object) -> WorkerSpec:
    return WorkerSpec.model_validate({"url": worker.url, "id": name, **fields})


def gone() -> WorkerSpec:
    """Of a worker where nobody listens."""
    return WorkerSpec(url="http://127.0.0.1:9", id="gone")


async def change(control: Control, *, leaving: Iterable[str] = (), joining: Iterable[WorkerSpec] = ()) -> None:
    assert await control.registry.change(leaving=leaving, joining=joining) == {}


async def started(control: Control, *specs: WorkerSpec) -> None:
    entries = [control.registry.add(each) for each in specs]
    await until(lambda: all(entry.status is READY for entry in entries))


def ranks(control: Control) -> list[str]:
    """All, in order; such as are not ready with what they are."""
    return sorted(name if status is READY else f"{name} {status}" for name, status in control.statuses())


@asynccontextmanager
async def served(control: Control) -> AsyncIterator[None]:
    """Look at every turn of the loop, as requests may come at any, that some rank can serve."""
    turns, unserved = 0, 0

    async def look() -> None:
        nonlocal turns, unserved
        while True:
            turns += 1
            unserved += not can_serve(control.fleet.view.ranks)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    try:
        yield
        while turns <= 10:  # noqa: ASYNC110 (of the loop, which may have stood still meanwhile)
            await asyncio.sleep(0)
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
    assert unserved == 0


async def test_the_last_worker_goes_when_its_successor_has_come(control: Control) -> None:
    """Until then it serves as it did, and log and list say for whom it waits."""
    green = ControlWorker({})
    async with green:
        pass
    async with ControlWorker({}) as blue:
        await started(control, spec(blue, "blue"))
        async with served(control):
            await change(control, leaving=["blue"], joining=[spec(green, "green")])
            await until(lambda: control.registry.worker("green").status is RankStatus.DOWN)
            [old] = control.registry.outgoing()
            assert (old.name, old.status, old.awaits) == ("blue", READY, {"green"})
            assert '"awaits": ["green"]' in control.log.getvalue()
            async with green:
                await until(lambda: ranks(control) == ["green/0"] and not control.registry.outgoing())
                await asyncio.sleep(0.05)


async def test_one_server_under_another_name(control: Control) -> None:
    """The new entry is no double of the one that leaves."""
    async with ControlWorker({}) as worker:
        await started(control, spec(worker, "a"))
        async with served(control):
            await change(control, leaving=["a"], joining=[spec(worker, "b")])
            await until(lambda: ranks(control) == ["b/0"])
            await asyncio.sleep(0.05)


async def test_one_name_at_another_address(control: Control) -> None:
    """Of two of one name one is in the fleet: the new one from the moment on at which it is known, and all that goes by
    the name is its own. That its events are slow to come keeps it from nothing.
    """
    silent = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:9", "block_size": 4}
    events = {"/kv_event_sources": as_json({"0": silent})}
    async with ControlWorker({}) as first, ControlWorker(events) as second:
        await started(control, spec(first, "w"))
        async with served(control):
            await change(control, leaving=["w"], joining=[WorkerSpec(url="http://127.0.0.1:9", id="w")])
            await until(lambda: control.registry.worker("w").status is RankStatus.DOWN)
            assert ranks(control) == ["w/0"]
            await change(control, leaving=["w"], joining=[spec(second, "w")])
            await until(lambda: control.registry.worker("w").status is READY)
            assert not control.registry.outgoing()
            await asyncio.sleep(0.05)
        assert [member.target.port for member in control.fleet.members()] == [second.port]
        labels = {"worker": "w", "rank": "0"}
        assert control.metrics.registry.get_sample_value("homing_rank_up", labels) == 1.0


async def test_names_may_be_exchanged(control: Control) -> None:
    """Each of two servers under the other's name; whichever is known first."""
    async with ControlWorker({}) as one, ControlWorker({}) as two:
        await started(control, spec(one, "a"), spec(two, "b"))
        async with served(control):
            await change(control, leaving=["a", "b"], joining=[spec(two, "a"), spec(one, "b")])
            await until(lambda: len(control.registry.outgoing()) == 0)
            await until(lambda: ranks(control) == ["a/0", "b/0"])
        ports = {str(member.id): member.target.port for member in control.fleet.members()}
        assert ports == {"a/0": two.port, "b/0": one.port}


async def test_the_same_worker_told_of_otherwise(control: Control) -> None:
    """Its ranks are entered anew, and serve from the first moment on."""
    async with ControlWorker({}) as worker:
        await started(control, spec(worker, "w"))
        async with served(control):
            await change(control, leaving=["w"], joining=[spec(worker, "w", engine="vllm")])
            await until(lambda: not control.registry.outgoing())
            assert ranks(control) == ["w/0"]


async def test_a_change_that_is_taken_back(control: Control) -> None:
    """The worker was never gone: its entry is the same, and what was to come in its place is forgotten."""
    async with ControlWorker({}) as worker:
        await started(control, spec(worker, "w"))
        [before] = control.registry.workers()
        async with served(control):
            await change(control, leaving=["w"], joining=[gone()])
            await change(control, leaving=["gone"], joining=[spec(worker, "w")])
            await asyncio.sleep(0.05)
        assert list(control.registry.workers()) == [before]
        assert before.awaits is None
        assert not control.registry.outgoing()


async def test_a_time_that_is_over_within_a_workers_task_is_not_its_end() -> None:
    """Such a time is over by a cancellation of the task, which is taken back a turn of the loop later."""
    worker = Worker(WorkerSpec(url="http://worker:1"))

    async def live() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        await asyncio.Event().wait()

    worker.life = asyncio.create_task(live())
    seen = []
    for _ in range(5):
        await asyncio.sleep(0)
        seen.append((worker.life.cancelling() > 0, worker.is_ending))
    assert (True, False) in seen
    assert (True, True) not in seen
    await worker.end()
    assert worker.is_ending


async def test_who_need_not_be_waited_for(control: Control) -> None:
    """Where nobody is to come in its place a worker goes at once."""
    async with ControlWorker({}) as first, ControlWorker({}) as second:
        await started(control, spec(first, "a"), spec(second, "b"))
        await change(control, leaving=["a"], joining=[gone()])
        assert ranks(control) == ["a/0", "b/0"]
        await change(control, leaving=["gone"])
        assert ranks(control) == ["b/0"]
        await change(control, leaving=["b"])
        assert ranks(control) == []
        assert not control.registry.outgoing()
        assert not control.registry.workers()


async def test_as_many_go_as_have_come(control: Control) -> None:
    """Of three that are replaced by three, of whom one is ready, one goes: the fleet keeps its size."""
    late = [ControlWorker({}) for _ in range(2)]
    for each in late:
        async with each:
            pass
    async with ControlWorker({}) as a, ControlWorker({}) as b, ControlWorker({}) as c, ControlWorker({}) as first:
        await started(control, spec(a, "a"), spec(b, "b"), spec(c, "c"))
        joining = [spec(first, "first"), spec(late[0], "second"), spec(late[1], "third")]
        await change(control, leaving=["a", "b", "c"], joining=joining)
        await until(lambda: ranks(control) == ["b/0", "c/0", "first/0"])
        await asyncio.sleep(0.1)
        assert len(control.registry.outgoing()) == 2
        async with late[0]:
            await until(lambda: ranks(control) == ["c/0", "first/0", "second/0"])
            async with late[1]:
                await until(lambda: ranks(control) == ["first/0", "second/0", "third/0"])
                await until(lambda: not control.registry.outgoing())


async def test_another_model_is_no_relief(control: Control) -> None:
    """A worker stays while another that was listed with its successor is ready for something else."""
    models = as_json({"object": "list", "data": [{"id": "x", "max_model_len": 4096}]})
    async with ControlWorker({}) as old, ControlWorker({"/v1/models": models}) as other:
        await started(control, spec(old, "old"))
        await change(control, leaving=["old"], joining=[spec(other, "other"), gone()])
        await until(lambda: control.registry.worker("other").status is READY)
        assert ranks(control) == ["old/0", "other/0"]
        await change(control, leaving=["gone"])
        assert ranks(control) == ["other/0"]


async def test_a_worker_on_its_way_out_that_is_laid_out_anew(control: Control) -> None:
    """It comes in again as it is now, and waits as it did."""
    async with ControlWorker({}) as worker:
        await started(control, spec(worker, "w"))
        await change(control, leaving=["w"], joining=[WorkerSpec(url="http://127.0.0.1:9", id="w")])
        [old] = control.registry.outgoing()
        worker.answers["/v1/models"] = as_json({"object": "list", "data": [{"id": "x", "max_model_len": 4096}]})
        worker.answers["/health"] = (503, b"")
        await until(lambda: old.failed_probes > 0)
        worker.answers["/health"] = (200, b"")
        await until(lambda: [(str(each.id), each.models) for each in control.fleet.ranks()] == [("w/0", ("x",))])
        await until(lambda: ranks(control) == ["w/0"])
        assert list(control.registry.outgoing()) == [old]


async def test_what_is_removed_by_hand_goes_at_once(control: Control) -> None:
    """Also one that was to stay for a while; but for want of a successor that was removed by hand it does not go."""
    async with ControlWorker({}) as worker:
        await started(control, spec(worker, "w"))
        await change(control, leaving=["w"], joining=[gone()])
        await control.registry.remove("gone")
        assert ranks(control) == ["w/0"]
        assert [each.name for each in control.registry.outgoing()] == ["w"]
        await control.registry.remove("w")
        assert ranks(control) == []
        with pytest.raises(NotFound):
            control.registry.worker("w")
