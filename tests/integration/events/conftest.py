"""What tests of event streams share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from tests.fakes.event_consumer import Consumer
from tests.fakes.kv_publisher import KvPublisher


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def consumer(context: zmq.asyncio.Context) -> AsyncIterator[Consumer]:
    consumer = Consumer(context)
    yield consumer
    await consumer.stop()


@pytest.fixture
async def publisher(context: zmq.asyncio.Context) -> AsyncIterator[KvPublisher]:
    publisher = KvPublisher(context)
    yield publisher
    await publisher.stop()
