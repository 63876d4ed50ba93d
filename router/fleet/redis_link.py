"""How this router uses its Redis client: connections, scripts, and what can go wrong with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from router.plain_words import masked
from router.wire.redis import Script

#: An answer of Redis that takes longer counts as none: the connection is given up.
ANSWER_SECONDS = 1.0
#: What a conversation with Redis may end with; all of it is met by connecting anew.
BROKEN = (exceptions.RedisError, OSError, TimeoutError)


class Trouble(StrEnum):
    """What Redis did; a metric label."""

    GONE = "gone"
    SLOW = "slow"
    FULL = "full"
    REFUSED = "refused"  # loading, read only, no permission, not a Redis
    DAMAGED = "damaged"  # what it gave could not be read


def trouble(error: Exception) -> Trouble:
    """Which trouble an error is."""
    match error:
        case exceptions.TimeoutError() | TimeoutError():
            return Trouble.SLOW
        case exceptions.OutOfMemoryError():
            return Trouble.FULL
        case exceptions.BusyLoadingError() | exceptions.ResponseError() | exceptions.AuthenticationError():
            return Trouble.REFUSED
        case exceptions.RedisError() | OSError():
            return Trouble.GONE
        case _:
            return Trouble.DAMAGED


def connect(url: str, *, name: str) -> Redis:
    """A client that tries nothing twice by itself; connects when used. Raises ``ValueError`` for a URL that is none."""
    return Redis.from_url(
        url,
        protocol=2,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=ANSWER_SECONDS,
        retry=Retry(NoBackoff(), 0),
        client_name=name,
    )


def shown(url: str) -> str:
    """Where a URL leads, for the log: without names, passwords and options."""
    address, _, options = url.partition("?")
    if "@" in options:  # perhaps a question mark in a password that is not written as %3F
        return address.partition("://")[0] + "://***"
    return masked(address).partition("#")[0]


def goes_on() -> bool:
    """True; raises ``CancelledError`` if the task's cancellation was swallowed.

    ``asyncio.wait_for`` of Python 3.11, with which redis-py sends, does so when what it waits for ends at that moment.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return True


async def evaluate(redis: Redis, script: Script, keys: Sequence[str], arguments: Sequence[str | int]) -> list[bytes]:
    """Run a script by its name; Redis forgets scripts when it restarts or is told to."""
    try:
        answer = await redis.evalsha(script.sha, len(keys), *keys, *arguments)
    except exceptions.NoScriptError:
        answer = await redis.eval(script.text, len(keys), *keys, *arguments)
    return answer or []
