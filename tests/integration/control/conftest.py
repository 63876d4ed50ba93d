"""What tests of the control plane share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.fakes.registry_rig import Control


@pytest.fixture
async def control() -> AsyncIterator[Control]:
    async with httpx.AsyncClient(timeout=10) as client:
        control = Control(client)
        running = asyncio.create_task(control.registry.run())
        yield control
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
