"""What the index lets go of by and by also goes while no events come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

_BUSY_SECONDS = 0.02
_IDLE_SECONDS = 1.0


async def do_chores(let_go: Callable[[], bool], *, log: FilteringBoundLogger) -> None:
    """Until cancelled: call ``let_go``, which does a slice of what there is and says whether more is left."""
    while True:
        is_left = False
        try:
            is_left = let_go()
        except Exception as error:  # the boundary: a chore that fails must not end the router
            log.error("chore of the index failed", exc_info=error)
        await asyncio.sleep(_BUSY_SECONDS if is_left else _IDLE_SECONDS)
