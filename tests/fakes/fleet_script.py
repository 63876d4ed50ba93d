"""Scripted traffic through the simulator's world: the router's own decisions and admission before fluid engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loadtest.simulate.engine import Job
from loadtest.simulate.measure import Meter, quantile
from loadtest.simulate.runs import Path, Run
from loadtest.simulate.scenario import Request, Scenario
from loadtest.simulate.world import World
from router.core.types import SessionKey

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Served:
    """One first token. ``tag`` is whatever the script called the request."""

    tag: str
    slot: int
    at: float
    prompt_tokens: int
    cached_tokens: int
    ttft_seconds: float

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class _Recorder(Meter):
    def __init__(self) -> None:
        super().__init__(lanes=0, window_seconds=1.0)
        self.tags: dict[Request, str] = {}
        self.served: list[Served] = []

    def first_token(self, request: Request, job: Job, *, now: float) -> None:
        slot = request.path[-1][0].last  # where the prompt's own end was sent
        assert slot is not None
        waited = now - request.arrived_at
        self.served.append(
            Served(self.tags[request], slot, now, job.prompt_tokens, job.cached_tokens, ttft_seconds=waited)
        )


def prompt(*parts: tuple[Run, int]) -> Path:
    """A prompt of runs, each with the tokens of it that are used; whole blocks, and none of no block."""
    return tuple((run, tokens // BLOCK_TOKENS) for run, tokens in parts if tokens >= BLOCK_TOKENS)


class FleetScript:
    """Ask things at times, then ``run``, then look at what was ``served``."""

    def __init__(self, policy: str, *, seconds: float, ranks: int = 8, **scenario: float) -> None:
        self._recorder = _Recorder()
        settings = Scenario(ranks=ranks, warm_up_seconds=0.0, window_seconds=seconds, **scenario)  # type: ignore[arg-type]
        self.world = World(settings, policy, block_tokens=BLOCK_TOKENS, meter=self._recorder)

    def ask(
        self,
        at: float,
        tag: str,
        path: Path,
        *,
        session: str | None = None,
        agent: str = "",
        output_tokens: int = 100,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """One request at a time; ``done`` is called when it is answered."""
        request = Request(
            session=None if session is None else SessionKey("", session, agent),
            path=path,
            prompt_tokens=sum(blocks for _, blocks in path) * BLOCK_TOKENS + 10,
            output_tokens=output_tokens,
            done=done,
            lane=0,
        )
        self._recorder.tags[request] = tag
        self.world.at(at, lambda: self.world.ask(request))

    def converse(
        self, at: float, tag: str, turns: Sequence[Path], *, session: str | None, gap_seconds: float = 1.0
    ) -> None:
        """A conversation from ``at`` on: the next turn so long after the last one's answer."""
        if turns:
            path, *rest = turns
            after = lambda: self.converse(  # noqa: E731
                self.world.now + gap_seconds, tag, rest, session=session, gap_seconds=gap_seconds
            )
            self.ask(at, tag, path, session=session, done=after)

    def run(self) -> list[Served]:
        """Let the time pass."""
        self.world.run()
        return self._recorder.served


def tagged(served: Iterable[Served], tag: str) -> list[Served]:
    """Those whose tag begins so."""
    return [one for one in served if one.tag.startswith(tag)]


def computed(served: Iterable[Served]) -> int:
    """Prompt tokens that were not reused."""
    return sum(one.computed_tokens for one in served)


def imbalance(served: Iterable[Served], *, ranks: int = 8) -> float:
    """The largest over the mean of the ranks' computed tokens; 1 is even."""
    load: Counter[int] = Counter()
    for one in served:
        load[one.slot] += one.computed_tokens
    return max(load.values()) * ranks / load.total()


def ttft(served: Iterable[Served], share: float) -> float:
    """A quantile of the seconds to the first token."""
    return quantile(sorted(one.ttft_seconds for one in served), share)


def hit_rate(served: Iterable[Served]) -> float:
    """Share of the prompt tokens that were reused."""
    asked = list(served)
    return 1.0 - computed(asked) / sum(one.prompt_tokens for one in asked)
