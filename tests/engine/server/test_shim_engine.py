"""A rank's thread in isolation: failures are told to everybody, nothing waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from engine_rig import answer, read_all, request, running

from engine_shim.cache.integrity import IntegrityError
from engine_shim.engine import Engine, EngineStopped
from engine_shim.events import Endpoints, EventPublisher
from engine_shim.mailbox import Delta, Mailbox
from engine_shim.model.tokenizer import read_card
from engine_shim.runner.shadow import ShadowError
from engine_shim.schedule.scheduler import Scheduler
from engine_shim.server import ServedModel, create_app
from engine_shim.types import (
    Batch,
    FinishReason,
    Sampled,
    TokenLogprob,
)
from router.wire.kv_events import Event


class StepRunner:
    """Answers 7; ``before`` runs first, in the engine's thread."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before = before

    def run(self, batch: Batch) -> list[Sampled]:
        self.before()
        return [Sampled((7,)) for chunk in batch.chunks if chunk.samples]


class DamagedScheduler(Scheduler):
    """A scheduler whose cache contradicts itself once it is idle."""

    def check_integrity(self) -> None:
        raise IntegrityError("page 3 is held twice")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - polls what another thread changes
            await asyncio.sleep(0.005)


async def test_a_failed_step_costs_its_requests_only() -> None:
    """Any number of steps may fail as long as two in a row are the most; the next request is served."""
    steps = iter(["fail", "fail", "run", "fail", "run"])

    def maybe() -> None:
        if next(steps) == "fail":
            raise RuntimeError("out of memory")

    async with running(StepRunner(maybe)) as engine:
        for name in ("a", "b", "c", "d", "e"):
            box = Mailbox(1)
            engine.submit(request(name, tokens=1), mailbox=box, index=0)
            expected = Delta(0, (7,), FinishReason.LENGTH) if name in "ce" else Delta(0, (), FinishReason.ERROR)
            assert await read_all(box) == [expected]
        assert engine.accepts
        assert await engine.reset_cache() is True


async def test_the_parts_of_a_requests_time_add_up() -> None:
    """Inference is prefill and decode; with the queue before them they are no longer than the whole."""
    async with running(StepRunner(lambda: time.sleep(0.01))) as engine:
        await answer(engine, "a", tokens=4)
        seen = engine.latencies
    assert seen.prefill.sum >= 0.01
    assert seen.decode.sum >= 3 * 0.01
    assert seen.inference.sum == pytest.approx(seen.prefill.sum + seen.decode.sum)
    assert seen.queue.sum + seen.inference.sum <= seen.end_to_end.sum


async def test_a_request_that_never_ran_has_no_parts() -> None:
    """Refused for its length it counts as ended, with its prompt, and leaves no times of prefill or decode."""
    async with running(StepRunner()) as engine:
        box = Mailbox(1)
        engine.submit(request("a", prompt=(1,) * 200), mailbox=box, index=0)
        assert await read_all(box) == [Delta(0, (), FinishReason.ERROR)]
        seen = engine.latencies
    assert (seen.prompt_tokens.sum, seen.output_tokens.sum) == (200, 0)
    assert [part.cumulative()[-1][1] for part in (seen.queue, seen.prefill, seen.decode, seen.inference)] == [0.0] * 4


async def fail_twice(engine: Engine) -> None:
    """Two steps of a runner that always fails; the third is one too many."""
    for name in ("x", "y"):
        box = Mailbox(1)
        engine.submit(request(name), mailbox=box, index=0)
        assert await read_all(box) == [Delta(0, (), FinishReason.ERROR)]


async def test_a_failing_runner_fails_the_rank() -> None:
    """Requests in flight end with an error, later ones are refused, calls that wait are told; the thread is gone."""
    enter, leave = threading.Event(), threading.Event()

    def explode() -> None:
        enter.set()
        leave.wait(30)
        raise RuntimeError("device lost")

    async with running(StepRunner(explode)) as engine:
        leave.set()
        await fail_twice(engine)
        leave.clear()
        enter.clear()
        boxes = [Mailbox(1), Mailbox(1)]
        engine.submit(request("a"), mailbox=boxes[0], index=0)
        await asyncio.to_thread(enter.wait, 30)
        engine.submit(request("b"), mailbox=boxes[1], index=0)  # still in the queue when the thread ends
        waiting = asyncio.create_task(engine.reset_cache())
        await asyncio.sleep(0)
        leave.set()
        for box in boxes:
            assert await read_all(box) == [Delta(0, (), FinishReason.ERROR)]
        with pytest.raises(EngineStopped, match="device lost"):
            await waiting
        with pytest.raises(EngineStopped, match="device lost"):
            engine.submit(request("c"), mailbox=Mailbox(1), index=0)
        assert (engine.failure, engine.load) == ("RuntimeError: device lost", 0)


async def test_integrity_is_checked_when_idle() -> None:
    """A cache that contradicts itself is found when the last request ends, and stops the rank."""
    async with running(StepRunner(), kind=DamagedScheduler) as engine:
        box = Mailbox(1)
        engine.submit(request("a"), mailbox=box, index=0)
        deltas = await read_all(box)
        assert [token for delta in deltas for token in delta.tokens] == [7, 7, 7]
        await until(lambda: engine.failure is not None)
        assert engine.failure == "IntegrityError: page 3 is held twice"


async def test_corruption_stops_a_rank_at_once() -> None:
    """A step that finds its cache corrupt is no step to shrug off: there is no second one."""

    def corrupt() -> None:
        raise ShadowError("request 'a' reads a wrong token at position 0 of group 0")

    async with running(StepRunner(corrupt)) as engine:
        box = Mailbox(1)
        engine.submit(request("a"), mailbox=box, index=0)
        assert await read_all(box) == [Delta(0, (), FinishReason.ERROR)]
        assert engine.failure == "ShadowError: request 'a' reads a wrong token at position 0 of group 0"


async def test_integrity_is_checked_seldom() -> None:
    """A rank that falls idle ten times in a moment recounts its cache once."""
    checks = []

    class CountingScheduler(Scheduler):
        def check_integrity(self) -> None:
            checks.append(None)
            super().check_integrity()

    async with running(StepRunner(), kind=CountingScheduler) as engine:
        for number in range(10):
            box = Mailbox(1)
            engine.submit(request(str(number)), mailbox=box, index=0)
            await read_all(box)
            await until(lambda: len(checks) == 1)
        assert len(checks) == 1


async def test_a_failed_rank_is_unhealthy_and_others_serve() -> None:
    """/health is 503 and names the rank and cause; requests go to the rank that works, or get 503 if they named it."""
    card = read_card("needle")
    model = ServedModel("m", card.tokenizer, None, {}, card.config.vocab_size, 128, "0")

    def explode() -> None:
        raise RuntimeError("device lost")

    async with running(StepRunner(explode)) as broken, running(StepRunner()) as working:
        working.rank = 1
        await fail_twice(broken)
        transport = httpx.ASGITransport(create_app(model, [broken, working], max_body_bytes=10_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://shim") as client:
            assert (await client.get("/health")).status_code == 200
            named = {"prompt": [5], "max_tokens": 2, "routed_dp_rank": 0}
            for stream in (False, True):  # the first of them meets the failure, the second its consequence
                answer = await client.post("/v1/completions", json=named | {"stream": stream})
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
            health = await client.get("/health")
            assert health.status_code == 503
            assert health.json()["error"]["message"] == "rank 0: RuntimeError: device lost"
            for _ in range(2):
                free = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
                assert (free.status_code, free.headers["x-dp-rank"]) == (200, "1")
            reset = await client.post("/reset_prefix_cache")
            assert (reset.status_code, reset.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_stopping_ends_what_runs() -> None:
    """A stop ends running requests as aborted, after the present step."""
    async with running(StepRunner(lambda: time.sleep(0.05))) as engine:
        box = Mailbox(1)
        engine.submit(request("a", tokens=190), mailbox=box, index=0)
        await box.take()
        engine.stop()
        assert (await read_all(box))[-1].finish is FinishReason.ABORT
        assert not engine.accepts


async def test_abort_ends_within_a_step() -> None:
    """An aborted request takes part in no step after the present one, and its neighbour goes on."""
    steps: list[set[str]] = []

    class Noting(StepRunner):
        def run(self, batch: Batch) -> list[Sampled]:
            steps.append({chunk.request.id for chunk in batch.chunks})
            return super().run(batch)

    async with running(Noting(lambda: time.sleep(0.01))) as engine:
        gone, stays = Mailbox(1), Mailbox(1)
        engine.submit(request("gone", tokens=60), mailbox=gone, index=0)
        engine.submit(request("stays", tokens=40, prompt=(9, 8, 7)), mailbox=stays, index=0)
        await gone.take()
        engine.abort("gone")
        at = len(steps)
        await until(lambda: engine.load <= 1)
        assert sum("gone" in step for step in steps[at:]) <= 1  # one that was scheduled, and had not begun
        assert sum(len(delta.tokens) for delta in await read_all(stays)) == 40
        engine.abort("gone")  # ended already: nothing happens
        engine.abort("never was")
        assert await engine.reset_cache() is True


async def test_idle_costs_nothing() -> None:
    """A rank without work uses no processor time."""
    async with running(StepRunner()) as engine:
        box = Mailbox(1)
        engine.submit(request("a"), mailbox=box, index=0)
        await read_all(box)
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.05


async def test_a_request_that_never_fits_is_told() -> None:
    """The scheduler's refusal reaches the client, though no step runs."""
    async with running(StepRunner()) as engine:
        box = Mailbox(1)
        engine.submit(request("big", prompt=tuple(range(1, 300))), mailbox=box, index=0)
        assert await read_all(box) == [Delta(0, (), FinishReason.ERROR)]
        assert engine.accepts


async def test_events_leave_before_the_tokens() -> None:
    """When a token is told, the events of its step were published, however slow publishing is."""
    order: list[str] = []

    class SlowPublisher(EventPublisher):
        def publish(self, events: tuple[Event, ...]) -> None:
            if events:
                time.sleep(0.02)
                order.append("events")
            super().publish(events)

    class Box(Mailbox):
        def put(self, index: int, tokens: Sequence[int], finish: FinishReason | None, **more: Any) -> None:
            order.append("token" if finish is None else "last token")
            super().put(index, tokens, finish, **more)

    publisher = SlowPublisher(Endpoints("127.0.0.1", 0, 0), rank=0, epoch="e")
    async with running(StepRunner(), publisher=publisher) as engine:
        box = Box(1)
        engine.submit(request("a", tokens=4), mailbox=box, index=0)  # 5 + 3 computed tokens: two pages of 4
        await read_all(box)
        assert order == ["events", "token", "token", "token", "events", "last token"]
        snapshot = await engine.snapshot()
        assert snapshot is not None
        assert snapshot.sequence == 1


async def test_mailbox_merges_what_is_not_read() -> None:
    """Steps that come before the reader are one delta per prompt; after close there is nothing."""
    box = Mailbox(2)
    for token in (1, 2):
        box.put(0, (token,), None, logprobs=[TokenLogprob(-token, ())])
    box.put(1, (3, 5), FinishReason.LENGTH)
    told = (TokenLogprob(-1, ()), TokenLogprob(-2, ()))
    assert await box.take() == [Delta(0, (1, 2), None, told), Delta(1, (3, 5), FinishReason.LENGTH)]
    box.put(0, (4,), FinishReason.STOP)
    assert await box.take() == [Delta(0, (4,), FinishReason.STOP)]
    pending = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.close()
    assert await pending == []
