"""A rank's thread with a runner that launches: one step ahead, never two, and what commands and failures do to that."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from engine_rig import answer, read_all, request, running
from shim_process import running_shim

from engine_shim.app import StartError, build
from engine_shim.mailbox import Mailbox
from engine_shim.model.needle_text import Fact, facts, haystack
from engine_shim.runner.shadow import ShadowError
from engine_shim.runner.torch_runner import TorchRunner
from engine_shim.settings import ShimSettings, load_settings
from engine_shim.types import (
    Batch,
    FinishReason,
    Sampled,
    StepLanding,
)


class Device:
    """Runs steps one after the other in a thread of its own; each answers with its number."""

    def __init__(self, step: Callable[[int], object] = lambda number: None, *, refuses: int = -1) -> None:
        self._step = step
        self._refuses = refuses
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self.in_flight = 0
        self.launched: list[Batch] = []
        self.deepest = 0

    def run(self, batch: Batch) -> list[Sampled]:
        return self.launch(batch)()

    def launch(self, batch: Batch) -> StepLanding:
        number = len(self.launched)
        self.launched.append(batch)
        if number == self._refuses:
            raise RuntimeError("out of memory")
        with self._lock:
            self.in_flight += 1
            self.deepest = max(self.deepest, self.in_flight)
        return self._thread.submit(self._run, batch, number).result

    def _run(self, batch: Batch, number: int) -> list[Sampled]:
        try:
            self._step(number)
        finally:
            with self._lock:
                self.in_flight -= 1
        return [Sampled((number,)) for chunk in batch.chunks if chunk.samples]


async def test_the_next_step_is_launched_while_one_runs() -> None:
    """Two steps are in flight at once and never three; tokens come in order, and no step runs behind the last."""
    device = Device(lambda number: time.sleep(0.003))
    async with running(device, overlaps=True) as engine:
        tokens = [token for delta in await answer(engine, "a", tokens=20) for token in delta.tokens]
        assert tokens == list(range(20))
        assert (device.deepest, len(device.launched)) == (2, 20)
        assert sum(chunk.awaits_token for batch in device.launched for chunk in batch.chunks) > 10
        assert await engine.reset_cache() is True


async def test_commands_come_between_two_steps() -> None:
    """A newcomer, an abort and a call are served though the one before them would run for long."""
    device = Device(lambda number: time.sleep(0.002 if number < 20 else 0.05))  # should this thread fall behind
    async with running(device, overlaps=True) as engine:
        long, short = Mailbox(1), Mailbox(1)
        engine.submit(request("long", tokens=150), mailbox=long, index=0)
        await long.take()
        engine.submit(request("short", tokens=3, prompt=(9, 8, 7)), mailbox=short, index=0)
        assert (await read_all(short))[-1].finish is FinishReason.LENGTH
        assert await engine.call(lambda: "done") == "done"
        engine.abort("long")
        assert (await read_all(long))[-1].finish is FinishReason.ABORT
        assert len(device.launched) < 100
        assert await engine.reset_cache() is True


async def test_a_failed_step_takes_along_what_was_launched_behind_it() -> None:
    """Its requests end with an error though the step behind it ran well; the rank goes on."""

    def step(number: int) -> None:
        time.sleep(0.003)
        if number == 4:
            raise RuntimeError("out of memory")

    device = Device(step)
    async with running(device, overlaps=True) as engine:
        deltas = await answer(engine, "a", tokens=20)
        assert [token for delta in deltas for token in delta.tokens] == [0, 1, 2, 3]
        assert deltas[-1].finish is FinishReason.ERROR
        assert (await answer(engine, "b", tokens=3))[-1].finish is FinishReason.LENGTH
        assert await engine.reset_cache() is True


async def test_an_error_is_told_only_when_nothing_runs_any_more() -> None:
    """The pages of a failed step are not free while the one behind it may still write them."""

    def step(number: int) -> None:
        time.sleep(0.2 if number == 4 else 0.003)
        if number == 3:
            raise RuntimeError("out of memory")

    device = Device(step)
    async with running(device, overlaps=True) as engine:
        assert (await answer(engine, "a", tokens=20))[-1].finish is FinishReason.ERROR
        assert (len(device.launched), device.in_flight) == (5, 0)


async def test_an_error_at_launch_is_that_step_s() -> None:
    """What ran before it is told, then its requests end with an error, and the rank goes on."""
    device = Device(lambda number: time.sleep(0.003), refuses=4)
    async with running(device, overlaps=True) as engine:
        deltas = await answer(engine, "a", tokens=20)
        assert [token for delta in deltas for token in delta.tokens] == [0, 1, 2, 3]
        assert deltas[-1].finish is FinishReason.ERROR
        assert (await answer(engine, "b", tokens=3))[-1].finish is FinishReason.LENGTH


async def test_corruption_behind_a_failed_step_stops_the_rank_as_well() -> None:
    """What the failed step takes along may be booked as nothing, an alarm may not."""

    def step(number: int) -> None:
        time.sleep(0.003)
        if number == 3:
            raise RuntimeError("flaky")
        if number == 4:
            raise ShadowError("request 'a' reads a wrong token")

    async with running(Device(step), overlaps=True) as engine:
        assert (await answer(engine, "a", tokens=20))[-1].finish is FinishReason.ERROR
        assert engine.failure == "ShadowError: request 'a' reads a wrong token"


async def test_corruption_stops_the_rank_at_once() -> None:
    """Nothing is booked of the step that found it, nor of the one behind it."""

    def step(number: int) -> None:
        time.sleep(0.003)
        if number == 3:
            raise ShadowError("request 'a' reads a wrong token")

    async with running(Device(step), overlaps=True) as engine:
        deltas = await answer(engine, "a", tokens=20)
        assert [token for delta in deltas for token in delta.tokens] == [0, 1, 2]
        assert engine.failure == "ShadowError: request 'a' reads a wrong token"


async def test_a_stop_waits_for_what_is_launched() -> None:
    """What runs ends as aborted once both launched steps have landed."""
    go = threading.Event()
    device = Device(lambda number: number < 2 or go.wait(30))
    async with running(device, overlaps=True) as engine:
        box = Mailbox(1)
        engine.submit(request("a", tokens=150), mailbox=box, index=0)
        async with asyncio.timeout(10):
            while len(device.launched) < 4:  # noqa: ASYNC110 - polls what another thread changes
                await asyncio.sleep(0.005)
        engine.stop()
        assert engine.load == 1
        go.set()
        assert (await read_all(box))[-1].finish is FinishReason.ABORT
        assert (len(device.launched), device.in_flight) == (4, 0)


@pytest.mark.parametrize(
    ("arguments", "overlaps"),
    [({}, False), ({"device": "cuda"}, True), ({"device": "cuda", "overlap": False}, False), ({"overlap": True}, True)],
)
def test_who_overlaps(arguments: dict[str, object], overlaps: bool) -> None:
    """CUDA does unless told otherwise, the CPU if told to."""
    assert load_settings(arguments, {}).overlaps is overlaps
    assert load_settings(arguments | {"device": "cuda", "runner": "sim", "overlap": None}, {}).overlaps is False


def test_a_timing_model_has_nothing_to_overlap() -> None:
    """Asked for, it is refused by name."""
    with pytest.raises(StartError, match=r"^overlap: "):
        build(ShimSettings(runner="sim", overlap=True, port=0, kv_events=False))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_is_built_as_it_is_told_to(*, overlap: bool) -> None:
    """Engine and runner both: on the CPU launched steps then have a thread of their own."""
    shim = build(ShimSettings(overlap=overlap, port=0, kv_events=False, shadow_steps=0))
    shim.door.close()
    (engine,) = shim.engines
    assert engine._overlaps is overlap
    assert isinstance(engine._runner, TorchRunner)
    assert (engine._runner._thread is not None) is overlap


def test_a_shim_that_overlaps_answers() -> None:
    """Needles asked for side by side, in streams of different lengths, over one shared text; and nothing is left."""
    known = facts(6, seed=1)
    text = haystack(400, known, seed=2)
    with running_shim("--overlap") as shim, httpx.Client(base_url=shim.url, timeout=60) as client:

        def ask(fact: Fact) -> str:
            body = {"model": "needle", "prompt": text + fact.question, "max_tokens": 5}
            answer = client.post("/v1/completions", json=body)
            return str(answer.json()["choices"][0]["text"]).strip()

        with ThreadPoolExecutor(6) as pool:
            for _ in range(2):
                assert list(pool.map(ask, known)) == [fact.value for fact in known]
        assert client.post("/reset_prefix_cache").status_code == 200
        assert client.get("/health").status_code == 200
