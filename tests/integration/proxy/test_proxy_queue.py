"""Requests that wait for their turn, and clients that will not wait for ever."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from router.core.fair_queue import Priority
from router.core.keys import Key, Keyring, digest_of
from router.proxy.exchange import Exchange
from router.settings import QueueSettings
from tests.fakes.fault_worker import OK, FaultWorker, event
from tests.fakes.proxy_rig import Client, FakePrepared, Rig, rig, target, until

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
DELTA = event({"choices": [{"delta": {"content": "a"}}]})


async def _sent(it: Rig, **headers: str) -> Client:
    """A client that has sent its request."""
    client = await it.connect()
    await client.send(ASK, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return client


async def test_as_many_at_once_as_may_be() -> None:
    """With one place and a queue of one the second waits and is answered, the third is refused at once."""
    queue, answers = QueueSettings(max_inflight=1, max_queued=1), asyncio.Event()
    async with FaultWorker([(answers, *OK)]) as worker, rig(target(worker.port), queue=queue) as it:
        first = await _sent(it)
        await until(lambda: len(worker.requests) == 1)
        second = await _sent(it)
        await until(lambda: it.count("homing_queued_requests") == 1)
        refused = await it.ask(ASK)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert len(worker.requests) == 1
        answers.set()
        assert (await first.answer()).status == 200
        assert (await second.answer()).status == 200
        await first.close()
        await second.close()
        assert it.count("homing_queued_requests") == 0
        assert (await it.ask(ASK)).status == 200


async def test_given_up_while_the_last_step_of_preparing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of that task and the call that says so the request is over: it is not sent, nor counted twice."""
    async with FaultWorker([OK]) as worker, rig(target(worker.port), queue=QueueSettings(max_inflight=1)) as it:
        prepare, calls = it.brain.prepare, 0

        async def prepare_late(*arguments: Any, **options: Any) -> FakePrepared:
            nonlocal calls
            calls += 1
            await asyncio.sleep(0)
            if calls == 1:
                (client,) = it.plane.clients
                asyncio.get_running_loop().call_soon(client.stop)
            return await prepare(*arguments, **options)

        monkeypatch.setattr(it.brain, "prepare", prepare_late)
        client = await _sent(it)
        assert (await client.answer()).status == 503
        assert it.count("homing_inflight_requests") == 0
        await client.send(ASK)
        assert (await client.answer()).status == 200
        await client.close()
        assert len(worker.requests) == 1
        assert (await it.ask(ASK)).status == 200


async def test_no_longer_than_the_queue_allows() -> None:
    """Who waits too long for a turn is told so; the one being served is not touched."""
    queue, answers = QueueSettings(max_inflight=1, queue_seconds=0.05), asyncio.Event()
    async with FaultWorker([(answers, *OK)]) as worker, rig(target(worker.port), queue=queue) as it:
        first = await _sent(it)
        await until(lambda: len(worker.requests) == 1)
        late = await it.ask(ASK)
        assert (late.status, late.error["code"]) == (429, "queue_timeout")
        answers.set()
        assert (await first.answer()).status == 200
        await first.close()


async def test_who_leaves_the_queue_is_forgotten() -> None:
    """A client that goes away while it waits is never sent to a worker, and its place in the queue is free."""
    queue, answers = QueueSettings(max_inflight=1, max_queued=1), asyncio.Event()
    async with FaultWorker([(answers, *OK)]) as worker, rig(target(worker.port), queue=queue) as it:
        first = await _sent(it)
        await until(lambda: len(worker.requests) == 1)
        leaver = await _sent(it)
        await until(lambda: it.count("homing_queued_requests") == 1)
        await leaver.close()
        await until(lambda: it.count("homing_queued_requests") == 0)
        answers.set()
        assert (await first.answer()).status == 200
        await first.close()
        await it.until_quiet()
        assert len(worker.requests) == 1


async def test_the_urgent_go_first() -> None:
    """High before normal before low, whatever order they came in."""
    queue, answers = QueueSettings(max_inflight=1), asyncio.Event()
    async with FaultWorker([(answers, *OK), OK]) as worker, rig(target(worker.port), queue=queue) as it:
        clients = [await _sent(it, x_request_id="first")]
        await until(lambda: len(worker.requests) == 1)
        for count, priority in enumerate(("low", "normal", "high"), start=1):
            clients.append(await _sent(it, x_request_id=priority, x_request_priority=priority))
            await until(lambda count=count: it.count("homing_queued_requests") == count)
        answers.set()
        for client in clients:
            assert (await client.answer()).status == 200
            await client.close()
        assert [received.header("x-request-id") for received in worker.requests] == ["first", "high", "normal", "low"]


async def test_a_key_says_how_urgent_its_requests_are() -> None:
    """They have the key's priority unless they ask for less; more they do not get."""
    keys = {"low": Priority.LOW, "high": Priority.HIGH, "none": None}
    keyring = Keyring(
        [Key(name, digest_of(name.encode()), priority=priority) for name, priority in keys.items()], secret=b"s"
    )
    asked = [("low", "high"), ("none", "low"), ("none", None), ("high", "normal"), ("low", None), ("high", None)]
    queue, answers = QueueSettings(max_inflight=1), asyncio.Event()
    async with (
        FaultWorker([(answers, *OK), OK]) as worker,
        rig(target(worker.port), queue=queue, keyring=keyring) as it,
    ):
        clients = [await _sent(it, x_api_key="none", x_request_id="first")]
        await until(lambda: len(worker.requests) == 1)
        for count, (key, priority) in enumerate(asked, start=1):
            header = {} if priority is None else {"x_request_priority": priority}
            clients.append(await _sent(it, x_api_key=key, x_request_id=f"{key}-{priority}", **header))
            await until(lambda count=count: it.count("homing_queued_requests") == count)
        answers.set()
        for client in clients:
            assert (await client.answer()).status == 200
            await client.close()
        order = [received.header("x-request-id") for received in worker.requests]
        # High; normal, a tenant after the other; low, likewise.
        assert order == ["first", "high-None", "none-None", "high-normal", "low-high", "none-low", "low-None"]


async def test_a_full_queue_is_shared() -> None:
    """Who is less urgent gives way, then who has most waiting; the one who goes is told as if it had come last."""
    keyring = Keyring([Key(name, digest_of(name.encode())) for name in ("loud", "quiet")], secret=b"s")
    queue, answers = QueueSettings(max_inflight=1, max_queued=3), asyncio.Event()
    served = FaultWorker([(answers, *OK), OK])
    async with served as worker, rig(target(worker.port), queue=queue, keyring=keyring) as it:
        clients = [await _sent(it, x_api_key="loud")]
        await until(lambda: len(worker.requests) == 1)
        for count, priority in enumerate(("normal", "normal", "low"), start=1):
            clients.append(await _sent(it, x_api_key="loud", x_request_priority=priority))
            await until(lambda count=count: it.count("homing_queued_requests") == count)
        clients += [await _sent(it, x_api_key="quiet")]
        assert (await clients[3].answer()).error["code"] == "queue_full"
        clients += [await _sent(it, x_api_key="loud")]
        assert (await clients[5].answer()).error["code"] == "queue_full"
        answers.set()
        for client in (clients[0], clients[4], clients[1], clients[2]):
            assert (await client.answer()).status == 200
        for client in clients:
            await client.close()


@pytest.mark.parametrize(
    "headers",
    [{"x-request-timeout": "soon"}, {"x-request-timeout": "-1"}, {"x-request-timeout": "nan"}],
    ids=lambda headers: next(iter(headers.values())),
)
async def test_terms_that_are_none(headers: dict[str, str]) -> None:
    """A timeout that is no positive number is refused, not guessed at."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        refused = await it.ask(ASK, headers=headers)
        assert (refused.status, refused.error["param"]) == (400, "x-request-timeout")
        assert not worker.requests


async def test_deadline_in_the_queue_or_while_preparing() -> None:
    """The client's time runs wherever its request is."""
    queue, answers = QueueSettings(max_inflight=1), asyncio.Event()
    async with FaultWorker([(answers, *OK)]) as worker, rig(target(worker.port), queue=queue) as it:
        first = await _sent(it)
        await until(lambda: len(worker.requests) == 1)
        late = await it.ask(ASK, headers={"x-request-timeout": "0.05"})
        assert (late.status, late.error["code"]) == (504, "deadline")
        answers.set()
        assert (await first.answer()).status == 200
        await first.close()
        it.brain.preparing = asyncio.Event()
        late = await it.ask(ASK, headers={"x-request-timeout": "0.05"})
        assert (late.status, late.error["code"]) == (504, "deadline")
        assert len(worker.requests) == 1


async def test_a_deadline_that_is_kept_leaves_no_trace() -> None:
    """An answer in time is untouched, and the connection serves the next request after the deadline has passed."""
    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        client = await it.connect()
        for _ in range(2):
            await client.send(ASK, headers={"x-request-timeout": "0.5"})
            assert (await client.answer()).status == 200
            await asyncio.sleep(0.5)
        await client.close()


async def test_a_deadline_far_away_holds_nothing() -> None:
    """A client may name one of years: with the answer nothing is left of the request that a timer would keep."""

    def exchanges() -> int:
        gc.collect()
        return sum(type(each) is Exchange for each in gc.get_objects())

    async with FaultWorker() as worker, rig(target(worker.port)) as it:
        before = exchanges()
        assert (await it.ask(ASK, headers={"x-request-timeout": "1000000"})).status == 200
        await it.until_quiet()
        assert exchanges() <= before
