"""How slow ranks must be for an infinite cache to need a given share of them."""

from __future__ import annotations

import itertools
import math

from loadtest.simulate.engine import prefill_work
from loadtest.simulate.runs import Path, Run, ever_blocks, remember
from loadtest.simulate.workload import Play, Recording, Shared, child_path, plays

#: Seconds a decode step takes on a quiet rank; prefill in between makes it a little longer.
_STEP_SECONDS = 0.025


def slowdown_for(
    recording: Recording, *, utilisation: float, ranks: int, lanes: int, seed: int, speed_up: float, seconds: float
) -> float:
    """The factor on full-speed prefill.

    The demand is that of each lane's first ``seconds``, with think time, replies and full-speed prefill for a cycle:
    a closed loop on ranks so slow will ask for less.
    """
    if recording.arrivals:
        busy, span = _open_demand(recording)
        return utilisation * ranks * span / speed_up / busy
    demands = [_lane_demand(recording, seed=seed, lane=lane, lanes=lanes, seconds=seconds) for lane in range(lanes)]
    return utilisation * ranks / sum(work / (work + idle) for work, idle in demands)


def _lane_demand(recording: Recording, *, seed: int, lane: int, lanes: int, seconds: float) -> tuple[float, float]:
    """Prefill seconds at full speed and all other seconds of a lane's first plays."""
    shared = Shared()
    work = idle = 0.0
    for play in itertools.islice(plays(recording, shared, seed=seed, lane=lane, lanes=lanes), 100):
        more_work, more_idle = _play_demand(play, shared, block_tokens=recording.block_tokens)
        work += more_work
        idle += more_idle
        if idle > seconds:
            break
    return work, idle


def _play_demand(play: Play, shared: Shared, *, block_tokens: int) -> tuple[float, float]:
    work = idle = 0.0

    def compute(path: Path, prompt_tokens: int) -> float:
        cached = min(ever_blocks(path), (prompt_tokens - 1) // block_tokens) * block_tokens
        remember(path)
        return prefill_work(prompt_tokens - cached, prompt_tokens)

    for turn in range(play.start, len(play.shape.turns)):
        shape = play.shape.turns[turn]
        work += compute(play.path(turn), shape.prompt_tokens)
        idle += shape.gap_seconds + _STEP_SECONDS * shape.output_tokens
        longest = 0.0
        for child in play.groups.get(turn, ()):
            own = Run()
            for prompt_tokens, _, _ in child.turns:
                path = child_path(shared.kinds[child.kind], own, prompt_tokens, block_tokens=block_tokens)
                work += compute(path, prompt_tokens)
            longest = max(longest, sum(gap + _STEP_SECONDS * output for _, output, gap in child.turns))
        idle += longest
    return work, idle


def _open_demand(recording: Recording) -> tuple[float, float]:
    """Prefill seconds at full speed and the span of an open-loop trace."""
    runs = [Run() for _ in range(recording.runs)]
    busy = 0.0
    for arrival in recording.arrivals:
        path = tuple((runs[number], blocks) for number, blocks in arrival.path)
        most = (arrival.prompt_tokens - 1) // recording.block_tokens
        cached = min(ever_blocks(path), most) * recording.block_tokens
        remember(path)
        busy += prefill_work(arrival.prompt_tokens - cached, arrival.prompt_tokens)
    return busy, max(recording.span_seconds, math.ulp(1.0))
