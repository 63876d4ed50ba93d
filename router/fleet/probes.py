"""Is a worker alive? One request to ``/health``, and a pure judgement over a row of them."""

from __future__ import annotations

import asyncio
import contextlib
from enum import StrEnum
from typing import Final

import httpx

#: A worker that requests cannot be sent to is probed at most this often.
_DOUBT_SECONDS: Final = 0.2


class Probe(StrEnum):
    """What came of one probe."""

    ALIVE = "alive"
    SILENT = "silent"  # no answer in time: dead, or busy with a long step
    REFUSED = "refused"  # nothing listens, or the connection broke
    UNWELL = "unwell"  # it answers that it cannot serve


class Verdict(StrEnum):
    """What a probe changes."""

    UP = "up"
    DOWN = "down"
    UNCHANGED = "unchanged"


async def probe(client: httpx.AsyncClient, url: str, *, timeout_seconds: float) -> Probe:
    """Ask for ``/health`` once."""
    try:
        response = await client.get(url + "/health", timeout=timeout_seconds)
    except httpx.ConnectTimeout:
        return Probe.REFUSED
    except httpx.TimeoutException:
        return Probe.SILENT
    except httpx.HTTPError:
        return Probe.REFUSED
    return Probe.ALIVE if response.is_success else Probe.UNWELL


async def until_due(doubted: asyncio.Event, *, interval_seconds: float) -> None:
    """Wait for the next probe's time: soon, once the worker is doubted."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(doubted.wait(), interval_seconds)
        await asyncio.sleep(min(_DOUBT_SECONDS, interval_seconds))
    doubted.clear()


def judge(seen: Probe, *, failed_before: int, failures_allowed: int, has_progress: bool) -> tuple[int, Verdict]:
    """Failures in a row after this probe, and what follows.

    A worker that is silent on ``/health`` while its answers stream to clients is busy, not dead: it counts neither way.
    """
    if seen is Probe.ALIVE:
        return 0, Verdict.UP
    if seen is Probe.SILENT and has_progress:
        return failed_before, Verdict.UNCHANGED
    failed = failed_before + 1
    return failed, Verdict.DOWN if failed >= failures_allowed else Verdict.UNCHANGED


SENTENCES = {
    Probe.SILENT: "does not answer /health in time",
    Probe.REFUSED: "nothing listens at its address",
    Probe.UNWELL: "answers /health that it cannot serve",
}
