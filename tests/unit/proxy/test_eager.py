"""Coroutines that run without a task until they wait."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from router.proxy import eager


async def test_what_waits_for_nothing_has_ended_at_once() -> None:
    """No task, and what it raises is raised here."""

    async def adds() -> int:
        return 1 + 1

    async def fails() -> None:
        raise ZeroDivisionError

    loop = asyncio.get_running_loop()
    assert eager.start(adds(), loop) == 2
    with pytest.raises(ZeroDivisionError):
        eager.start(fails(), loop)


async def test_what_needs_a_task_finds_itself_in_one() -> None:
    """From a callback of the loop, where there is none: a bound of time holds, and the others go on."""
    ended: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    async def waits() -> list[str]:
        said = ["before"]
        await eager.in_task()
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            said.append("over")
        return said

    def call() -> None:
        task = eager.start(waits(), asyncio.get_running_loop())
        assert isinstance(task, asyncio.Task)
        task.add_done_callback(lambda done: ended.set_result(done.result()))

    asyncio.get_running_loop().call_soon(call)
    assert await ended == ["before", "over"]


async def test_a_task_is_made_of_a_coroutine() -> None:
    """Python 3.12 and later refuse anything else."""

    async def waits() -> int:
        await asyncio.sleep(0)
        return 3

    task = eager.start(waits(), asyncio.get_running_loop())
    assert isinstance(task, asyncio.Task)
    assert inspect.iscoroutine(task.get_coro())
    assert await task == 3


async def test_who_is_in_a_task_does_not_wait_for_one() -> None:
    """Nothing comes between."""
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    await eager.in_task()
    assert turns == []


async def test_a_task_given_up_before_its_first_step_leaves_nothing() -> None:
    """What the coroutine holds is let go."""
    left: list[str] = []
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await eager.in_task()
        finally:
            left.append("let go")

    def call() -> None:
        task = eager.start(waits(), asyncio.get_running_loop())
        assert isinstance(task, asyncio.Task)
        task.add_done_callback(lambda _: ended.set())
        task.cancel()

    asyncio.get_running_loop().call_soon(call)
    await ended.wait()
    await asyncio.sleep(0)
    assert left == ["let go"]
