"""Workers over their lives: down and up again, restarted, laid out anew, drained, removed."""

from __future__ import annotations

import asyncio

import pytest
import zmq.asyncio

from router.core.types import RankStatus
from router.errors import Conflict
from router.fleet import registry
from router.fleet.event_stream import EventStream
from router.fleet.probes import Probe, Verdict, judge, until_due
from router.settings import WorkerSpec
from tests.fakes.control_worker import Answers, ControlWorker, as_json
from tests.fakes.kv_publisher import KvPublisher, stored
from tests.fakes.registry_rig import Control, until


async def test_a_worker_that_is_down_is_reported_and_joins_when_it_comes(control: Control) -> None:
    """Down with a reason first, then its rank is READY; the registry never stopped."""
    worker = ControlWorker({})
    async with worker:
        pass
    entry = control.registry.add(WorkerSpec(url=worker.url))
    await until(lambda: entry.status is RankStatus.DOWN)
    assert entry.reason == f"nothing listens at {worker.url}/v1/models"
    assert control.statuses() == []
    async with worker:
        await until(lambda: entry.status is RankStatus.READY)
        assert control.statuses() == [(f"{worker.name}/0", RankStatus.READY)]
        assert control.greeted == [worker.name]
        assert entry.reason == ""


async def test_a_fault_at_one_worker_ends_no_other(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker's stream raises what nobody foresaw: it is DOWN with a reason and comes in anew; the other stays."""
    run = EventStream.run

    async def fail(stream: EventStream) -> None:
        monkeypatch.setattr(EventStream, "run", run)
        raise KeyError("lost")

    monkeypatch.setattr(registry, "_LAST_RETRY_SECONDS", 0.5)
    monkeypatch.setattr(EventStream, "run", fail)
    source = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:9", "block_size": 4}
    async with ControlWorker({}) as good, ControlWorker({"/kv_event_sources": as_json({"0": source})}) as bad:
        control.registry.add(WorkerSpec(url=good.url, id="good"))
        entry = control.registry.add(WorkerSpec(url=bad.url, id="bad"))
        await until(lambda: entry.status is RankStatus.DOWN)
        assert "KeyError('lost')" in entry.reason
        await until(lambda: entry.status is RankStatus.READY)
        assert sorted(control.statuses()) == [("bad/0", RankStatus.READY), ("good/0", RankStatus.READY)]


async def test_one_target_for_each_rank(control: Control) -> None:
    """A worker of three ranks is three targets, all ready at once."""
    async with ControlWorker({}) as worker:
        control.registry.add(WorkerSpec(url=worker.url, id="w", dp_size=3))
        await until(lambda: len(control.statuses()) == 3 and control.statuses()[0][1] is RankStatus.READY)
        assert control.statuses() == [(f"w/{rank}", RankStatus.READY) for rank in range(3)]
        assert [member.target.rank for member in control.fleet.members()] == [0, 1, 2]


async def test_failures_in_a_row_take_a_worker_down_and_one_success_brings_it_back(control: Control) -> None:
    """Its ranks stay known while it is down: what they hold may still be there."""
    async with ControlWorker({}) as worker:
        entry = control.registry.add(WorkerSpec(url=worker.url))
        await until(lambda: entry.status is RankStatus.READY)
        worker.answers["/health"] = (503, b"")
        await until(lambda: entry.status is RankStatus.DOWN)
        assert "answers /health that it cannot serve" in entry.reason
        assert control.statuses() == [(f"{worker.name}/0", RankStatus.DOWN)]
        worker.answers["/health"] = (200, b"")
        await until(lambda: entry.status is RankStatus.READY)
        assert control.statuses() == [(f"{worker.name}/0", RankStatus.READY)]


async def test_a_long_prefill_is_no_death(control: Control) -> None:
    """/health is silent while answers stream: READY. Silent without any: DOWN."""
    async with ControlWorker({}) as worker:
        entry = control.registry.add(WorkerSpec(url=worker.url))
        await until(lambda: entry.status is RankStatus.READY)
        control.streaming = True
        worker.answers["/health"] = None
        asked = worker.asked.count("GET /health")
        await until(lambda: worker.asked.count("GET /health") >= asked + 5)
        assert entry.status is RankStatus.READY
        control.streaming = False
        await until(lambda: entry.status is RankStatus.DOWN)
        assert "does not answer /health in time" in entry.reason


async def test_a_worker_that_comes_back_laid_out_anew_is_entered_anew(control: Control) -> None:
    """It serves another model and has two ranks now: the old rank goes, two new ones come."""
    async with ControlWorker({}) as worker:
        entry = control.registry.add(WorkerSpec(url=worker.url))
        await until(lambda: entry.status is RankStatus.READY)
        await worker.die()
        await until(lambda: entry.status is RankStatus.DOWN)
        worker.answers["/v1/models"] = as_json({"data": [{"id": "other"}]})
        worker.answers["/server_info"] = as_json({"page_size": 16, "dp_size": 2})
        async with worker:
            await until(lambda: len(control.statuses()) == 2)
            await until(lambda: entry.status is RankStatus.READY)
            assert {model for member in control.fleet.members() for model in member.models} == {"other"}


async def test_a_worker_whose_tokenizer_is_damaged_still_serves(control: Control) -> None:
    """The complaint is logged; requests go by text."""
    async with ControlWorker({}) as worker:
        entry = control.registry.add(WorkerSpec(url=worker.url, id="damaged"))
        await until(lambda: entry.status is RankStatus.READY)
        assert "tokenizer.json cannot be read" in control.log.getvalue()


async def test_removing_and_adding_again_starts_from_nothing(control: Control) -> None:
    """What the rank held is forgotten with it; the events of its idle publisher are read anew."""
    context = zmq.asyncio.Context()
    publisher = KvPublisher(context)
    source = await publisher.start()
    entry = {
        "publisher": "zmq",
        "endpoint": source.endpoint,
        "replay_endpoint": source.replay_endpoint,
        "topic": "kv-events",
        "block_size": 4,
    }
    async with ControlWorker({"/kv_event_sources": as_json({"0": entry})}) as worker:
        control.registry.add(WorkerSpec(url=worker.url, id="w"))
        await publisher.subscribed()
        await publisher.publish(stored(0))
        await publisher.publish(stored(1))
        await until(lambda: [rank.resident_blocks for rank in control.fleet.ranks()] == [2])
        await control.registry.remove("w")
        assert control.fleet.ranks() == []
        control.registry.add(WorkerSpec(url=worker.url, id="w"))
        await until(lambda: [rank.resident_blocks for rank in control.fleet.ranks()] == [2])
    await publisher.stop()
    context.destroy(linger=0)


async def test_a_drained_worker_stays_drained_through_an_outage(control: Control) -> None:
    """An operator's word outlives a failure; taking it back makes it ready."""
    async with ControlWorker({}) as worker:
        entry = control.registry.add(WorkerSpec(url=worker.url))
        await until(lambda: entry.status is RankStatus.READY)
        control.registry.drain(worker.name)
        assert entry.status is RankStatus.DRAINING
        worker.answers["/health"] = (503, b"")
        await until(lambda: entry.status is RankStatus.DOWN)
        worker.answers["/health"] = (200, b"")
        await until(lambda: entry.status is RankStatus.DRAINING)
        control.registry.undrain(worker.name)
        assert entry.status is RankStatus.READY


async def test_a_reset_empties_the_picture_at_once(control: Control) -> None:
    """vLLM would tell of it only with its next step."""
    context = zmq.asyncio.Context()
    publisher = KvPublisher(context)
    source = await publisher.start()
    answers = {
        "/kv_event_sources": as_json({"0": {"publisher": "zmq", "endpoint": source.endpoint, "block_size": 4}}),
        "/reset_prefix_cache": as_json({"success": True}),
    }
    async with ControlWorker(answers) as worker:
        control.registry.add(WorkerSpec(url=worker.url, id="w"))
        await publisher.subscribed()
        await publisher.publish(stored(0))
        await until(lambda: [rank.resident_blocks for rank in control.fleet.ranks()] == [1])
        await control.registry.reset_cache("w")
        assert [rank.resident_blocks for rank in control.fleet.ranks()] == [0]
    await publisher.stop()
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("seen", "failed", "has_progress", "expected"),
    [
        (Probe.ALIVE, 2, False, (0, Verdict.UP)),
        (Probe.REFUSED, 0, False, (1, Verdict.UNCHANGED)),
        (Probe.REFUSED, 2, False, (3, Verdict.DOWN)),
        (Probe.REFUSED, 2, True, (3, Verdict.DOWN)),
        (Probe.UNWELL, 2, True, (3, Verdict.DOWN)),
        (Probe.SILENT, 2, False, (3, Verdict.DOWN)),
        (Probe.SILENT, 2, True, (2, Verdict.UNCHANGED)),
        (Probe.REFUSED, 7, False, (8, Verdict.DOWN)),
    ],
)
def test_the_judgement_over_probes(seen: Probe, failed: int, has_progress: bool, expected: tuple[int, Verdict]) -> None:
    """Three failures in a row are down, one success is up, silence while streaming is neither."""
    assert judge(seen, failed_before=failed, failures_allowed=3, has_progress=has_progress) == expected


async def test_a_doubted_worker_is_probed_soon() -> None:
    """Not when its next probe is due: every request until then would find out for itself."""
    doubted = asyncio.Event()
    doubted.set()
    async with asyncio.timeout(20):
        await until_due(doubted, interval_seconds=3600.0)
    assert not doubted.is_set()


def started(seconds: float) -> tuple[int, bytes]:
    """A worker's ``/metrics`` with the time at which its process started."""
    return 200, f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {seconds}\n".encode()


@pytest.mark.parametrize("answers", [{}, {"/metrics": started(5.0)}])
async def test_one_server_under_two_names_is_entered_once(control: Control, answers: Answers) -> None:
    """localhost beside 127.0.0.1: the second is down with the reason, and comes in when the first is removed."""
    async with ControlWorker(answers) as worker:
        first = control.registry.add(WorkerSpec(url=worker.url, id="first"))
        await until(lambda: first.status is RankStatus.READY)
        second = control.registry.add(WorkerSpec(url=f"http://localhost:{worker.port}", id="second"))
        await until(lambda: second.status is RankStatus.DOWN)
        assert second.reason == (
            f"http://localhost:{worker.port} is the same server as worker 'first' at {worker.url}, "
            "which is registered already"
        )
        assert control.statuses() == [("first/0", RankStatus.READY)]
        await control.registry.remove("first")
        await until(lambda: control.statuses() == [("second/0", RankStatus.READY)])


async def test_of_two_that_start_together_one_comes_in(control: Control) -> None:
    """Neither waits for the other, and which is first does not matter."""
    async with ControlWorker({}) as worker:
        entries = [
            control.registry.add(WorkerSpec(url=url, id=name))
            for name, url in (("a", worker.url), ("b", f"http://localhost:{worker.port}"))
        ]
        await until(lambda: {entry.status for entry in entries} == {RankStatus.READY, RankStatus.DOWN})
        assert len(control.statuses()) == 1


async def test_a_shim_is_known_by_its_epoch_wherever_it_is_reached(control: Control) -> None:
    """Two ports that lead to one process, as through a forwarded port; another process is another worker."""
    context = zmq.asyncio.Context()
    publisher = KvPublisher(context)
    source = await publisher.start()

    def epoch(name: str) -> tuple[int, bytes]:
        entry = {"publisher": "zmq", "endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint}
        return as_json({"0": {**entry, "topic": "kv-events", "block_size": 4, "epoch": name}})

    async with (
        ControlWorker({"/kv_event_sources": epoch("e1")}) as worker,
        ControlWorker({"/kv_event_sources": epoch("e1")}) as forwarded,
    ):
        first = control.registry.add(WorkerSpec(url=worker.url))
        await until(lambda: first.status is RankStatus.READY)
        second = control.registry.add(WorkerSpec(url=forwarded.url))
        await until(lambda: second.status is RankStatus.DOWN)
        assert "is the same server as" in second.reason
        forwarded.answers["/kv_event_sources"] = epoch("e2")
        await until(lambda: second.status is RankStatus.READY)
        assert first.status is RankStatus.READY
        forwarded.answers["/health"] = (503, b"")
        await until(lambda: second.status is RankStatus.DOWN)
        forwarded.answers |= {"/health": (200, b""), "/kv_event_sources": epoch("e1")}
        await until(lambda: "is the same server as" in second.reason)
        assert control.statuses() == [(f"{worker.name}/0", RankStatus.READY)]
    await publisher.stop()
    context.destroy(linger=0)


async def test_processes_behind_one_address_are_told_apart(control: Control) -> None:
    """One port that answers for two hosts: by when they started, they are two."""
    async with ControlWorker({"/metrics": started(5.0)}) as worker:
        first = control.registry.add(WorkerSpec(url=worker.url))
        await until(lambda: first.status is RankStatus.READY)
        worker.by_host["localhost"] = {"/metrics": started(6.0)}
        second = control.registry.add(WorkerSpec(url=f"http://localhost:{worker.port}"))
        await until(lambda: second.status is RankStatus.READY)
        assert first.status is RankStatus.READY


async def test_a_restart_does_not_let_the_double_in(control: Control) -> None:
    """The new process is the first worker's still, though the double sees it first."""
    async with ControlWorker({"/metrics": started(5.0)}) as worker:
        first = control.registry.add(WorkerSpec(url=worker.url, id="first"))
        await until(lambda: first.status is RankStatus.READY)
        worker.answers["/metrics"] = started(6.0)
        second = control.registry.add(WorkerSpec(url=f"http://localhost:{worker.port}", id="second"))
        await until(lambda: second.status is RankStatus.DOWN)
        assert control.statuses() == [("first/0", RankStatus.READY)]


async def test_joining_refuses_a_double_at_once_and_takes_what_is_down(control: Control) -> None:
    """An operator hears of it in the answer; a worker that cannot be asked yet is taken, as ever."""
    async with ControlWorker({}) as worker:
        first = await control.registry.join(WorkerSpec(url=worker.url, id="first"))
        await until(lambda: first.status is RankStatus.READY)
        with pytest.raises(Conflict, match=r"is the same server as worker 'first' at .* already\.$"):
            await control.registry.join(WorkerSpec(url=f"http://localhost:{worker.port}"))
        gone = await control.registry.join(WorkerSpec(url="http://127.0.0.1:9"))
        assert [entry.name for entry in control.registry.workers()] == ["first", gone.name]
