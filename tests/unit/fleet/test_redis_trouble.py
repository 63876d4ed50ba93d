"""Redis is not to be had: the log says where and why, and never with what password."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import time

import pytest
from prometheus_client import CollectorRegistry

from router.fleet.fleet import Fleet
from router.fleet.redis_link import shown
from router.fleet.redis_state import RedisState
from router.settings import RoutingSettings, SharedSettings
from router.telemetry.logging import make_logger
from router.telemetry.metrics import Metrics


class NoWorkers:
    def workers(self) -> list[object]:
        return []


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://user:hunter2@h:6379/0", "redis://***@h:6379/0"),
        ("rediss://:hun/ter2@h:6379", "rediss://***@h:6379"),
        ("redis://user:12?hunter2@h:6379", "redis://***"),
        ("redis://user:12#hunter2@h:6379", "redis://***@h:6379"),
        ("redis://h:6379?password=hunter2", "redis://h:6379"),
        ("redis://h:6379?password=hun@ter2", "redis://***"),
        ("unix:///run/redis.sock?password=hunter2", "unix:///run/redis.sock"),
    ],
)
def test_where_it_should_be(url: str, where: str) -> None:
    """Rather too little is shown than a word of a password that was written wrongly."""
    assert shown(url) == where


async def test_the_log_names_address_and_cause() -> None:
    """Nothing listens there."""
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        stream = io.StringIO()
        metrics = Metrics(CollectorRegistry())
        state = RedisState(
            SharedSettings(redis_url=f"redis://:hunter2@127.0.0.1:{port}/0", publish_seconds=0.05, lease_seconds=0.2),
            max_sessions=10,
            idle_seconds=60.0,
            replica="a",
            metrics=metrics,
            log=make_logger(level="warning", form="json", stream=stream),
            clock=time.monotonic,
        )
        fleet = Fleet(RoutingSettings(), metrics, clock=time.monotonic, shared=state)
        running = asyncio.create_task(state.run(fleet, NoWorkers()))
        async with asyncio.timeout(30):
            while not stream.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    told = json.loads(stream.getvalue().splitlines()[0])
    assert told["url"] == f"redis://***@127.0.0.1:{port}/0"
    assert told["cause"].startswith("gone: Error 111 connecting to ")
    assert "hunter2" not in stream.getvalue()
