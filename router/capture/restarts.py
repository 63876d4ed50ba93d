"""Restarts of an engine that its recording has no record of: a sequence of messages that begins anew tells of them.

A router looks after each worker every few seconds, and asks one that was away whether it is the same process. So what
was sent after a silence as long as that was sent to a process that the router knew to be new. Its first message, with
which the stream itself says so, may come later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.capture.format import Frame, Reset, Sent
from router.settings import ProbeSettings


def noticed_restarts(frames: Iterable[Frame], requests: Sequence[Sent], told: Sequence[Reset]) -> set[Reset]:
    """A restart for each such sequence, unless one was ``told`` of. All in the order of their time."""
    noticed: set[Reset] = set()
    last: dict[int, Frame] = {}
    for frame in frames:
        if frame.sequence is None:
            continue
        before = last.get(frame.rank)
        last[frame.rank] = frame
        if before is None or before.sequence is None or frame.sequence >= before.sequence:
            continue
        if any(reset.is_restart and before.at <= reset.at <= frame.at for reset in told):
            continue
        if (at := _first_after_silence(requests, since=before.at, until=frame.at)) is not None:
            noticed.add(Reset(at, is_restart=True))
    return noticed


def _first_after_silence(requests: Sequence[Sent], *, since: float, until: float) -> float | None:
    """When the first answered request was sent before which the engine had given no sign of life for long enough."""
    silence_seconds = ProbeSettings().interval_seconds
    answered = [request for request in requests if not request.is_failed]
    for request in answered:
        if since < request.at <= until:
            ends = (other.finished_at for other in answered if other.finished_at <= request.at)
            if request.at - max(since, *ends, since) >= silence_seconds:
                return request.at
    return None
