"""What a run is judged by. Only what happens within the window counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.simulate.engine import Job
from loadtest.simulate.scenario import Request


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of some seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class HoldSpread:
    """How long requests were held by admission; those that were not count as 0."""

    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy's run.

    ``turns_per_second`` counts finished turns of main conversations; hit rates are shares of all prompt tokens whose
    first token came in the window; ``imbalance`` is the largest over the mean of the ranks' seconds spent on prefill;
    ``moved_share`` is of requests whose session had a home; ``slowest_decile_progress`` is the tenth percentile of
    turns a lane over their mean.
    """

    policy: str
    turns_per_second: float
    hit_rate: float
    ideal_hit_rate: float
    ttft_seconds: Spread
    imbalance: float
    moved_share: float
    hold_seconds: HoldSpread
    slowest_decile_progress: float
    requests: int
    busy_share: float


class Meter:
    """Collects while the run is on; ``result`` afterwards."""

    def __init__(self, *, lanes: int, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._open = False
        self._ttft: list[float] = []
        self._held: list[float] = []
        self._turns: Counter[int] = Counter()
        self._lanes = lanes
        self._prompt_tokens = self._cached_tokens = self._ideal_tokens = 0
        self._with_home = self._moved = 0
        self._busy: Sequence[float] = ()

    def begin(self, busy_seconds: Sequence[float]) -> None:
        """The window opens."""
        self._open = True
        self._busy = busy_seconds

    def end(self, busy_seconds: Sequence[float]) -> None:
        """The window closes."""
        self._open = False
        self._busy = [after - before for before, after in zip(self._busy, busy_seconds, strict=True)]

    def first_token(self, request: Request, job: Job, *, now: float) -> None:
        """A prefill is over."""
        if not self._open:
            return
        self._ttft.append(now - request.arrived_at)
        self._held.append(request.sent_at - request.arrived_at)
        self._prompt_tokens += job.prompt_tokens
        self._cached_tokens += job.cached_tokens
        self._ideal_tokens += request.ideal_tokens
        self._with_home += request.had_home
        self._moved += request.moved

    def finished(self, request: Request, *, now: float) -> None:
        """A reply is over."""
        if self._open and request.is_main:
            self._turns[request.lane] += 1

    def result(self, policy: str) -> PolicyResult:
        """The run's figures."""
        ttft, held = sorted(self._ttft), sorted(self._held)
        progress = sorted(self._turns[lane] for lane in range(self._lanes)) if self._lanes else []
        mean_progress = sum(progress) / len(progress) if progress else 0.0
        mean_busy = sum(self._busy) / len(self._busy) if self._busy else 0.0
        return PolicyResult(
            policy=policy,
            turns_per_second=sum(self._turns.values()) / self._window_seconds,
            hit_rate=_ratio(self._cached_tokens, self._prompt_tokens),
            ideal_hit_rate=_ratio(self._ideal_tokens, self._prompt_tokens),
            ttft_seconds=Spread(
                mean=_ratio(math.fsum(ttft), len(ttft)),
                p50=quantile(ttft, 0.5),
                p90=quantile(ttft, 0.9),
                p99=quantile(ttft, 0.99),
            ),
            imbalance=_ratio(max(self._busy, default=0.0), mean_busy),
            moved_share=_ratio(self._moved, self._with_home),
            hold_seconds=HoldSpread(p99=quantile(held, 0.99), max=held[-1] if held else 0.0),
            slowest_decile_progress=_ratio(quantile(progress, 0.1), mean_progress),
            requests=len(ttft),
            busy_share=mean_busy / self._window_seconds,
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value at ``share`` of an ordered sequence, between neighbours linearly; 0 for an empty one."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
