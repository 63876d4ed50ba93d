"""Where a worker's ranks publish their cache events, by what it says and what the operator wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from router.errors import WireError, WorkerError
from router.fleet.asking import read_number
from router.settings import WorkerSpec
from router.wire.kv_events import EventSource, decode_sources

#: As many as may be written in a ``WorkerSpec``.
MOST_RANKS: Final = 1024
_MOST_PORT: Final = 65535
#: Host and port, as ZMQ takes them.
_ENDPOINT: Final = re.compile(r"tcp://(?:\*|[\w:\[][\w.:%\]-]*):([0-9]{1,5})", re.ASCII)
_WILDCARDS: Final = ("*", "0.0.0.0", "::", "[::]")  # noqa: S104 (read, not bound)


def sources_of(
    spec: WorkerSpec, sources: Mapping[str, Any] | None, server: Mapping[str, Any] | None
) -> tuple[EventSource, ...]:
    """Of the ranks that publish where they can be reached from here. Raises ``WorkerError``."""
    host = urlsplit(spec.url).hostname or ""
    asked: Sequence[EventSource] = ()
    try:
        if sources:
            asked = decode_sources(sources)
        elif server and isinstance(server.get("kv_events"), dict):
            asked = _sglang_sources(server["kv_events"])
    except (WireError, KeyError, TypeError, ValueError, OverflowError) as error:
        shown = f"{error!s:.200}"
        raise WorkerError(f"{spec.url} describes its cache events in a way that is not understood: {shown}") from error
    asked = [_typed(source) for source in asked]
    if spec.kv_events is not None:
        told = {source.rank: source for source in asked}
        count = spec.dp_size or max(len(told), 1)
        asked = [
            replace(
                told.get(rank, EventSource(rank=rank, endpoint="")),
                endpoint=_port_up(spec.kv_events, rank),
                replay_endpoint=_port_up(spec.kv_replay, rank) if spec.kv_replay else None,
            )
            for rank in range(count)
        ]
    return tuple(
        replace(
            source,
            endpoint=_reachable(source.endpoint, host),
            replay_endpoint=_reachable(source.replay_endpoint, host) if source.replay_endpoint else None,
        )
        for source in asked
        if _is_tcp(source.endpoint)  # others (inproc, ipc) cannot be reached from here
    )


def _is_tcp(endpoint: str) -> bool:
    found = _ENDPOINT.fullmatch(endpoint)
    return found is not None and int(found[1]) <= _MOST_PORT


def _typed(source: EventSource) -> EventSource:
    """Without what is of another type than it should be: that is as good as not said."""

    def text(value: object) -> str | None:
        return value if isinstance(value, str) else None

    path = text(source.snapshot_path)
    return replace(
        source,
        replay_endpoint=text(source.replay_endpoint),
        topic=text(source.topic) or "",
        epoch=text(source.epoch),
        snapshot_path=path if path and path.startswith("/") else None,
        block_tokens=read_number(source.block_tokens),
    )


def _sglang_sources(events: Mapping[str, Any]) -> Sequence[EventSource]:
    if events.get("publisher") != "zmq":
        return ()
    host, base = events["endpoint_host"], int(events["endpoint_port_base"])
    replay_base = events.get("replay_endpoint_port_base")
    return [
        EventSource(
            rank=rank,
            endpoint=f"tcp://{host}:{base + rank}",
            replay_endpoint=f"tcp://{host}:{int(replay_base) + rank}" if replay_base else None,
            topic=events.get("topic") or "",
            block_tokens=read_number(events.get("block_size")),
        )
        for rank in range(min(read_number(events.get("dp_size")) or 1, MOST_RANKS))
    ]


def _reachable(endpoint: str, host: str) -> str:
    """A publisher that listens everywhere is reached at the worker's own host."""
    shown = f"[{host}]" if ":" in host else host
    for wildcard in _WILDCARDS:
        if endpoint.startswith(f"tcp://{wildcard}:"):
            return f"tcp://{shown}:{endpoint.rsplit(':', 1)[1]}"
    return endpoint


def _port_up(endpoint: str, rank: int) -> str:
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"
