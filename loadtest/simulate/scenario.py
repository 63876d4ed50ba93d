"""What a run depends on, and what it moves about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadtest.simulate.runs import Path
from router.core.types import SessionKey


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a run depends on but the trace and the policy."""

    ranks: int = 8
    lanes: int = 64
    pool_tokens: int = 2_000_000
    slowdown: float = 1.0
    seed: int = 1
    warm_up_seconds: float = 1800.0
    window_seconds: float = 3600.0
    event_lag_seconds: float = 0.5
    host_ratio: float = 0.0
    slow_rank_factor: float = 1.0
    fail_at_seconds: float | None = None
    outage_seconds: float = 300.0
    speed_up: float = 1.0
    #: Tokens that the sliding-window layers see, 0 if there are none, and their pool in parts of ``pool_tokens``.
    window_tokens: int = 0
    window_pool_ratio: float = 0.1

    @property
    def end_seconds(self) -> float:
        """When the run is over."""
        return self.warm_up_seconds + self.window_seconds


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way: who asks what, and what became of it so far."""

    session: SessionKey | None
    path: Path
    prompt_tokens: int
    output_tokens: int
    done: Callable[[], None]
    lane: int
    is_main: bool = True
    arrived_at: float = 0.0
    sent_at: float = 0.0
    ideal_tokens: int = 0
    moved: bool = False
    had_home: bool = False
