"""Coroutines that seldom wait, run without a task until they do (as Python 3.12's eager tasks are)."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def start(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T | asyncio.Task[T]:
    """Run up to the first wait: the result, or a task that goes on from there. Raises what is raised before it.

    What must know its task (``asyncio.timeout``, httpx) may only be used after the first wait: see ``in_task``.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    return loop.create_task(_rest(coroutine, awaited))


async def in_task() -> None:
    """A first wait, where there has been none: what follows is in a task. Futures and threads do without."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)


async def _rest(coroutine: Coroutine[Any, Any, T], awaited: object) -> T:
    """What tasks are made of: from Python 3.12 on they take no generator."""
    return await _go_on(coroutine, awaited)


@types.coroutine
def _go_on(coroutine: Coroutine[Any, Any, T], awaited: object) -> Generator[Any, Any, T]:
    """The rest of a coroutine that waits for ``awaited``."""
    while True:
        try:
            yield awaited
        except BaseException as error:  # noqa: BLE001 - what was awaited failed, or the task was cancelled
            try:
                awaited = coroutine.throw(error)
            except StopIteration as stop:
                result: T = stop.value
                return result
        else:
            rest: T = yield from coroutine
            return rest
