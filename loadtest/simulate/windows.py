"""The sliding-window layers of a rank's cache: a prompt resumes only where the window before it is still there.

They have a pool of their own. Kept is the window at the end of each prompt, and at a point where prompts fork once it
is seen to be one: where the full-attention layers hold more of a prompt than the window lets it use, the prefill leaves
its window behind on the way. Everything else is freed as the window slides on. All counts are blocks.

No recorded prompt leaves a run in its middle, so one span for each run is enough: what is held of it is its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping

from loadtest.simulate.runs import Path, Run

#: Blocks of a run that are held: from the first, up to the second.
Span = tuple[int, int]
#: Called with a run and what is held of it from now on; None: nothing.
Told = Callable[[Run, Span | None], None]


def usable_blocks(path: Path, most: int, spans: Mapping[Run, Span], *, window: int) -> int:
    """The greatest depth, ``most`` at the utmost, with the whole window before it held, or all there is if shorter."""
    usable = depth = reach = 0
    for run, blocks in path:
        count = min(blocks, most - depth)
        if count <= 0:
            break
        low, high = spans.get(run, (0, 0))
        high = min(high, count)
        held = max(0, high - low)
        reach = reach + held if low == 0 else held
        if held and reach >= min(window, depth + high):
            usable = depth + high
        if high < blocks:
            reach = 0
        depth += count
    return usable


def believed_usable(path: Path, stored: Mapping[int, int], *, window: int) -> dict[int, int]:
    """Of what the full-attention layers of each slot are believed to hold, what its windows are to let it use."""
    return {
        slot: usable_blocks(path, blocks, {run: run.spans[slot] for run, _ in path if slot in run.spans}, window=window)
        for slot, blocks in stored.items()
    }


def window_before(path: Path, depth: int, *, window: int) -> Iterator[tuple[Run, Span]]:
    """The spans that make up the window before ``depth``, the last first."""
    starts, start = [], 0
    for _, blocks in path:
        starts.append(start)
        start += blocks
    for (run, blocks), start in zip(reversed(path), reversed(starts), strict=True):
        low, high = max(0, depth - window - start), min(blocks, depth - start)
        if low < high:
            yield run, (low, high)


class WindowCache:
    """Spans of runs in ``capacity`` blocks, least recently used first out; the windows of running requests stay."""

    def __init__(self, capacity: int, window: int, told: Told) -> None:
        self.capacity = capacity
        self.used = 0
        self.spans: dict[Run, Span] = {}
        self._window = window
        self._told = told
        self._pins: dict[Run, int] = {}
        self._idle: OrderedDict[Run, None] = OrderedDict()

    def usable(self, path: Path, most: int) -> int:
        """How much of a prompt can be reused, as far as these layers go, of ``most``."""
        return usable_blocks(path, most, self.spans, window=self._window)

    def has_room(self, path: Path, depth: int) -> bool:
        """Whether the window before ``depth`` fits beside those of running requests."""
        return self._fits(window_before(path, depth, window=self._window))

    def take(self, path: Path, depth: int, *, fork: int) -> None:
        """Hold the window before ``depth`` until it is given back; leave behind the one before ``fork`` (0: none)."""
        window = list(window_before(path, depth, window=self._window))
        for run, _ in window:
            self._pins[run] = self._pins.get(run, 0) + 1
            self._idle.pop(run, None)
        for run, span in window:
            self._hold(run, span)
        for run, span in window_before(path, fork, window=self._window):
            if self._fits([(run, span)]):
                self._hold(run, span)

    def give_back(self, path: Path, depth: int) -> None:
        """The request that took it is over."""
        for run, _ in window_before(path, depth, window=self._window):
            pins = self._pins[run] - 1
            if pins:
                self._pins[run] = pins
            else:
                del self._pins[run]
                self._idle[run] = None

    def _fits(self, spans: Iterable[tuple[Run, Span]]) -> bool:
        """Whether they do beside all that is in use."""
        pinned = sum(map(self._size, self._pins))
        added = sum(self._grown(run, span) - (self._size(run) if run in self._pins else 0) for run, span in spans)
        return pinned + added <= self.capacity

    def _hold(self, run: Run, span: Span) -> None:
        """Note what is held of a run, and evict others as needed."""
        merged = self._merged(run, span)
        self.used += merged[1] - merged[0] - self._size(run)
        self.spans[run] = merged
        if run not in self._pins:
            self._idle[run] = None
            self._idle.move_to_end(run)
        while self.used > self.capacity:
            evicted, _ = self._idle.popitem(last=False)
            self.used -= self._size(evicted)
            del self.spans[evicted]
            self._told(evicted, None)

    def _merged(self, run: Run, span: Span) -> Span:
        """What is held afterwards: no more than a window, at the later of both ends."""
        low, high = span
        held_low, held_high = self.spans.get(run, span)
        if high < held_low:
            return held_low, held_high
        if low <= held_high:
            low, high = min(low, held_low), max(high, held_high)
        return max(low, high - self._window), high

    def _grown(self, run: Run, span: Span) -> int:
        low, high = self._merged(run, span)
        return high - low

    def _size(self, run: Run) -> int:
        low, high = self.spans.get(run, (0, 0))
        return high - low
