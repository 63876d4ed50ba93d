"""A worker that goes away while it is recorded: who needs it waits until it is back, or has been away for too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import httpx

from router.errors import WorkerError

_RETRY_SECONDS = 1.0


class Absence:
    """Of one worker. ``say`` is told once each time it goes."""

    def __init__(
        self, url: str, client: httpx.AsyncClient, *, patience_seconds: float, say: Callable[[str], None]
    ) -> None:
        self._url = url
        self._client = client
        self._patience_seconds = patience_seconds
        self._say = say
        self._is_away = False

    async def until_back(self) -> None:
        """Wait until it answers. Raises ``WorkerError`` if it does not for longer than the patience."""
        if not self._is_away:
            self._is_away = True
            self._say(f"{self._url} does not answer; waiting for {self._patience_seconds:g} s at most")
        try:
            async with asyncio.timeout(self._patience_seconds):
                while self._is_away:
                    await asyncio.sleep(_RETRY_SECONDS)
                    with contextlib.suppress(httpx.HTTPError):
                        if (await self._client.get(self._url + "/health")).is_success:
                            self._is_away = False
        except TimeoutError as error:
            raise WorkerError(f"{self._url} has not answered for {self._patience_seconds:g} s") from error
