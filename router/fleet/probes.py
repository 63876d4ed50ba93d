"""Is a worker alive? One request to ``/health``, and a pure judgement over a row of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from enum import StrEnum
from typing import Final

import httpx

from router.fleet.asking import ask

#: A worker that requests cannot be sent to is probed at most this often.
_DOUBT_SECONDS: Final = 0.2
#: Of an answer whose status alone counts; and how many times as long as one step of it all may take.
_HEALTH_BYTES: Final = 64 << 10
_STEPS: Final = 3


class Probe(StrEnum):
    """What came of one probe."""

    ALIVE = "alive"
    SILENT = "silent"  # no answer in time: dead, or busy with a long step
    REFUSED = "refused"  # nothing listens, or the connection broke
    UNRESOLVED = "unresolved"  # its name has no address
    UNTRUSTED = "untrusted"  # its certificate is not accepted
    NO_TLS = "no_tls"  # what listens there has no TLS that this side understands: most often it has none
    UNWELL = "unwell"  # it answers that it cannot serve


class Verdict(StrEnum):
    """What a probe changes."""

    UP = "up"
    DOWN = "down"
    UNCHANGED = "unchanged"


async def probe(client: httpx.AsyncClient, url: str, *, timeout_seconds: float) -> Probe:
    """Ask for ``/health`` once."""
    try:
        answer = await ask(
            client,
            url + "/health",
            most_bytes=_HEALTH_BYTES,
            seconds=_STEPS * timeout_seconds,
            timeout_seconds=timeout_seconds,
        )
    except httpx.HTTPError as error:
        return failure(error)
    return Probe.ALIVE if 200 <= answer.status < 300 else Probe.UNWELL


def failure(error: BaseException) -> Probe:
    """What a request that got no answer says of the worker: httpx keeps the cause behind its own errors."""
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return Probe.SILENT
    cause: BaseException | None = error
    while cause is not None:
        match cause:
            case socket.gaierror():
                return Probe.UNRESOLVED
            case ssl.SSLCertVerificationError():
                return Probe.UNTRUSTED
            case ssl.SSLError():
                return Probe.NO_TLS
        cause = cause.__cause__ or cause.__context__
    return Probe.REFUSED


def sentence(url: str, error: Exception) -> str:
    """What stopped a question to ``url``: one plain line."""
    match failure(error):
        case Probe.SILENT:
            return f"{url} did not answer in time"
        case Probe.UNRESOLVED:
            return f"the name in {url} cannot be resolved"
        case Probe.UNTRUSTED:
            return f"the certificate of {url} is not accepted"
        case Probe.NO_TLS:
            return f"the TLS handshake with {url} failed; is it http?"
    if isinstance(error, (httpx.ConnectTimeout, httpx.ConnectError)):
        return f"nothing listens at {url}"
    return f"{url} broke the connection: {type(error).__name__}"


async def until_due(doubted: asyncio.Event, *, interval_seconds: float) -> None:
    """Wait for the next probe's time: soon, once the worker is doubted."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(interval_seconds):  # not ``wait_for``, which may swallow a cancellation
            await doubted.wait()
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
    Probe.UNRESOLVED: "its name cannot be resolved",
    Probe.UNTRUSTED: "its certificate is not accepted",
    Probe.NO_TLS: "the TLS handshake failed; is it http?",
    Probe.UNWELL: "answers /health that it cannot serve",
}
