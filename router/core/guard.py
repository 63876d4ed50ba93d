"""The boundary around a pool (``core/forecast``): it is kept to foretell by, and where that fails nothing else may.

All that is told to a pool or asked of it goes through here. Once something has raised, nothing more is tried: no
request, lookup or event stream ends of it. When the rank's cache is cleared another pool takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _ignore(error: Exception) -> None:
    """Nobody listens."""


class Guard:
    """One pool's. ``on_failure`` is told, once, what it raised."""

    def __init__(self) -> None:
        self.has_failed = False
        self.on_failure: Callable[[Exception], None] = _ignore

    def attempt(
        self, what: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result | None:
        """What comes of it; None if it failed, now or before."""
        if self.has_failed:
            return None
        try:
            return what(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the boundary: a pool must end nothing but its own forecasts
            self.has_failed = True
            self.on_failure(error)
            return None
